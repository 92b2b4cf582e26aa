"""The layer benchmark: its bounds and goals, its options, and a short run on CPU ranks."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "launch"))

from bench_common import ROOT, Comparison, check_record
from bench_layers import parse_options
from layer_report import Measured, figures, missed, tables
from layer_trials import PIECES, HostCosts

SERVED = ("NCCL", "copy engines")


def measured(**changed: float) -> Measured:
    """1 layer, 2 turns; seconds of all arms, those in ``changed`` with _ for what stands between words."""
    seconds: dict[str, float] = {}
    for transport in SERVED:
        seconds[f"serial, {transport}"] = 10.0
        for way in (*(f"{n} pieces" for n in PIECES), "auto"):
            seconds[f"{way}, {transport}"] = 6.0
        seconds |= {f"communication, {n} pieces, {transport}": 4.0 for n in PIECES}
    for n in PIECES:
        seconds |= {f"attention compute, {n} pieces": 1.0, f"mlp compute, {n} pieces": 3.0}
    seconds |= {name.replace("_", " ").replace(" of ", ", "): value for name, value in changed.items()}
    times = Comparison({name: (value, 2 * value) for name, value in seconds.items()})
    host = [HostCosts("auto, copy engines", 3, 1e-3, 2e-5, 1e-4)]
    return Measured(2048, 1, SERVED, times, host)


def test_the_bound_is_that_of_two_queues() -> None:
    # A piece's attention takes 0.5, its MLP 1.5, an all-reduce 1. The first MLP waits until 1.5.
    bound = measured().with_bounds.turns["bound, 2 pieces, copy engines"]
    assert bound == pytest.approx((5.5, 11.0))


def test_goals_are_checked_against_the_best_number_of_pieces() -> None:
    found = measured(**{"3_pieces_of_copy_engines": 5.0})
    assert found.best == "3 pieces, copy engines"
    assert missed([found]) == [
        "2048 tokens: 2 pieces, copy engines / bound, 2 pieces, copy engines is 1.091, the goal is 1.05",
        "2048 tokens: auto, copy engines / 3 pieces, copy engines is 1.200, the goal is 1.03",
    ]
    with_peer = measured(**{"3_pieces_of_copy_engines": 7.0, "serial_of_NCCL_with_P2P": 5.0})
    assert [line.split(" is ")[0] for line in missed([with_peer])][-1].endswith("serial, NCCL with P2P")
    made = figures([found])
    assert made["best_over_serial_2048"] == 0.5
    assert (made["best_pieces_2048"], made["auto_pieces_2048"]) == ("3", 3)
    assert [table["title"] for table in tables([found])] == ["2048 tokens", "2048 tokens: host", "Ratios"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tokens", "511"], "512 or more"),
        (["--layers", "0"], "1 to"),
        (["--ranks", "1"], "2 to 8"),
        (["--warmup", "1"], "at least 2"),
        (["--json", "/nowhere/at/all.json"], "does not exist"),
    ],
)
def test_bad_options_are_refused(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        parse_options(["--device", "cpu", *arguments])
    assert message in capsys.readouterr().err


def test_a_short_run_on_cpu_ranks_leaves_a_record(tmp_path: Path) -> None:
    file = tmp_path / "record.json"
    command = [sys.executable, str(ROOT / "launch" / "bench_layers.py"), "--device", "cpu", "--shape", "tiny"]
    command += ["--layers", "1", "--tokens", "512", "--repetitions", "1", "--warmup", "2", "--json", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    record = json.loads(file.read_text())
    check_record(record)
    assert record["what"] == "layers"
    arms = [row[0] for row in record["tables"][0]["rows"]]
    assert {"serial, gloo", "4 pieces, channel", "auto, channel", "bound, 3 pieces, gloo"} <= set(arms)
    assert record["figures"]["best_over_serial_512"] > 0
