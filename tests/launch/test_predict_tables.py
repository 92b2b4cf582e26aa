"""Tables of device times: interpolation, waves of blocks, the file and record that hold them, and their mistakes."""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "launch"))

import predict_h200
import predict_reference
from bench_common import check_record
from predict_records import Measured, compare, from_record, to_record
from predict_tables import Curve, Dequantization, Host, PointAttention, WaveAttention, from_json, read_tables, to_json

from tpoverlap.errors import ConfigError

MEASURED = replace(
    predict_h200.tables(1.3),
    dequantization=Dequantization(1e-4, 2e-4, "chunk"),
    host=Host(2e-4, 6e-4, 1e-4),
    transports={name: replace(t, issue=5e-5) for name, t in predict_h200.tables(1.3).transports.items()},
)


def given_tables() -> dict[str, Any]:
    return copy.deepcopy(to_json(MEASURED))


def test_curves_go_through_their_points_and_on_along_their_lines() -> None:
    curve = Curve(((10.0, 3.0), (20.0, 4.0), (40.0, 10.0)))
    assert [curve.at(x) for x in (10, 15, 20, 30, 40, 50)] == pytest.approx([3, 3.5, 4, 7, 10, 13])
    assert [curve.at(x) for x in (0, 5)] == pytest.approx([2, 2.5])
    assert Curve(((10.0, 1.0), (20.0, 4.0))).at(5) == 0.5  # its line would be negative at 0
    assert Curve(((8.0, 2.0),)).at(4) == 1.0


@given(
    points=st.lists(
        st.tuples(st.integers(1, 10**6), st.floats(1e-6, 10)), min_size=1, max_size=6, unique_by=lambda p: p[0]
    ),
    x=st.floats(1, 2e6),
)
def test_a_rising_curve_stays_positive_and_rising(points: list[tuple[int, float]], x: float) -> None:
    rising = list(zip(sorted(p[0] for p in points), sorted(p[1] for p in points), strict=True))
    curve = Curve(tuple((float(a), b) for a, b in rising))
    assert 0 <= curve.at(x) <= curve.at(x * 1.1) + 1e-9


def test_waves_of_the_reference_card() -> None:
    unsplit, split = WaveAttention(72, 128, 1, 1e-7), WaveAttention(72, 128, 4, 1e-7)
    assert [unsplit.waves(150), split.waves(150)] == [3, 2.25]
    assert [unsplit.waves(76), split.waves(76)] == [2, 1.25]
    assert [unsplit.waves(72), split.waves(72)] == [1, 1]
    assert split.waves(18) == 0.25


def test_attention_points_are_met_and_joined_linearly() -> None:
    # seconds = tokens * (keys before + tokens / 2), which is linear in the keys; halfway between token counts the mean.
    points = PointAttention(tuple((n, c, n * (c + n / 2)) for n in (100, 300) for c in (0, 1000)))
    assert points.at(100, 1000) == pytest.approx(100 * 1050)
    assert points.at(300, 5000) == pytest.approx(300 * 5150)
    assert points.at(200, 500) == pytest.approx((100 * 550 + 300 * 650) / 2)
    assert PointAttention(((100, 900, 0.95),)).at(100, 1850) == pytest.approx(1.9)  # in proportion to 950 keys


@pytest.mark.parametrize("tables", [MEASURED, predict_reference.tables_with(500)], ids=["points", "waves"])
def test_a_file_gives_back_what_was_written(tables: Any, tmp_path: Path) -> None:
    path = tmp_path / "tables.json"
    path.write_text(json.dumps(to_json(tables)))
    assert read_tables(path) == tables


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("ranks"), "tables must be an object with exactly the fields"),
        (lambda t: t.update(extra=1), "exactly the fields"),
        (lambda t: t.update(ranks=1), "ranks must be an integer >= 2, got 1"),
        (lambda t: t.update(name=""), "name must be a string"),
        (lambda t: t.update(sources=[]), "sources must be sentences"),
        (lambda t: t.update(mixer=[]), "mixer must be a list of at least one list of 2 numbers"),
        (lambda t: t.update(mixer=[[1600, "fast"]]), "mixer must be a finite number > 0, got 'fast'"),
        (lambda t: t.update(mlp=[[2, 1.0], [1, 2.0]]), "mlp needs points in ascending order"),
        (lambda t: t.update(mlp=[[2, 0.0]]), "mlp must be a finite number > 0"),
        (lambda t: t.update(hand_over=float("nan")), "hand_over must be a finite number >= 0, got nan"),
        (lambda t: t.update(hand_over=True), "hand_over must be a finite number"),
        (lambda t: t.update(attention={}), "attention must be"),
        (lambda t: t.update(attention={"points": [[1, 2, 3], [1, 2, 4]]}), "each pair of tokens and keys"),
        (lambda t: t.update(attention={"points": [[0, 2, 3]]}), "attention.points must be an integer >= 1"),
        (lambda t: t.update(attention={"waves": {"slots": 72}}), "attention.waves must be an object"),
        (lambda t: t["dequantization"].update(per="layer"), 'dequantization.per must be "piece" or "chunk"'),
        (lambda t: t["dequantization"].update(mlp=-1), "dequantization.mlp must be a finite number >= 0"),
        (lambda t: t["host"].pop("mlp"), "host must be an object with exactly the fields"),
        (lambda t: t["host"].update(mixer=None), "host.mixer must be a finite number >= 0"),
        (lambda t: t["transports"]["NCCL"].update(issue=-1), "transports.NCCL.issue must be a finite number >= 0"),
        (lambda t: t.update(transports={}), "transports must name at least one"),
        (lambda t: t["transports"]["NCCL"].pop("slowdown"), "transports.NCCL must be an object"),
        (lambda t: t["transports"]["NCCL"].update(beside_compute=0), "transports.NCCL.beside_compute"),
        (lambda t: t["transports"]["NCCL"]["slowdown"].pop("linear"), "transports.NCCL.slowdown must be"),
    ],
)
def test_mistakes_are_named(change: Callable[[dict[str, Any]], object], message: str, tmp_path: Path) -> None:
    tables = given_tables()
    assert from_json(tables) == MEASURED
    change(tables)
    path = tmp_path / "tables.json"
    path.write_text(json.dumps(tables))
    with pytest.raises(ConfigError, match=r"tables\.json: ") as caught:
        read_tables(path)
    assert message in str(caught.value)


def test_files_that_are_none_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"the tables .*missing\.json cannot be read"):
        read_tables(tmp_path / "missing.json")
    (tmp_path / "broken.json").write_text("{")
    with pytest.raises(ConfigError, match=r"broken\.json is no JSON file \(Expecting"):
        read_tables(tmp_path / "broken.json")


def record(measured: list[Measured]) -> dict[str, Any]:
    made = {
        "what": "prefill",
        "date": "2026-01-31",
        "command": "torchrun launch/bench_x.py",
        "commit": "abc",
        "hardware": {},
        "versions": {},
        "notes": [],
        "tables": to_record(MEASURED, measured),
        "figures": {},
    }
    check_record(made)
    return made


def test_a_record_gives_back_tables_and_measured_prefills() -> None:
    measured = [Measured("NCCL", 1, 4096, 2048, 1.5), Measured("copy engines", 2, 4096, 2048, 1.0)]
    made = record(measured)
    assert from_record(made) == [(MEASURED, measured)]
    assert [one for one, _ in compare(made)] == measured
    plain = {**made, "tables": to_record(replace(MEASURED, dequantization=None), measured)}
    assert from_record(plain)[0][0].dequantization is None
    other = replace(MEASURED, name="other kernels", hand_over=1e-5, per_chunk=1e-3, per_prompt=2e-3)
    both = {**made, "tables": [*made["tables"], *to_record(other, measured[:1])]}
    assert from_record(both) == [(MEASURED, measured), (other, measured[:1])]
    first, _, slower = (seconds for _, seconds in compare(both))
    assert slower == pytest.approx(first + 2 * 1e-3 + 2e-3)  # two chunks, each whole


def test_records_that_cannot_be_predicted_say_why() -> None:
    good = record([Measured("NCCL", 1, 4096, 2048, 1.5)])
    with pytest.raises(ConfigError, match=r"has tables .Prediction tables: .*, this one has none"):
        from_record({**good, "tables": good["tables"][1:]})
    with pytest.raises(ConfigError, match=f'has one table "Measured prefills: {MEASURED.name}" with the columns'):
        from_record({**good, "tables": good["tables"][:1]})
    with pytest.raises(ConfigError, match="no rows"):
        from_record(record([]))
    broken = copy.deepcopy(good)
    broken["tables"][0]["rows"] = [row for row in broken["tables"][0]["rows"] if row[0] != "mlp"]
    with pytest.raises(ConfigError, match="mlp must be a list of at least one"):
        from_record(broken)
    with pytest.raises(ConfigError, match="'pigeon': give one of NCCL, copy engines"):
        compare(record([Measured("pigeon", 1, 4096, 2048, 1.5)]))
    with pytest.raises(ValueError, match="measured points"):
        to_record(predict_reference.tables_with(500), [])
