"""Prediction tables inside a benchmark's record, beside the prefills that they should predict.

A record of :mod:`bench_common` (docs/benchmarks/prefill_<hardware>_<date>.json) holds two tables for each choice of
kernels that its arms make, ``name`` being that of the choice's :class:`~predict_tables.DeviceTables`:

- "Prediction tables: name", columns quantity, at, keys before, value. A row for each point or number of the schema in
  :mod:`predict_tables`: ("mixer", tokens, None, seconds), ("attention", tokens, keys before, seconds),
  ("NCCL: all_reduce", bytes, None, seconds), ("NCCL: slowdown.linear", None, None, 0.12), ("ranks", None, None, 2), ...
- "Measured prefills: name", columns transport, pieces, tokens, chunk, seconds: median times in equal pieces, 1 for a
  chunk that runs whole.

A benchmark makes them by :func:`to_record`, from what it timed in the same launch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import astuple, dataclass
from typing import Any

from predict_model import SHAPES, Predictor
from predict_tables import KERNELS, DeviceTables, WaveAttention, from_json, to_json

from tpoverlap.errors import ConfigError

TABLES_TITLE, TABLES_COLUMNS = "Prediction tables", ["quantity", "at", "keys before", "value"]
MEASURED_TITLE, MEASURED_COLUMNS = "Measured prefills", ["transport", "pieces", "tokens", "chunk", "seconds"]
_PARTS = ("dequantization", "host")
_SINGLE = ("name", "shape", "ranks", "hand_over", "per_chunk", "per_prompt")
Table = dict[str, Any]


@dataclass(frozen=True)
class Measured:
    """Median seconds of a prompt's prefill in chunks, each in ``pieces`` equal pieces."""

    transport: str
    pieces: int
    tokens: int
    chunk: int
    seconds: float


def to_record(tables: DeviceTables, measured: Iterable[Measured]) -> list[Table]:
    """The two tables for :func:`bench_common.write_json`. ValueError for attention by waves: a benchmark has points."""
    if isinstance(tables.attention, WaveAttention):
        raise ValueError("a record holds measured points of attention, not a model of its waves")
    given = to_json(tables)
    rows: list[list[Any]] = [[field, None, None, given[field]] for field in _SINGLE]
    rows += [["source", None, None, source] for source in given["sources"]]
    rows += [[part, x, None, seconds] for part in ("mixer", "mlp") for x, seconds in given[part]]
    rows += [["attention", *point] for point in given["attention"]["points"]]
    rows += [[f"{part}.{field}", None, None, v] for part in _PARTS for field, v in (given[part] or {}).items()]
    for name, transport in given["transports"].items():
        rows += [[f"{name}: all_reduce", x, None, seconds] for x, seconds in transport["all_reduce"]]
        rows += [[f"{name}: {field}", None, None, transport[field]] for field in ("beside_compute", "issue")]
        rows += [[f"{name}: slowdown.{kernel}", None, None, v] for kernel, v in transport["slowdown"].items()]
    return [
        {"title": f"{TABLES_TITLE}: {tables.name}", "columns": TABLES_COLUMNS, "rows": rows},
        {
            "title": f"{MEASURED_TITLE}: {tables.name}",
            "columns": MEASURED_COLUMNS,
            "rows": [list(astuple(one)) for one in measured],
        },
    ]


def from_record(record: Mapping[str, Any]) -> list[tuple[DeviceTables, list[Measured]]]:
    """What :func:`to_record` put into a record, each time. ConfigError that says what is missing or wrong."""
    prefix = f"{TABLES_TITLE}: "
    names = [table["title"].removeprefix(prefix) for table in record["tables"] if table["title"].startswith(prefix)]
    if not names:
        raise ConfigError(f'a record that can be predicted has tables "{prefix}...", this one has none')
    return [_of_name(record, name) for name in names]


def compare(record: Mapping[str, Any]) -> list[tuple[Measured, float]]:
    """Every measured prefill of a record, and the seconds that its tables predict. ConfigError as above."""
    return [(one, predicted_s(tables, one)) for tables, measured in from_record(record) for one in measured]


def predicted_s(tables: DeviceTables, one: Measured) -> float:
    """Seconds of that prefill. ConfigError for tables of a model that is not known, or without its transport."""
    if tables.shape not in SHAPES:
        raise ConfigError(f"the tables are of shape {tables.shape!r}, known are {', '.join(SHAPES)}")
    predictor = Predictor(SHAPES[tables.shape], tables, tables.ranks)
    return predictor.prefill(one.transport, one.tokens, one.chunk, one.pieces).seconds


def _of_name(record: Mapping[str, Any], name: str) -> tuple[DeviceTables, list[Measured]]:
    given: dict[str, Any] = {"sources": [], "mixer": [], "mlp": [], **dict.fromkeys(_PARTS)}
    given |= {"attention": {"points": []}, "transports": {}}
    for quantity, at, context, value in _rows(record, f"{TABLES_TITLE}: {name}", TABLES_COLUMNS):
        transport, separator, field = quantity.rpartition(": ")
        if separator:
            empty: dict[str, Any] = {"all_reduce": [], "slowdown": {}, "issue": 0.0}  # earlier records have no issue
            of_transport = given["transports"].setdefault(transport, empty)
            kernel = field.removeprefix("slowdown.")
            if field == "all_reduce":
                of_transport["all_reduce"].append([at, value])
            elif kernel in KERNELS:
                of_transport["slowdown"][kernel] = value
            else:
                of_transport[field] = value
        elif quantity in ("mixer", "mlp"):
            given[quantity].append([at, value])
        elif quantity == "attention":
            given["attention"]["points"].append([at, context, value])
        elif quantity == "source":
            given["sources"].append(value)
        elif (part := quantity.partition("."))[0] in _PARTS:
            given[part[0]] = {**(given[part[0]] or {}), part[2]: value}
        else:
            given[quantity] = value
    measured = [Measured(*row) for row in _rows(record, f"{MEASURED_TITLE}: {name}", MEASURED_COLUMNS)]
    if not measured:
        raise ConfigError(f'the table "{MEASURED_TITLE}: {name}" has no rows: there is nothing to predict')
    return from_json(given), measured


def _rows(record: Mapping[str, Any], title: str, columns: list[str]) -> list[list[Any]]:
    found = [table for table in record["tables"] if table["title"] == title]
    if len(found) != 1 or found[0]["columns"] != columns:
        raise ConfigError(f'a record that can be predicted has one table "{title}" with the columns {columns}')
    rows: list[list[Any]] = found[0]["rows"]
    return rows
