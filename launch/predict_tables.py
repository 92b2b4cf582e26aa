"""What a device and its links take, as predict.py needs it, and the JSON file that holds it.

A tables file is one object; all times are seconds, on one rank, of a kernel that runs alone:

    {"name": "two-cards",
     "sources": ["where the numbers come from", ...],
     "shape": "qwen3.8-27b", "ranks": 2,                    the model and the split that the times below are of
     "mixer": [[tokens, seconds], ...],                     one layer up to its first all-reduce, attention left out
     "mlp": [[tokens, seconds], ...],                       from there to the second
     "dequantization": {"mixer": seconds, "mlp": seconds,   of one layer's weights; or null
                        "per": "piece" | "chunk"},          whether pieces of one batch share its result
     "attention": {"points": [[tokens, keys before them, seconds], ...]}     one layer; or
                  {"waves": {"slots": 72, "rows": 128, "max_splits": 4, "seconds_per_key": 1.4e-7}},
     "transports": {"NCCL": {"all_reduce": [[bytes, seconds], ...],
                             "beside_compute": 1.0,         factor on those seconds beside compute
                             "issue": 5e-5,                 what the host needs to issue one, and to hand over
                             "slowdown": {"linear": 0.18, "dequantization": 0.22, "attention": 0.18}}, ...},
     "host": {"mixer": 2e-4, "attention": 6e-4, "mlp": 1e-4},   what the host needs to issue a piece's mixer, without
                                                            and with attention, and MLP; null: it is always ahead
     "hand_over": 2.3e-5,                                   what a further piece adds to a segment
     "per_chunk": 1e-4, "per_prompt": 2e-4}                 outside of the layers: embedding and last norm; logits

The first transport is the one that a serial run uses, the last one is ours. "slowdown" says by which part of itself a
kernel takes longer beside that transport's all-reduces. Between points times are linear (see :class:`Curve`).

A benchmark's record carries the same beside what it measured: see predict_records.py.
"""

from __future__ import annotations

import bisect
import itertools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast, get_args

from tpoverlap.errors import ConfigError

Kernel = Literal["linear", "dequantization", "attention"]
KERNELS: tuple[Kernel, ...] = get_args(Kernel)
_FIELDS = (
    "name",
    "sources",
    "shape",
    "ranks",
    "mixer",
    "mlp",
    "dequantization",
    "attention",
    "transports",
    "host",
    "hand_over",
    "per_chunk",
    "per_prompt",
)


@dataclass(frozen=True)
class Curve:
    """Seconds over a quantity, linear between points of ascending quantities.

    Above the last point its last line goes on. Below the first one a line leads to where the first line meets zero
    quantity, or to 0 s where that is negative. A single point is a proportion.
    """

    points: tuple[tuple[float, float], ...]

    def at(self, x: float) -> float:
        points = self.points
        if len(points) == 1:
            return points[0][1] * x / points[0][0]
        if x < points[0][0]:
            points = ((0.0, max(0.0, _line(points[0], points[1], 0.0))), points[0])
        i = min(bisect.bisect_right(points, x, key=lambda point: point[0]), len(points) - 1)
        return _line(points[i - 1], points[i], x)


@dataclass(frozen=True)
class WaveAttention:
    """A kernel whose blocks of ``rows`` packed query rows fill the device's ``slots`` in waves.

    A wave takes ``seconds_per_key`` for each key that its blocks read, on average over their tokens, at the head
    dimension of the tables' model. The keys may be cut into 1 to ``max_splits`` parts, each a block of its own; the
    count is the one that fills the waves best (split-KV).
    """

    slots: int
    rows: int
    max_splits: int
    seconds_per_key: float

    def waves(self, blocks: int) -> float:
        return min(math.ceil(blocks * parts / self.slots) / parts for parts in range(1, self.max_splits + 1))


@dataclass(frozen=True)
class PointAttention:
    """Measured times: (tokens, keys before them, seconds). Linear in both; see :class:`Curve`."""

    points: tuple[tuple[int, int, float], ...]

    def at(self, tokens: int, context: int) -> float:
        by_tokens = []
        for count in sorted({point[0] for point in self.points}):
            # A token reads the keys before its chunk and half of the chunk's own.
            keys = sorted((before + count / 2, seconds) for n, before, seconds in self.points if n == count)
            by_tokens.append((float(count), Curve(tuple(keys)).at(context + count / 2)))
        return Curve(tuple(by_tokens)).at(tokens)


@dataclass(frozen=True)
class Transport:
    """Fields are those of the file. all_reduce: over payload bytes."""

    all_reduce: Curve
    beside_compute: float
    slowdown: Mapping[Kernel, float]
    issue: float = 0.0


@dataclass(frozen=True)
class Host:
    mixer: float
    attention: float
    mlp: float


@dataclass(frozen=True)
class Dequantization:
    mixer: float
    mlp: float
    per: Literal["piece", "chunk"]


@dataclass(frozen=True)
class DeviceTables:
    """Fields are those of the file. mixer, mlp: over tokens."""

    name: str
    sources: tuple[str, ...]
    shape: str
    ranks: int
    mixer: Curve
    mlp: Curve
    dequantization: Dequantization | None
    attention: WaveAttention | PointAttention
    transports: Mapping[str, Transport]
    hand_over: float
    host: Host | None = None
    per_chunk: float = 0.0
    per_prompt: float = 0.0


def read_tables(path: Path) -> DeviceTables:
    """ConfigError that names the file and the field which is missing or not as the schema says."""
    try:
        return from_json(json.loads(path.read_text(encoding="utf-8")))
    except OSError as error:
        raise ConfigError(f"the tables {path} cannot be read: {error.strerror or error}") from error
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{path} is no JSON file ({error}): give tables as launch/predict_tables.py describes them"
        ) from error
    except ValueError as error:  # ConfigError among them
        raise ConfigError(f"{path}: {error}") from error


def from_json(given: Any) -> DeviceTables:
    """Checks an object of the schema above. ConfigError that names the field at fault."""
    given = _object("tables", given, _FIELDS)
    attention = given["attention"]
    if not isinstance(attention, dict) or len(attention) != 1 or next(iter(attention)) not in ("points", "waves"):
        raise ConfigError(f'attention must be {{"points": [...]}} or {{"waves": {{...}}}}, got {attention!r}')
    transports = given["transports"]
    if not isinstance(transports, dict) or not transports:
        raise ConfigError(f"transports must name at least one, got {transports!r}")
    sources = given["sources"]
    if not isinstance(sources, list) or not sources or not all(isinstance(source, str) for source in sources):
        raise ConfigError(f"sources must be sentences that say where the numbers come from, got {sources!r}")
    return DeviceTables(
        name=_text("name", given["name"]),
        sources=tuple(sources),
        shape=_text("shape", given["shape"]),
        ranks=_integer("ranks", given["ranks"], 2),
        mixer=_curve("mixer", given["mixer"]),
        mlp=_curve("mlp", given["mlp"]),
        dequantization=_dequantization(given["dequantization"]),
        attention=_waves(attention["waves"]) if "waves" in attention else _attention_points(attention["points"]),
        transports={name: _transport(name, transport) for name, transport in transports.items()},
        host=_host(given["host"]),
        **{field: _number(field, given[field]) for field in ("hand_over", "per_chunk", "per_prompt")},
    )


def to_json(tables: DeviceTables) -> dict[str, Any]:
    """The object that :func:`from_json` reads."""
    attention: dict[str, Any]
    if isinstance(tables.attention, WaveAttention):
        attention = {"waves": dict(vars(tables.attention))}
    else:
        attention = {"points": [list(point) for point in tables.attention.points]}
    return {
        "name": tables.name,
        "sources": list(tables.sources),
        "shape": tables.shape,
        "ranks": tables.ranks,
        "mixer": [list(point) for point in tables.mixer.points],
        "mlp": [list(point) for point in tables.mlp.points],
        "dequantization": None if tables.dequantization is None else dict(vars(tables.dequantization)),
        "attention": attention,
        "transports": {
            name: {
                "all_reduce": [list(point) for point in transport.all_reduce.points],
                "beside_compute": transport.beside_compute,
                "issue": transport.issue,
                "slowdown": dict(transport.slowdown),
            }
            for name, transport in tables.transports.items()
        },
        "host": None if tables.host is None else dict(vars(tables.host)),
        "hand_over": tables.hand_over,
        "per_chunk": tables.per_chunk,
        "per_prompt": tables.per_prompt,
    }


def _line(a: tuple[float, float], b: tuple[float, float], x: float) -> float:
    return a[1] + (b[1] - a[1]) * (x - a[0]) / (b[0] - a[0])


def _object(name: str, given: Any, fields: Sequence[str]) -> dict[str, Any]:
    if not isinstance(given, dict) or set(given) != set(fields):
        found = sorted(given) if isinstance(given, dict) else repr(given)
        raise ConfigError(f"{name} must be an object with exactly the fields {sorted(fields)}, got {found}")
    return given


def _text(name: str, given: Any) -> str:
    if not isinstance(given, str) or not given:
        raise ConfigError(f"{name} must be a string, got {given!r}")
    return given


def _integer(name: str, given: Any, low: int) -> int:
    if not isinstance(given, int) or isinstance(given, bool) or given < low:
        raise ConfigError(f"{name} must be an integer >= {low}, got {given!r}")
    return given


def _number(name: str, given: Any, *, positive: bool = False) -> float:
    number = isinstance(given, int | float) and not isinstance(given, bool) and math.isfinite(given)
    if not number or given < 0 or (positive and given == 0):
        raise ConfigError(f"{name} must be a finite number {'>' if positive else '>='} 0, got {given!r}")
    return float(given)


def _rows(name: str, given: Any, width: int) -> list[list[Any]]:
    rows = isinstance(given, list) and bool(given) and all(isinstance(row, list) and len(row) == width for row in given)
    if not rows:
        raise ConfigError(f"{name} must be a list of at least one list of {width} numbers, got {given!r}")
    return cast(list[list[Any]], given)


def _curve(name: str, given: Any) -> Curve:
    points = tuple(
        (_number(name, x, positive=True), _number(name, seconds, positive=True)) for x, seconds in _rows(name, given, 2)
    )
    if any(b[0] <= a[0] for a, b in itertools.pairwise(points)):
        raise ConfigError(f"{name} needs points in ascending order, each quantity once, got {given!r}")
    return Curve(points)


def _attention_points(given: Any) -> PointAttention:
    name = "attention.points"
    points = tuple(
        (_integer(name, n, 1), _integer(name, before, 0), _number(name, seconds, positive=True))
        for n, before, seconds in _rows(name, given, 3)
    )
    if len({point[:2] for point in points}) != len(points):
        raise ConfigError(f"{name} must give each pair of tokens and keys before them once, got {given!r}")
    return PointAttention(points)


def _waves(given: Any) -> WaveAttention:
    name = "attention.waves"
    given = _object(name, given, ("slots", "rows", "max_splits", "seconds_per_key"))
    return WaveAttention(
        **{field: _integer(f"{name}.{field}", given[field], 1) for field in ("slots", "rows", "max_splits")},
        seconds_per_key=_number(f"{name}.seconds_per_key", given["seconds_per_key"], positive=True),
    )


def _dequantization(given: Any) -> Dequantization | None:
    if given is None:
        return None
    given = _object("dequantization", given, ("mixer", "mlp", "per"))
    if given["per"] not in ("piece", "chunk"):
        raise ConfigError(f'dequantization.per must be "piece" or "chunk", got {given["per"]!r}')
    mixer, mlp = (_number(f"dequantization.{part}", given[part]) for part in ("mixer", "mlp"))
    return Dequantization(mixer, mlp, given["per"])


def _host(given: Any) -> Host | None:
    if given is None:
        return None
    given = _object("host", given, ("mixer", "attention", "mlp"))
    return Host(**{part: _number(f"host.{part}", seconds) for part, seconds in given.items()})


def _transport(name: str, given: Any) -> Transport:
    name = f"transports.{name}"
    given = _object(name, given, ("all_reduce", "beside_compute", "issue", "slowdown"))
    slowdown = _object(f"{name}.slowdown", given["slowdown"], KERNELS)
    return Transport(
        all_reduce=_curve(f"{name}.all_reduce", given["all_reduce"]),
        beside_compute=_number(f"{name}.beside_compute", given["beside_compute"], positive=True),
        slowdown={kernel: _number(f"{name}.slowdown.{kernel}", slowdown[kernel]) for kernel in KERNELS},
        issue=_number(f"{name}.issue", given["issue"]),
    )
