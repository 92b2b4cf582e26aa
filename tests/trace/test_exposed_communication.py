"""The interval sweep against hand-made cases and a slow reference that looks at every tick of time."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tpoverlap.microbatch.stats import Interval
from tpoverlap.trace import exposed_communication
from tpoverlap.trace.exposed import exposed_spans, measure, union

TICK_S = 2.0**-12  # a power of two: sums of ticks are exact
NUM_TICKS = 40


def compute(start: float, end: float) -> Interval:
    return Interval("compute", 0, "mlp", start, end)


def communication(start: float, end: float) -> Interval:
    return Interval("communication", 0, "all_reduce", start, end)


def reference_ticks(intervals: list[Interval]) -> list[int]:
    """Ticks in which something communicates and nothing computes."""

    def active(kind: str, tick: int) -> bool:
        middle = (tick + 0.5) * TICK_S
        return any(i.kind == kind and i.start_s < middle < i.end_s for i in intervals)

    return [tick for tick in range(NUM_TICKS) if active("communication", tick) and not active("compute", tick)]


@st.composite
def tick_intervals(draw: st.DrawFn) -> list[Interval]:
    kinds = st.sampled_from(["compute", "communication", "exposed", "handover"])
    ends = st.tuples(st.integers(0, NUM_TICKS), st.integers(0, NUM_TICKS)).map(sorted)
    made = draw(st.lists(st.tuples(kinds, st.integers(0, 3), ends), max_size=25))
    return [Interval(kind, piece, "x", low * TICK_S, high * TICK_S) for kind, piece, (low, high) in made]


@given(tick_intervals())
def test_sweep_agrees_with_every_tick(intervals: list[Interval]) -> None:
    ticks = reference_ticks(intervals)
    assert exposed_communication(intervals) == len(ticks) * TICK_S
    spans = exposed_spans(intervals)
    covered = [tick for start, end in spans for tick in range(round(start / TICK_S), round(end / TICK_S))]
    assert covered == ticks
    assert all(start < end for start, end in spans)
    assert all(left[1] < right[0] for left, right in itertools.pairwise(spans))


@given(tick_intervals(), st.randoms())
def test_order_of_intervals_does_not_matter(intervals: list[Interval], random: object) -> None:
    shuffled = list(intervals)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    assert exposed_spans(shuffled) == exposed_spans(intervals)


@given(tick_intervals())
def test_union_of_a_kind_covers_its_ticks(intervals: list[Interval]) -> None:
    for kind in ("compute", "communication"):
        of_kind = [i for i in intervals if i.kind == kind]
        ticks = {t for i in of_kind for t in range(round(i.start_s / TICK_S), round(i.end_s / TICK_S))}
        assert measure(union(intervals, kind)) == len(ticks) * TICK_S  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("intervals", "expected"),
    [
        ([], 0.0),
        ([compute(0, 5)], 0.0),
        ([communication(1, 3)], 2.0),
        ([compute(0, 4), communication(1, 3)], 0.0),
        ([compute(0, 2), communication(1, 3), compute(3, 4)], 1.0),
        ([compute(0, 2), compute(1, 3), communication(0, 6)], 3.0),
        ([communication(0, 2), communication(1, 3)], 3.0),
        ([compute(1, 1), communication(0, 2)], 2.0),
        ([communication(1, 1)], 0.0),
        ([Interval("exposed", 0, "wait", 0, 2), Interval("handover", 0, "h", 0, 2), communication(0, 2)], 2.0),
    ],
)
def test_known_cases(intervals: list[Interval], expected: float) -> None:
    assert exposed_communication(intervals) == expected


@pytest.mark.parametrize("bad", [compute(2, 1), communication(float("nan"), 1), communication(0, float("inf"))])
def test_impossible_times_are_refused(bad: Interval) -> None:
    with pytest.raises(ValueError, match=r"interval .*got Interval"):
        exposed_communication([compute(0, 1), bad])
