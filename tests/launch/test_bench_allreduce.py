"""The all-reduce benchmark: its arithmetic, its checks, and a short run of each way to start it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "launch"))

from allreduce_contest import ExtraMeasurement, Measurement, Ratio, WrongResultError, slowest_rank
from allreduce_cpu import Payload, calls_of_turn, goal
from allreduce_report import figures, missed, size_name, tables, write_plot
from bench_allreduce import parse_options, parse_size
from bench_common import ROOT, Comparison, check_record
from job_world import World


@pytest.mark.parametrize(
    ("text", "size"),
    [("4KiB", 4096), ("1MiB", 1 << 20), ("1 mib", 1 << 20), ("100000", 100_000), ("8B", 8), ("2GiB", 2 << 30)],
)
def test_sizes_are_read(text: str, size: int) -> None:
    assert parse_size(text, 4) == size


@pytest.mark.parametrize("text", ["", "0", "6", "-4", "4kb", "1.5MiB", "MiB", "4KiB8"])
def test_other_sizes_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="give a multiple of 4 bytes"):
        parse_size(text, 4)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--ranks", "1"], "numbers from 2 to 8"),
        (["--ranks", "2", "9"], "numbers from 2 to 8"),
        (["--sizes", "7"], "multiple of 4"),
        (["--repetitions", "0"], "at least 1"),
        (["--parts", "host"], "needs --device cuda"),
        (["--plot", "plot.doc"], "ends with .png"),
        (["--json", "/nowhere/at/all.json"], "does not exist"),
    ],
)
def test_bad_options_are_refused(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        parse_options(arguments)
    assert message in capsys.readouterr().err


def test_host_times_have_payloads_of_their_own(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert parse_options(["--device", "cuda", "--parts", "host"]).sizes == ()
    for unfit in (["--sizes", "1MiB"], ["--plot", "plot.png"], ["--gates"]):
        with pytest.raises(SystemExit):
            parse_options(["--device", "cuda", "--parts", "host", *unfit])
        assert "leave --sizes" in capsys.readouterr().err


def test_ranks_are_started_by_torchrun_or_here_but_not_by_both(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert parse_options([]).ranks == (2, 4, 8)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert parse_options([]).ranks == ()
    with pytest.raises(SystemExit):
        parse_options(["--ranks", "4"])
    assert "give one of both" in capsys.readouterr().err


def test_a_turn_takes_as_long_as_its_slowest_rank() -> None:
    ranks = [Comparison({"a": (1.0, 5.0), "b": (2.0, 2.0)}), Comparison({"a": (3.0, 4.0), "b": (1.0, 9.0)})]
    assert slowest_rank(ranks).turns == {"a": (3.0, 5.0), "b": (2.0, 9.0)}


def measurement(ranks: int, num_bytes: int, ours: float, peer: float) -> Measurement:
    comparison = Comparison({"ours": (ours,) * 3, "peer": (peer,) * 3})
    ratios = (Ratio("ours", "peer", goal(ranks, num_bytes)),)
    return Measurement(ranks, size_name(num_bytes), comparison, ratios, num_bytes, ())


def test_report_says_ratios_speeds_and_goals(tmp_path: Path) -> None:
    found = [
        measurement(2, 4096, 1e-6, 20e-6),
        measurement(2, 1 << 20, 1e-3, 4e-3),
        measurement(8, 1 << 20, 1e-3, 1e-3),
    ]
    assert missed(found) == ["2 ranks, 1 MiB: ours / peer is 0.250, the goal is 0.2"]
    assert figures(found) == {
        "ours_over_peer_2_ranks_4_KiB": 0.05,
        "ours_over_peer_2_ranks_1_MiB": 0.25,
        "ours_over_peer_8_ranks_1_MiB": 1.0,
    }
    made = tables(found)
    assert [table["title"] for table in made] == ["2 ranks", "8 ranks"]
    assert made[0]["columns"] == ["payload", "ours", "peer", "ours / peer", "ours, GB/s", "peer, GB/s"]
    assert made[0]["rows"][0][-2:] == [4.096, 0.205]
    record = {"what": "x", "date": "2026-01-02", "command": "", "commit": "", "hardware": {}, "versions": {}}
    check_record(record | {"notes": [], "tables": made, "figures": figures(found)})
    extra = ExtraMeasurement(2, "beside", Comparison({"a": (2.0,), "b": (1.0,)}), (Ratio("a", "b", 1.5),))
    assert missed([extra]) == ["2 ranks, beside: a / b is 2.000, the goal is 1.5"]
    assert figures([extra]) == {"a_over_b_2_ranks_beside": 2.0}
    [table] = tables([], [extra])
    assert table["title"] == "2 ranks: beside"
    assert [(row[0], row[2]) for row in table["rows"]] == [
        ("a", "2.000 (2.000 to 2.000), goal 1.5 (over b)"),
        ("b", None),
    ]
    write_plot(tmp_path / "plot.png", found, "title")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_payloads_may_have_arms_of_their_own(tmp_path: Path) -> None:
    small = measurement(2, 4096, 1e-6, 20e-6)
    large = Measurement(2, "1 MiB", Comparison({"ours": (2e-3,), "floor": (1e-3,)}), (), 1 << 20, ("floor",))
    [table] = tables([small, large])
    assert table["columns"][:5] == ["payload", "ours", "peer", "floor", "ours / peer"]
    assert [[cell is None for cell in row[:5]] for row in table["rows"]] == [
        [False, False, False, True, False],
        [False, False, True, False, True],
    ]
    write_plot(tmp_path / "plot.png", [small, large], "title")


def test_sizes_are_named_as_they_are_given() -> None:
    assert [size_name(n) for n in (8, 4096, 1536, 1 << 20, 3 << 30)] == ["8 B", "4 KiB", "1.5 KiB", "1 MiB", "3 GiB"]


@given(st.integers(1, 1 << 28), st.sampled_from([torch.float32, torch.float16, torch.bfloat16]), st.integers(2, 8))
def test_values_stay_finite_over_a_turn_in_place(num_bytes: int, dtype: torch.dtype, ranks: int) -> None:
    calls = calls_of_turn(num_bytes, dtype, ranks)
    assert calls >= 1
    assert 8.0 * ranks**calls <= torch.finfo(dtype).max


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("ranks", [2, 5])
def test_a_wrong_bit_or_a_wrong_sum_is_refused(dtype: torch.dtype, ranks: int) -> None:
    inputs = [Payload(World(rank, ranks, rank, ranks), dtype, 4096).x for rank in range(ranks)]
    payload = Payload(World(0, ranks, 0, ranks), dtype, 4096)
    total = inputs[0].clone() if ranks == 2 else inputs[0].float()
    for x in inputs[1:]:
        total += x
    right = total.to(dtype)
    payload.check_bits(right)
    payload.check_close(right)
    wrong = right.clone()
    wrong.view(torch.uint8)[-2] ^= 1
    with pytest.raises(WrongResultError, match="rank 0 differs"):
        payload.check_bits(wrong)
    with pytest.raises(WrongResultError, match="further from the sum"):
        payload.check_close(right - inputs[1])
    with pytest.raises(WrongResultError):
        payload.check_close(right.fill_(torch.nan))


@pytest.mark.parametrize("torchrun", [False, True], ids=["its own ranks", "torchrun"])
def test_a_short_run_leaves_a_record_and_a_plot(torchrun: bool, tmp_path: Path) -> None:
    json_file, plot = tmp_path / "record.json", tmp_path / "plot.png"
    start = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"] if torchrun else []
    command = [sys.executable, *start, str(ROOT / "launch" / "bench_allreduce.py"), "--sizes", "4KiB", "300000"]
    command += ["--repetitions", "2", "--warmup", "1", "--json", str(json_file), "--plot", str(plot)]
    command += [] if torchrun else ["--ranks", "2"]
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, env=environment)
    assert done.returncode == 0, done.stderr
    record = json.loads(json_file.read_text())
    check_record(record)
    assert record["what"] == "allreduce-cpu"
    assert [row[0] for row in record["tables"][0]["rows"]] == ["4 KiB", "292.969 KiB"]
    assert record["figures"].keys() >= {"tpoverlap_over_gloo_2_ranks_4_KiB", "tpoverlap_over_gloo_2_ranks_292.969_KiB"}
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert "2 ranks, 4 KiB: done" in done.stderr
