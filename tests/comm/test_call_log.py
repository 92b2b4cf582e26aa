"""Two ranks' logs in one memory: what differs is found, and nothing else, also where lines are used again."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest

from tpoverlap.comm.call_log import CallLog
from tpoverlap.comm.layout import DESCRIPTOR_TEXT_BYTES, NUM_DESCRIPTORS, Layout


def _logs() -> list[CallLog]:
    layout = Layout(2, 4096)
    memory = memoryview(bytearray(layout.size))
    segment: Any = SimpleNamespace(bytes=memory, words=memory.cast("I"), quads=memory.cast("Q"))
    return [CallLog(segment, layout, rank) for rank in range(2)]


def _operation(rng: random.Random) -> str:
    """Short and long ones: what a line held before must not show."""
    return f"{'é' if rng.random() < 0.1 else ''}{rng.choice('abc') * rng.randint(1, 2 * DESCRIPTOR_TEXT_BYTES)}"


@pytest.mark.parametrize("seed", range(3))
def test_calls_alike_never_differ_and_another_is_found_by_both(seed: int) -> None:
    rng = random.Random(seed)
    logs = _logs()
    for call in range(1, 2 * NUM_DESCRIPTORS + 50):
        operation = _operation(rng)
        for log in rng.sample(logs, 2):
            log.begin(operation)
            log.end(True)
        assert logs[0].number == logs[1].number == call
        shown = operation.encode()[:DESCRIPTOR_TEXT_BYTES].decode(errors="replace")
        assert [log.operation for log in logs] == [shown, shown]
        assert [log.difference(1 - rank) for rank, log in enumerate(logs)] == ["", ""]
        if rng.random() < 0.1:
            assert [log.next_difference() for log in logs] == [None, None]
    for log, operation in zip(logs, ("all_reduce float16 8 B", "all_reduce bfloat16 8 B"), strict=True):
        log.begin(operation)
    for _ in range(rng.randrange(NUM_DESCRIPTORS - 1)):  # the watcher may come late
        for log in logs:
            log.begin("alike")
    for rank, log in enumerate(logs):
        found = log.next_difference()
        assert found is not None
        assert found[0] == 1 - rank
        assert "float16" in found[1]
        assert "bfloat16" in found[1]


def test_a_restored_log_compares_from_the_start() -> None:
    logs = _logs()
    for k in range(5):
        for log in logs:
            log.begin(f"before {k}")
            log.end(True)
            assert log.next_difference() is None
    for log in logs:
        log.restore()
    assert [log.operation for log in logs] == ["", ""]
    logs[0].begin("one")
    assert logs[0].next_difference() is None
    logs[1].begin("two")
    assert logs[0].next_difference() == (1, "rank 0 calls one, rank 1 calls two")
    assert logs[1].next_difference() == (0, "rank 1 calls two, rank 0 calls one")
