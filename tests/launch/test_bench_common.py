"""The timing harness, the record of a benchmark and the progress lines."""

from __future__ import annotations

import datetime
import io
import json
import random
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "launch"))

import bench_common
from bench_common import Arm, Comparison, Spread, alternate, check_record, on_host, write_json
from progress_bar import Progress


def scripted(name: str, log: list[str], times: list[Any]) -> Arm:
    left = iter(times)

    def run() -> Any:
        log.append(name)
        return next(left)

    return Arm(name, lambda: log.append(f"check {name}"), run)


def test_arms_run_in_turn_after_all_checks_and_warm_up_is_dropped() -> None:
    log: list[str] = []
    ours = scripted("ours", log, [9.0, 1.0, 2.0, 3.0])
    peer = scripted("peer", log, [9.0, 2.0, 2.0, [1.0, 4.0, 30.0]])
    comparison = alternate([ours, peer], repetitions=3, warmup=1)
    assert log == ["check ours", "check peer", *["ours", "peer"] * 4]
    assert comparison.turns == {"ours": (1.0, 2.0, 3.0), "peer": (2.0, 2.0, 4.0)}
    assert comparison.time("ours").median == 2.0
    assert comparison.ratio("ours", "peer").median == 0.75
    assert comparison.time("peer").repetitions == 3


def test_a_wrong_result_is_never_timed() -> None:
    log: list[str] = []

    def wrong() -> None:
        raise AssertionError("sums differ")

    with pytest.raises(AssertionError, match="sums differ"):
        alternate([scripted("good", log, [1.0] * 9), Arm("bad", wrong, lambda: log.append("timed") or 1.0)])
    assert log == ["check good"]


@pytest.mark.parametrize(
    ("names", "repetitions", "warmup", "message"),
    [
        ([], 1, 0, "needs arms with different names"),
        (["a", "a"], 1, 0, "needs arms with different names"),
        (["a"], 0, 0, "repetitions >= 1"),
        (["a"], 1, -1, "warmup >= 0"),
    ],
)
def test_bad_comparisons_are_refused(names: list[str], repetitions: int, warmup: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        alternate([scripted(name, [], [1.0]) for name in names], repetitions, warmup)


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan"), float("inf")])
def test_impossible_times_are_refused(seconds: float) -> None:
    with pytest.raises(ValueError, match="a turn's time in seconds is positive"):
        alternate([scripted("a", [], [seconds])], repetitions=1, warmup=0)


def test_a_common_drift_cancels_in_the_ratio() -> None:
    rng = random.Random(5)
    drift = [rng.uniform(1, 10) for _ in range(50)]
    comparison = Comparison({"ours": tuple(0.8 * d for d in drift), "peer": tuple(drift)})
    ratio = comparison.ratio("ours", "peer")
    assert (ratio.low, ratio.median, ratio.high) == pytest.approx((0.8, 0.8, 0.8))
    assert comparison.time("ours").high > 2 * comparison.time("ours").low


@given(st.lists(st.floats(1e-6, 1e3), min_size=1, max_size=40))
def test_spread_is_ordered_and_inside_the_samples(samples: list[float]) -> None:
    spread = Spread.of(samples)
    assert spread.low <= spread.median <= spread.high
    assert min(samples) * (1 - 1e-12) <= spread.low
    assert spread.high <= max(samples) * (1 + 1e-12)
    assert Spread.of(sorted(samples)) == spread


def test_spread_of_known_samples() -> None:
    spread = Spread.of([float(n) for n in range(11)])
    assert spread == Spread(5.0, 1.0, 9.0, 11)
    assert spread.as_time() == "5.00 s (1.00 s to 9.00 s)"
    assert spread.as_ratio() == "5.000 (1.000 to 9.000)"
    with pytest.raises(ValueError, match="finite samples"):
        Spread.of([])


def test_host_turns_measure_the_call() -> None:
    calls: list[int] = []
    assert 0 < on_host(lambda: calls.append(1))() < 1
    assert calls == [1]


TABLE = {"title": "sizes", "columns": ["bytes", "time"], "rows": [[4096, "1.0 us"], [8192, None]]}


def test_record_names_machine_versions_commit_and_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = str(bench_common.ROOT / "launch" / "bench_x.py")
    monkeypatch.setattr(sys, "argv", [script, "--json", "/data/out.json", "--model=/data/llama", "--n", "3"])
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    path = tmp_path / "x.json"
    record = write_json(path, what="all_reduce", tables=[TABLE], figures={"ratio": 0.5}, notes=["one"])
    assert json.loads(path.read_text()) == record
    check_record(record)
    assert (
        record["command"]
        == "torchrun --standalone --nproc-per-node 2 launch/bench_x.py --json out.json --model=llama --n 3"
    )
    assert record["hardware"]["cpu"]
    assert record["hardware"]["cpus"] >= 1
    assert record["versions"]["torch"].split("+")[0] == bench_common.torch.__version__.split("+")[0]
    assert abs(datetime.date.fromisoformat(record["date"]) - datetime.datetime.now(datetime.UTC).date()).days <= 1
    assert record["notes"] == ["one"]


def test_commit_of_a_tree_without_git_comes_from_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_common, "ROOT", tmp_path)
    monkeypatch.delenv("TPOVERLAP_COMMIT", raising=False)
    assert bench_common.commit() == "unknown"
    monkeypatch.setenv("TPOVERLAP_COMMIT", "abc123")
    assert bench_common.commit() == "abc123"
    monkeypatch.undo()
    monkeypatch.setenv("TPOVERLAP_COMMIT", "abc123")
    assert bench_common.commit() == "abc123"  # also where there is metadata


def test_commit_marks_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_common, "ROOT", tmp_path)
    monkeypatch.delenv("TPOVERLAP_COMMIT", raising=False)
    bench_common._git("init", "--quiet")
    (tmp_path / "file").write_text("one")
    bench_common._git("add", "file")
    identity = ("-c", "user.name=test", "-c", "user.email=test@example.invalid")
    bench_common._git(*identity, "commit", "--quiet", "--message", "one", "--no-gpg-sign")
    head = bench_common._git("rev-parse", "HEAD")
    assert bench_common.commit() == head
    (tmp_path / "file").write_text("two")
    assert bench_common.commit() == head + "+changes"


def valid_record() -> dict[str, Any]:
    return {
        "what": "all_reduce",
        "date": "2026-01-31",
        "command": "python launch/bench_x.py",
        "commit": "abc",
        "hardware": {"cpu": "some", "cpus": 2, "gpus": [], "driver": None},
        "versions": {"python": "3.12"},
        "notes": [],
        "tables": [dict(TABLE)],
        "figures": {"ratio": 0.5},
    }


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("what", "All Reduce", "'what' is a name"),
        ("date", "31.1.2026", "'date' is YYYY-MM-DD"),
        ("commit", None, "field 'commit' must be a str"),
        ("figures", {"ratio": float("nan")}, "figure 'ratio'"),
        ("figures", {"ratio": None}, "figure 'ratio'"),
        ("tables", [{"title": "t", "columns": ["a"]}], "table 0 must have exactly"),
        ("tables", [{"title": "t", "columns": [], "rows": []}], "needs column names"),
        ("tables", [{"title": "t", "columns": ["a", "b"], "rows": [[1]]}], "rows of 2"),
        ("tables", [{"title": "t", "columns": ["a"], "rows": [[[1]]]}], "rows of 1"),
        ("extra", 1, "exactly the fields"),
    ],
)
def test_a_faulty_record_is_refused(field: str, value: Any, message: str) -> None:
    check_record(valid_record())
    with pytest.raises(ValueError, match=message):
        check_record({**valid_record(), field: value})


def test_a_faulty_record_is_not_written(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="rows of 2"):
        write_json(tmp_path / "x.json", what="x", tables=[{**TABLE, "rows": [[1]]}], figures={})
    assert not (tmp_path / "x.json").exists()
    with pytest.raises(OSError):
        write_json(tmp_path / "missing" / "x.json", what="x", tables=[], figures={})


def test_progress_writes_plain_lines_with_an_estimate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    clock = iter([0.0, 1.0, 6.0, 7.0, 90.0])
    monkeypatch.setattr("time.monotonic", lambda: next(clock))
    stream = io.StringIO()
    with Progress("bench", 4, stream=stream) as progress:
        progress.advance(note="ours")
        progress.advance(note="peer")
        progress.advance()
    assert stream.getvalue().splitlines() == [
        "bench: 4 steps",
        "bench: 2 of 4 (50%), 6 s left peer",
        "bench: done, 1:30 min",
    ]


def test_progress_says_where_it_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    stream = io.StringIO()

    def fails() -> None:
        with Progress("bench", 4, stream=stream) as progress:
            progress.advance()
            raise KeyError

    with pytest.raises(KeyError):
        fails()
    assert stream.getvalue().splitlines()[-1] == "bench: stopped after 1 of 4, 0 s"


def test_progress_of_other_ranks_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    stream = io.StringIO()
    with Progress("bench", 2, stream=stream, interval_s=0) as progress:
        progress.advance()
    assert stream.getvalue() == ""


def test_progress_is_a_bar_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    stream = io.StringIO()
    stream.isatty = lambda: True  # type: ignore[method-assign]
    with Progress("bench", 2, stream=stream) as progress:
        progress.advance(2, note="ours")
    assert "bench ours" in stream.getvalue()
    assert "2/2" in stream.getvalue()


def test_progress_without_rich_falls_back_to_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setitem(sys.modules, "rich.progress", None)
    stream = io.StringIO()
    stream.isatty = lambda: True  # type: ignore[method-assign]
    with Progress("bench", 2, stream=stream):
        pass
    assert stream.getvalue().startswith("bench: 2 steps")


def test_progress_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="1 step or more, got 0"):
        Progress("bench", 0)


def test_a_record_takes_the_place_of_a_file_as_a_whole_and_of_nothing_else(tmp_path: Path) -> None:
    file, link = tmp_path / "x.json", tmp_path / "link.json"
    file.write_text("old")
    link.symlink_to(file)
    write_json(link, what="x", tables=[], figures={}, command="a command")
    assert link.is_symlink()
    assert json.loads(file.read_text())["command"] == "a command"
    assert sorted(tmp_path.iterdir()) == [link, file]
    write_json("/dev/null", what="x", tables=[], figures={})
    assert Path("/dev/null").is_char_device()
