"""The protocol in all interleavings of small groups: right as it is, and every planted fault found.

Each exploration prints its name and how many states it reached (``pytest -s``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import pytest
from explorer import Exploration, Violation, explore
from explorer_model import Access, Model, Step, Wait
from failure_models import Failing
from hypothesis import given
from hypothesis import strategies as st
from kernel_model import KernelRun
from plain_explorer import plainly_explore
from protocol_models import Operation, Run, Steps

from tpoverlap.comm.protocol import EMPTY, FULL, POISON, POISON_OFFSET, Kind, mailbox, one_shot, two_shot
from tpoverlap.comm.words import MASK, reached

reduce_scatter = partial(two_shot, gather=False)


def times(count: int, schedule: Callable[..., Steps], pieces: int = 2) -> tuple[Operation, ...]:
    return (Operation(schedule, pieces),) * count


MIXED = (
    Operation(one_shot, 2),
    Operation(two_shot, 1),
    Operation(reduce_scatter, 2),
    Operation(one_shot, 1),
    Operation(two_shot, 2),
)


def explored(name: str, run: Run | KernelRun) -> Exploration:
    result = explore(run.model())
    print(f"\n{name}: {result.num_states:,} states", end="")
    return result


# As it is

CLEAN: dict[str, Run | KernelRun] = {
    "one shot, 2 ranks": Run(2, times(6, one_shot), num_buffers=3),
    "one shot, 3 ranks": Run(3, times(4, one_shot)),
    "one shot, 3 ranks, 1 piece": Run(3, times(5, one_shot, 1), num_buffers=3),
    "one shot, 3 ranks, serialized": Run(3, times(6, one_shot), lanes=False),
    "one shot, 4 ranks, 1 piece, serialized": Run(4, times(4, one_shot, 1), lanes=False),
    "two shots, 2 ranks": Run(2, times(5, two_shot)),
    "two shots, 3 ranks": Run(3, times(4, two_shot)),
    "two shots, 3 ranks, serialized": Run(3, times(5, two_shot), lanes=False),
    "two shots, 4 ranks, 1 piece, serialized": Run(4, times(3, two_shot, 1), lanes=False),
    "reduce-scatter, 2 ranks": Run(2, times(5, reduce_scatter)),
    "reduce-scatter, 3 ranks": Run(3, times(3, reduce_scatter)),
    "mixed operations, 2 ranks": Run(2, MIXED),
    "mixed operations, 3 ranks": Run(3, MIXED),
    "mixed operations, 3 ranks, serialized": Run(3, MIXED, lanes=False),
    "mailbox, 2 ranks": Run(2, times(5, mailbox)),
    "mailbox, 2 ranks, piece counts differ": Run(2, (Operation(mailbox, 2), Operation(mailbox, 1)) * 2),
    "mailbox, 3 ranks": Run(3, times(3, mailbox), num_buffers=1),
    "mailbox, 3 ranks, serialized": Run(3, times(4, mailbox), lanes=False),
    "kernel mode, 2 ranks": KernelRun(2, (2, 1, 2, 1, 2)),
    "kernel mode, 3 ranks": KernelRun(3, (2, 2, 1, 2)),
}


@pytest.mark.parametrize("name", CLEAN)
def test_no_interleaving_goes_wrong(name: str) -> None:
    result = explored(name, CLEAN[name])
    assert result.counterexample is None, str(result.counterexample)
    assert result.completes


@pytest.mark.parametrize("first_number", [0, 1, (1 << 31) - 3, (1 << 31) - 1, MASK - 5, MASK - 1, MASK])
@pytest.mark.parametrize("schedule", [one_shot, two_shot])
def test_counters_may_start_anywhere(schedule: Callable[..., Steps], first_number: int) -> None:
    result = explore(Run(2, times(4, schedule), first_number=first_number).model())
    assert result.counterexample is None, str(result.counterexample)
    assert result.completes


FAILING: dict[str, Run | KernelRun] = {
    "one shot, 2 ranks": Run(2, times(2, one_shot), num_buffers=1, failing=Failing(dies=1)),
    "one shot, 3 ranks, serialized": Run(3, times(2, one_shot), lanes=False, failing=Failing(dies=2)),
    "one shot, 3 ranks, raising": Run(3, times(5, one_shot), lanes=False, failing=Failing(dies=0, raises=True)),
    "two shots, 2 ranks": Run(2, times(2, two_shot, 1), num_buffers=1, failing=Failing(dies=0)),
    "two shots, 3 ranks, serialized": Run(3, times(1, two_shot), lanes=False, failing=Failing(dies=1)),
    "two shots, 3 ranks, raising": Run(3, times(4, two_shot), lanes=False, failing=Failing(dies=1, raises=True)),
    "mailbox, 2 ranks": Run(2, times(3, mailbox, 1), num_buffers=1, failing=Failing(dies=1)),
    "mailbox, 3 ranks, 1 piece, serialized": Run(3, times(1, mailbox, 1), lanes=False, failing=Failing(dies=1)),
    "kernel mode, 2 ranks": KernelRun(2, (2, 1, 2), failing=Failing(dies=1)),
}


@pytest.mark.parametrize("name", FAILING)
def test_every_poison_drains(name: str) -> None:
    """Whatever happens first, whoever dies and however often a live rank's store undoes a poison."""
    result = explored(f"poison: {name}", FAILING[name])
    assert result.counterexample is None, str(result.counterexample)
    assert result.completes


RESETTING: dict[str, Run | KernelRun] = {
    "one shot, 2 ranks": Run(
        2, times(1, one_shot), num_buffers=1, failing=Failing(resets=True), after_reset=times(2, one_shot)
    ),
    "one shot, 2 ranks, serialized": Run(
        2, times(3, one_shot), lanes=False, failing=Failing(resets=True), after_reset=times(3, one_shot)
    ),
    "one shot, 3 ranks, 1 piece, serialized": Run(
        3, times(1, one_shot, 1), lanes=False, failing=Failing(resets=True), after_reset=times(2, one_shot, 1)
    ),
    "one shot, 3 ranks, raising": Run(
        3,
        times(2, one_shot),
        lanes=False,
        failing=Failing(resets=True, raises=True),
        after_reset=times(3, one_shot),
    ),
    "two shots, 2 ranks": Run(
        2, times(1, two_shot, 1), num_buffers=1, failing=Failing(resets=True), after_reset=times(2, two_shot, 1)
    ),
    "two shots, 3 ranks, raising": Run(
        3,
        times(2, two_shot),
        lanes=False,
        failing=Failing(resets=True, raises=True),
        after_reset=times(3, two_shot),
    ),
    "mailbox, 2 ranks": Run(
        2, times(2, mailbox, 1), num_buffers=1, failing=Failing(resets=True), after_reset=times(3, mailbox, 1)
    ),
    "kernel mode, 2 ranks": KernelRun(2, (2,), failing=Failing(resets=True), after_reset=(2, 1, 2)),
}


@pytest.mark.parametrize("name", RESETTING)
def test_after_a_reset_all_is_well(name: str) -> None:
    """Every read after the reset is checked again, unless the group has failed again."""
    result = explored(f"reset: {name}", RESETTING[name])
    assert result.counterexample is None, str(result.counterexample)
    assert result.completes


@given(last=st.integers(0, MASK), ahead=st.integers(-(1 << 29), 1 << 29))
def test_poison_passes_every_wait_within_reach(last: int, ahead: int) -> None:
    """However far a rank's queued operations are ahead of, or behind, the progress that the watcher knows."""
    assert reached((last + POISON_OFFSET) & MASK, (last + ahead) & MASK)
    assert POISON & FULL
    assert POISON & EMPTY


# Planted faults


def without(steps: Steps, *gone: int) -> Steps:
    places = {k: place for place, k in enumerate(k for k in range(len(steps)) if k not in gone)}
    return tuple(
        replace(steps[k], after=tuple(places[other] for other in steps[k].after if other in places)) for k in places
    )


def on_rank_0(edit: Callable[[Steps], Steps]) -> Callable[[int, int, Steps], Steps]:
    return lambda rank, n, steps: edit(steps) if rank == 0 else steps


def without_kind(kind: Kind) -> Callable[[int, int, Steps], Steps]:
    return on_rank_0(lambda steps: without(steps, *(k for k, step in enumerate(steps) if step.kind is kind)))


def wait_before_publish(rank: int, n: int, steps: Steps) -> Steps:
    """Waits for piece p stand before the publication of piece p, in an order that each lane accepts."""
    waits = [k for k, step in enumerate(steps) if step.kind is Kind.WAIT_PUBLISHED and step.piece == 0]
    return (*(steps[k] for k in waits), *without(steps, *waits))


def consume_before_last_collect(steps: Steps) -> Steps:
    assert (steps[-2].kind, steps[-1].kind) == (Kind.COLLECT, Kind.CONSUME)
    return (*steps[:-2], steps[-1], steps[-2])


def publish_before_upload_ends(steps: Steps) -> Steps:
    swapped = list(steps)
    k = next(k for k, step in enumerate(steps) if step.kind is Kind.PUBLISH)
    swapped[k - 1], swapped[k] = swapped[k], swapped[k - 1]
    return tuple(swapped)


@dataclass(frozen=True)
class Fault:
    run: Run | KernelRun
    violation: Violation
    memory: str = ""
    """How the name of the memory that is hit begins."""


def failing_reset(**faults: bool) -> Run:
    once = times(1, one_shot, 1)
    return Run(2, once, lanes=False, failing=Failing(resets=True, **faults), after_reset=once)


FAULTS: dict[str, Fault] = {
    "a skipped wait for consumed": Fault(
        Run(2, times(4, one_shot), edit=without_kind(Kind.WAIT_CONSUMED)), Violation.OVERWRITTEN, "slot"
    ),
    "a skipped wait for consumed, two shots": Fault(
        Run(3, times(3, two_shot, 1), edit=without_kind(Kind.WAIT_CONSUMED)), Violation.OVERWRITTEN, "slot"
    ),
    "one slot too few": Fault(Run(2, times(4, one_shot), waits_for_slots=3), Violation.OVERWRITTEN, "slot"),
    "three slots at the wrap": Fault(Run(2, times(4, one_shot, 1), num_slots=3), Violation.OVERWRITTEN, "slot"),
    "consumed before the last collect": Fault(
        Run(2, times(4, one_shot), edit=on_rank_0(consume_before_last_collect)), Violation.OVERWRITTEN, "slot"
    ),
    "published before the upload has ended": Fault(
        Run(2, times(2, one_shot), edit=on_rank_0(publish_before_upload_ends)), Violation.MIXED_UP, "slot"
    ),
    "the result's upload without its edge": Fault(
        Run(2, times(2, two_shot), edit=lambda rank, n, steps: tuple(replace(step, after=()) for step in steps)),
        Violation.MIXED_UP,
        "output",
    ),
    "a wait before the publication of the same piece": Fault(
        Run(2, times(2, one_shot), lanes=False, edit=wait_before_publish), Violation.DEADLOCK
    ),
    "comparisons that are not cyclic": Fault(
        Run(2, times(4, one_shot), compare=lambda value, target: value >= target), Violation.MIXED_UP, "slot"
    ),
    "signed comparisons": Fault(
        Run(2, times(4, one_shot), first_number=(1 << 31) - 3, compare=lambda v, t: _signed(v) >= _signed(t)),
        Violation.MIXED_UP,
        "slot",
    ),
    "an operation that ends before its uploads": Fault(
        Run(2, times(3, one_shot), num_buffers=1, joins_uploads=False), Violation.OVERWRITTEN, "input"
    ),
    "an operation that ends before its result's upload": Fault(
        Run(2, times(3, two_shot), num_buffers=1, joins_uploads=False), Violation.OVERWRITTEN, "output"
    ),
    "one mailbox word for two readers": Fault(
        Run(3, times(2, mailbox, 1), mailbox_word=lambda writer, reader, piece: f"box {writer}.{piece}"),
        Violation.OVERWRITTEN,
        "mailbox slot",
    ),
    "mailbox pieces at other places in the next call": Fault(
        Run(2, (Operation(mailbox, 2, geometry="small"), Operation(mailbox, 2, geometry="large"))),
        Violation.OVERWRITTEN,
        "mailbox slot",
    ),
    "kernel mode with a counter for each block and a varying grid": Fault(
        KernelRun(2, (2, 1, 2), counts_per_block=True), Violation.OVERWRITTEN, "slot"
    ),
    "kernel mode with one slot": Fault(KernelRun(2, (2, 2), num_slots=1), Violation.OVERWRITTEN, "slot"),
    "poison that is written once": Fault(
        Run(2, times(1, one_shot), failing=Failing(dies=1, repeats=False)), Violation.NOT_DRAINED
    ),
    "mailbox poison that is written once": Fault(
        Run(2, times(2, mailbox, 1), failing=Failing(dies=1, repeats=False)), Violation.NOT_DRAINED
    ),
    "poison before the record": Fault(
        Run(2, times(1, one_shot, 1), failing=Failing(records_first=False)), Violation.MIXED_UP, "slot"
    ),
    "reset without the first barrier": Fault(failing_reset(first_barrier=False), Violation.MIXED_UP, "slot"),
    "reset without the second barrier": Fault(failing_reset(second_barrier=False), Violation.MIXED_UP, "slot"),
    "reset of raising ranks without the second barrier": Fault(
        failing_reset(raises=True, second_barrier=False), Violation.MIXED_UP, "slot"
    ),
    "a watcher that still writes during reset": Fault(failing_reset(watcher_stops=False), Violation.MIXED_UP, "slot"),
}


def _signed(value: int) -> int:
    return value - (1 << 32) if value >> 31 else value


@pytest.mark.parametrize("name", FAULTS)
def test_planted_fault_is_found(name: str) -> None:
    fault = FAULTS[name]
    found = explored(name, fault.run).counterexample
    assert found is not None
    print(f"\n{found}")
    assert found.violation is fault.violation
    assert found.memory.startswith(fault.memory)
    assert bool(found.memory) == (fault.violation in (Violation.OVERWRITTEN, Violation.MIXED_UP))


_Case = tuple[str, int, Callable[..., Steps], int, int]


def _necessary_steps() -> list[_Case]:
    """Every step that orders something: (its name, world size, schedule, pieces, index in rank 0's list).

    A publication before another one only lets peers start earlier: nothing goes wrong without it.
    """
    groups: list[tuple[str, int, Callable[..., Steps], int]] = [
        ("one_shot", 2, one_shot, 2),
        ("one_shot", 3, one_shot, 1),
        ("two_shot", 2, two_shot, 2),
        ("two_shot", 3, two_shot, 1),
        ("reduce_scatter", 3, reduce_scatter, 1),
        ("mailbox", 2, mailbox, 2),
        ("mailbox", 3, mailbox, 1),
    ]
    cases: list[_Case] = []
    for name, world_size, schedule, pieces in groups:
        steps = schedule(0, world_size, pieces)
        for k, step in enumerate(steps):
            later = any(other.kind is Kind.PUBLISH for other in steps[k + 1 :])
            copies = step.kind.name.startswith(("UPLOAD", "COLLECT", "REDUCE"))
            if not copies and not (step.kind is Kind.PUBLISH and later):
                label = f"{name}-{world_size}x{pieces}-{k}-{step.kind.name}"
                cases.append((label, world_size, schedule, pieces, k))
    return cases


@pytest.mark.parametrize(("world_size", "schedule", "pieces", "index"), [
    pytest.param(*case, id=label) for label, *case in _necessary_steps()
])  # fmt: skip
def test_no_step_can_be_left_out(world_size: int, schedule: Callable[..., Steps], pieces: int, index: int) -> None:
    run = Run(world_size, times(3, schedule, pieces), edit=on_rank_0(lambda steps: without(steps, index)))
    assert explore(run.model()).counterexample is not None


# The explorer itself

COMPARED: dict[str, Run | KernelRun] = {
    "one shot, serialized": Run(2, times(4, one_shot), lanes=False),
    "one shot, 3 ranks, serialized": Run(3, times(2, one_shot, 1), lanes=False),
    "one shot": Run(2, times(2, one_shot, 1)),
    "two shots": Run(2, times(3, two_shot, 1), num_buffers=1),
    "mailbox": Run(2, times(2, mailbox, 1)),
    "kernel mode": KernelRun(2, (2, 1)),
    "one shot, failing": Run(2, times(1, one_shot, 1), lanes=False, failing=Failing()),
}


@pytest.mark.parametrize("name", COMPARED)
def test_reaches_the_states_of_a_plain_explorer(name: str) -> None:
    """So a memory cell is indeed a function of the positions, and levels lose no state."""
    model = replace(COMPARED[name].model(), fuse_waits=False)
    assert (explore(model).num_states, None) == plainly_explore(model)


@pytest.mark.parametrize("name", [
    "three slots at the wrap",
    "published before the upload has ended",
    "the result's upload without its edge",
    "comparisons that are not cyclic",
    "an operation that ends before its uploads",
    "kernel mode with a counter for each block and a varying grid",
    "kernel mode with one slot",
    "a wait before the publication of the same piece",
])  # fmt: skip
def test_finds_what_a_plain_explorer_finds(name: str) -> None:
    model = replace(FAULTS[name].run.model(), fuse_waits=False)
    found = explore(model).counterexample
    assert found is not None
    assert found.violation is plainly_explore(model)[1]


@pytest.mark.parametrize("run", [Run(3, times(3, one_shot), num_buffers=1), Run(2, times(3, two_shot))])
def test_fusing_waits_changes_no_verdict(run: Run) -> None:
    fused, plain = explore(run.model()), explore(replace(run, fuse_waits=False).model())
    assert fused.num_states < plain.num_states
    assert fused.counterexample is plain.counterexample is None


def _store_and_copy() -> Model:
    """One process writes a cell and raises a flag; the other reads the cell, and forgot to wait."""
    written = Access("cell", 0, 0, (0, 0), True, "seven")
    read = replace(written, order=(0, 1), writes=False)
    writer = [Step("begins", begins=(written,)), Step("ends", ends=(written,)), Step("raises", stores=(("flag", 1),))]
    reader = [Step("looks", begins=(read,)), Step("looked", ends=(read,))]
    return Model({"writer": writer, "reader": reader}, {"flag": 0})


def test_counterexample_is_readable() -> None:
    model = _store_and_copy()
    found = explore(model).counterexample
    assert str(found) == (
        "MIXED_UP: reader begins to read seven in cell before writer has begun to write seven there\n"
        "   0 start          flag = 0\n"
        "then reader: looks\n"
        "cell holds: nothing yet"
    )
    waits = Step("waits", (Wait("flag", 2, reached),), mark="waited")
    processes = {**model.processes, "reader": [waits, *model.processes["reader"]]}
    assert str(explore(replace(model, processes=processes)).counterexample) == (
        "DEADLOCK: nobody can move: reader before 'waits'\n"
        "   0 start          flag = 0\n"
        "   1 writer         begins\n"
        "   2 writer         ends\n"
        "   3 writer         raises   [flag: 0 -> 1]"
    )


def test_rejects_models_beyond_its_means() -> None:
    with pytest.raises(ValueError, match=r"needs \d+ bits, 63 are available"):
        explore(Run(8, times(4, one_shot)).model())
    with pytest.raises(MemoryError, match="more than 1000 states"):
        explore(Run(2, times(4, one_shot)).model(), max_states=1000)
