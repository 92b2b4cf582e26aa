"""What a timeline says about its runs: totals, lanes, window, errors."""

from __future__ import annotations

import itertools
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from two_rank_example import simulate_run, two_rank_example

from tpoverlap.microbatch.stats import Interval, RunStats
from tpoverlap.trace import Timeline, write_chrome, write_html, write_png
from tpoverlap.trace.lanes import pack
from tpoverlap.trace.timeline import duration

WRITERS = [write_html, write_png, write_chrome]


def run_of(*intervals: Interval, tokens: tuple[int, ...] = (8,), wall_s: float = 0.0) -> RunStats:
    return RunStats(sum(tokens), tokens, wall_s=wall_s, intervals=list(intervals))


@pytest.mark.parametrize("seed", range(5))
def test_totals_match_what_the_runs_counted(seed: int) -> None:
    runs = two_rank_example(seed)
    timeline = Timeline.from_runs(runs, title="example")
    for rank, stats in runs:
        summary = timeline.summary(rank)
        assert summary.wall_s == pytest.approx(sum(s.wall_s for s in stats))
        assert summary.compute_s == pytest.approx(sum(s.compute_s for s in stats))
        assert summary.communication_s == pytest.approx(sum(s.communication_s for s in stats))
        assert summary.num_collectives == sum(s.num_collectives for s in stats)
        assert summary.collective_bytes == sum(s.collective_bytes for s in stats)
        assert summary.exposed_s == pytest.approx(timeline.exposed_communication_s(rank))
        # Nothing computes only in waits and hand-overs, and every wait has its collective under way.
        waits, handovers = sum(s.exposed_s for s in stats), sum(s.handover_s for s in stats)
        assert waits - 1e-9 <= summary.exposed_s <= waits + handovers + 1e-9
        assert summary.hidden_fraction == pytest.approx(1 - summary.exposed_s / summary.communication_s)


def test_a_whole_run_hides_nothing_and_a_split_run_does() -> None:
    rng = random.Random(7)
    whole = simulate_run(rng, start_s=10.0, piece_tokens=(2048,))
    split = simulate_run(rng, start_s=10.0, piece_tokens=(1088, 960))
    hidden = [
        Timeline.from_runs([(r, [s]) for r, s in enumerate(stats)], title="t").summary(0).hidden_fraction
        for stats in (whole, split)
    ]
    assert hidden[0] == pytest.approx(0.0, abs=1e-6)
    assert hidden[1] is not None
    assert hidden[1] > 0.6


def test_known_summary() -> None:
    run = run_of(
        Interval("compute", 0, "attention", 1.0, 2.0),
        Interval("communication", 0, "all_reduce", 2.0, 4.0, 1000),
        Interval("compute", 1, "attention", 2.5, 3.5),
        Interval("exposed", 0, "wait", 3.5, 4.0),
        tokens=(5, 3),
        wall_s=3.25,
    )
    timeline = Timeline.from_runs([(3, [run])], title="t")
    assert timeline.exposed_communication_s(3) == 1.0
    assert (
        timeline.summary_line(3)
        == "rank 3: wall 3.25 s, compute 2.00 s, communication 2.00 s, exposed 1.00 s, 50.0% hidden"
    )
    assert timeline.span == (1.0, 4.0)
    assert timeline.num_pieces == 2
    assert [(lane.piece, len(lane.bars)) for lane in timeline.ranks[0].lanes] == [(0, 2), (1, 1), (None, 1)]


def test_one_rank_without_collectives_is_drawn_and_says_so(tmp_path: Path) -> None:
    timeline = Timeline.from_runs([(0, [run_of(Interval("compute", 0, "forward", 4.0, 4.5))])], title="alone")
    assert timeline.summary(0).hidden_fraction is None
    assert timeline.summary_line(0).endswith("exposed 0.00 us, no communication")
    assert timeline.window() is None
    for writer in WRITERS:
        writer(timeline, tmp_path / writer.__name__)
        assert (tmp_path / writer.__name__).stat().st_size > 500


def test_a_timeline_of_no_length_is_drawn(tmp_path: Path) -> None:
    timeline = Timeline.from_runs([(0, [run_of(Interval("compute", 0, "forward", 4.0, 4.0))])], title="instant")
    for writer in WRITERS:
        writer(timeline, tmp_path / writer.__name__)


def test_whole_runs_name_their_lane_and_reason() -> None:
    run = run_of(Interval("compute", 0, "forward", 0.0, 1.0))
    run.bypass_reason = "fewer than min_tokens"
    timeline = Timeline.from_runs([(0, [run])], title="t")
    assert timeline.lane_label(timeline.ranks[0].lanes[0]) == "whole batch"
    assert timeline.ranks[0].runs[0].label == "8 tokens, whole (fewer than min_tokens)"


def test_runs_without_intervals_are_counted_and_keep_their_numbers() -> None:
    drawn = run_of(Interval("compute", 0, "forward", 0.0, 1.0), wall_s=1.0)
    timeline = Timeline.from_runs([(0, [RunStats(1, (1,), wall_s=9.0), drawn])], title="t")
    assert timeline.ranks[0].num_unrecorded == 1
    assert timeline.ranks[0].runs[0].number == 1
    assert timeline.summary(0).wall_s == 1.0


def test_window_shows_two_layers_of_the_longest_split_run() -> None:
    runs = two_rank_example(3, num_layers=30)
    window = Timeline.from_runs(runs, title="t").window()
    assert window is not None
    split = runs[0][1][0]
    inside = [
        i for i in split.intervals if i.kind == "communication" and window[0] <= i.start_s and i.end_s <= window[1]
    ]
    assert len(inside) == 8
    assert {i.piece for i in inside} == {0, 1}


def test_a_short_run_needs_no_window() -> None:
    assert Timeline.from_runs(two_rank_example(3, num_layers=2, num_chunks=0), title="t").window() is None


@pytest.mark.parametrize(
    ("title", "emulated", "heading"),
    [
        ("run", False, "run"),
        ("run", True, "run (emulated link)"),
        ("run over an Emulated link of 2 GB/s", True, "run over an Emulated link of 2 GB/s"),
    ],
)
def test_heading_says_emulated(title: str, emulated: bool, heading: str) -> None:
    timeline = Timeline.from_runs(two_rank_example(0, num_layers=1), title=title, emulated=emulated)
    assert timeline.heading == heading
    assert ("emulated" in timeline.summary_line(0)) == emulated


@pytest.mark.parametrize(
    ("runs", "message"),
    [
        ([], "no intervals to draw"),
        ([(0, [])], "rank 0 has no intervals in its 0 runs"),
        ([(0, [run_of(Interval("compute", 0, "x", 0, 1))]), (1, [run_of()])], "rank 1 has no intervals in its 1 runs"),
        ([(0, [run_of(Interval("compute", 0, "x", 0, 1))])] * 2, r"once, got ranks \[0, 0\]"),
        ([(-1, [run_of(Interval("compute", 0, "x", 0, 1))])], r"got ranks \[-1\]"),
        ([(0, [run_of(Interval("compute", 0, "x", 2, 1))])], "must not end before it starts"),
        ([(0, [run_of(Interval("compute", -1, "x", 0, 1))])], "piece number of 0 or greater"),
        ([(0, [run_of(Interval("compute", 0, "x", float("nan"), 1))])], "finite times"),
    ],
)
def test_bad_runs_are_refused(runs: list[tuple[int, list[RunStats]]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Timeline.from_runs(runs, title="t")


def test_unknown_rank_is_refused() -> None:
    timeline = Timeline.from_runs(two_rank_example(0, num_layers=1), title="t")
    with pytest.raises(ValueError, match=r"rank 2 is not in this timeline, which has ranks \[0, 1\]"):
        timeline.exposed_communication_s(2)


@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("path", ["missing/folder/out", "", "/dev/full"])
def test_write_failures_are_os_errors(writer: Callable[[Timeline, Path], None], path: str, tmp_path: Path) -> None:
    timeline = Timeline.from_runs(two_rank_example(0, num_layers=1), title="t")
    with pytest.raises(OSError):
        writer(timeline, tmp_path / path)


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 8)), max_size=20))
def test_tracks_never_overlap_and_are_as_few_as_possible(starts_and_lengths: list[tuple[int, int]]) -> None:
    intervals = [Interval("communication", 0, "x", s, s + n) for s, n in sorted(starts_and_lengths)]
    tracks = pack(intervals)
    for track in set(tracks):
        own = [i for i, t in zip(intervals, tracks, strict=True) if t == track]
        assert all(left.end_s <= right.start_s for left, right in itertools.pairwise(own))
    # A track is only opened at an instant that as many intervals share.
    depth = max(
        (sum(o.start_s <= i.start_s and (o.end_s > i.start_s or o is i) for o in intervals) for i in intervals),
        default=0,
    )
    assert max(tracks, default=-1) + 1 <= depth


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0.00 us"),
        (12.34e-6, "12.3 us"),
        (999.6e-6, "1.00 ms"),
        (0.0110, "11.0 ms"),
        (0.9996, "1.00 s"),
        (33.04, "33.0 s"),
        (402.27, "402 s"),
        (1234.0, "1234 s"),
    ],
)
def test_durations_have_three_digits(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_importing_the_package_loads_no_drawing_library() -> None:
    code = "import sys, tpoverlap.trace; sys.exit('matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0
