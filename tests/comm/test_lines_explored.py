"""Kernel mode's lines in all interleavings of small groups: right as they are, and every planted fault found.

Calls through lines, few of them or all, mixed with calls through slots and flags. Each exploration prints its name and
how many states it reached (``pytest -s``).
"""

from __future__ import annotations

import operator
import re
from dataclasses import dataclass, replace
from importlib import resources

import pytest
from explorer import Exploration, Violation, explore
from explorer_model import Model, Step, Wait
from failure_models import Failing
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_model import ALL, FEW, POISONED, Call, KernelRun, Lines, refreshed
from plain_explorer import plainly_explore

from tpoverlap.comm.words import MASK

MIXED: tuple[Call, ...] = (ALL, 2, FEW, 1, ALL, FEW, 2, ALL)
# Three rounds of eight numbers: lines that rest for a round, then every neighbourhood of modes.
THREE_ROUNDS: tuple[Call, ...] = (ALL, ALL, *(FEW,) * 6, *(ALL, 2, FEW, 1) * 3, *(ALL,) * 4)


def explored(name: str, run: KernelRun) -> Exploration:
    result = explore(run.model())
    print(f"\n{name}: {result.num_states:,} states", end="")
    return result


# As it is

SOUND = {
    "lines, 2 ranks": KernelRun(2, (ALL,) * 6),
    "few lines, 2 ranks": KernelRun(2, (FEW, ALL, FEW, FEW, ALL)),
    "lines and slots, 2 ranks": KernelRun(2, MIXED),
    "lines, 3 ranks": KernelRun(3, (FEW, ALL, FEW, FEW, ALL)),
    "lines and slots, 3 ranks": KernelRun(3, MIXED),
    "three rounds of numbers, 2 ranks": KernelRun(2, THREE_ROUNDS, modulus=8, first_number=0),
    "three rounds of numbers, 3 ranks": KernelRun(3, THREE_ROUNDS, modulus=8, first_number=0),
    "a dead peer, 2 ranks, lines": KernelRun(2, (ALL, FEW, ALL, FEW), failing=Failing(dies=1)),
    "a dead peer, 2 ranks, lines and slots": KernelRun(2, (ALL, 2, FEW), failing=Failing(dies=1)),
    "a dead peer, 3 ranks": KernelRun(3, (FEW,), failing=Failing(dies=2)),
    "reset, 2 ranks, lines": KernelRun(2, (ALL,), failing=Failing(resets=True), after_reset=(FEW, ALL, FEW)),
    "reset, 2 ranks, lines and slots": KernelRun(
        2, (ALL, 2), failing=Failing(resets=True), after_reset=(ALL, 2, FEW, ALL)
    ),
}


@pytest.mark.parametrize("name", SOUND)
def test_no_interleaving_goes_wrong(name: str) -> None:
    """Nor does any poll stay, whoever dies and however often a live rank's flag undoes a poison."""
    result = explored(name, SOUND[name])
    assert result.counterexample is None, str(result.counterexample)
    assert result.completes


@pytest.mark.parametrize("first_number", [0, 1, (1 << 31) - 4, (1 << 31) - 2, MASK - 3, MASK])
def test_numbers_may_start_anywhere(first_number: int) -> None:
    result = explore(KernelRun(2, MIXED, first_number=first_number).model())
    assert result.counterexample is None, str(result.counterexample)
    assert result.completes


@settings(max_examples=30, deadline=None)
@given(
    calls=st.lists(st.sampled_from([FEW, ALL, 1, 2]), min_size=9, max_size=20),
    first_number=st.integers(0, 7),
)
def test_any_calls_may_follow_each_other_over_rounds_of_numbers(calls: list[Call], first_number: int) -> None:
    result = explore(KernelRun(2, tuple(calls), modulus=8, first_number=first_number).model())
    assert result.counterexample is None, str(result.counterexample)
    assert result.completes


def test_the_kernel_has_the_models_constants() -> None:
    source = resources.files("tpoverlap.comm").joinpath("kernel_mode.cu").read_text()
    mask = re.search(r"\(operation & (\w+)u\) == 0\) refresh_lines", source)
    poisoned = re.search(r"kPoisoned = 1u << (\d+);", source)
    assert mask
    assert poisoned
    for number in (MASK - 1, MASK, 0, 1, 2, 3, (1 << 31) - 1, 1 << 31, (1 << 31) + 1, (1 << 31) + 2, 1 << 30):
        assert (number & int(mask[1], 16) == 0) == refreshed(number, MASK + 1)
    assert 1 << int(poisoned[1]) == POISONED


# Planted faults


@dataclass(frozen=True)
class Fault:
    run: KernelRun
    violation: Violation
    memory: str = ""
    """How the name of the memory that is hit begins."""


RESTING: tuple[Call, ...] = (ALL, *(FEW,) * 7, ALL)
"""Line 1 rests from a number until the same number comes again, modulo 8."""

FAULTS = {
    "one slot": Fault(KernelRun(2, (ALL, ALL), num_slots=1), Violation.OVERWRITTEN, "lines"),
    "lines that a reset does not clear": Fault(
        KernelRun(2, (ALL,), failing=Failing(resets=True), after_reset=(ALL,), clears_lines=False),
        Violation.MIXED_UP,
        "lines",
    ),
    "no refresh": Fault(
        KernelRun(2, RESTING, modulus=8, first_number=0, refreshes=lambda number, modulus: False),
        Violation.MIXED_UP,
        "lines",
    ),
    "a refresh of one slot only": Fault(
        KernelRun(
            2, RESTING, modulus=8, first_number=0, refreshes=lambda number, modulus: number % (modulus // 2) == 0
        ),
        Violation.MIXED_UP,
        "lines",
    ),
    "a refresh once in a round, whose own number comes again": Fault(
        KernelRun(2, (*(FEW,) * 8, ALL), modulus=8, first_number=7, refreshes=lambda number, modulus: number < 2),
        Violation.MIXED_UP,
        "lines",
    ),
    "lines in the slots of the other mode": Fault(
        KernelRun(2, (2, FEW, ALL), lines_in_slots=True), Violation.MIXED_UP, "slot"
    ),
    "polls that do not look at the poison": Fault(
        KernelRun(2, (FEW,), failing=Failing(dies=1), polls_see_poison=False), Violation.NOT_DRAINED
    ),
    "polls that do not look at the poison, nobody dead": Fault(
        KernelRun(2, (1, FEW, 1, FEW), failing=Failing(), polls_see_poison=False), Violation.NOT_DRAINED
    ),
    "poison that is written once": Fault(
        KernelRun(2, (FEW,), failing=Failing(dies=1, repeats=False)), Violation.NOT_DRAINED
    ),
    "poison before the record": Fault(
        KernelRun(2, (FEW,), failing=Failing(records_first=False)), Violation.MIXED_UP, "lines"
    ),
    "reset without the second barrier": Fault(
        KernelRun(2, (FEW,), failing=Failing(resets=True, second_barrier=False), after_reset=(FEW,)),
        Violation.MIXED_UP,
        "lines",
    ),
    "blocks that go on before their kernel has ended": Fault(
        KernelRun(2, (ALL, FEW, ALL), kernels_in_order=False), Violation.OVERWRITTEN, "lines"
    ),
    "a call without lines, which waits for nobody": Fault(
        KernelRun(2, (ALL, Lines(0), ALL)), Violation.OVERWRITTEN, "lines"
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_planted_fault_is_found(name: str) -> None:
    fault = FAULTS[name]
    found = explored(name, fault.run).counterexample
    assert found is not None
    print(f"\n{found}")
    assert found.violation is fault.violation
    assert found.memory.startswith(fault.memory)
    assert bool(found.memory) == (fault.violation in (Violation.OVERWRITTEN, Violation.MIXED_UP))


# The explorer's part in it

COMPARED = {
    "lines": KernelRun(2, (ALL, FEW, ALL)),
    "lines and slots": KernelRun(2, (ALL, 2, FEW)),
    "lines, failing": KernelRun(2, (FEW,), failing=Failing()),
}


@pytest.mark.parametrize("name", COMPARED)
def test_reaches_the_states_of_a_plain_explorer(name: str) -> None:
    model = replace(COMPARED[name].model(), fuse_waits=False)
    assert (explore(model).num_states, None) == plainly_explore(model)


@pytest.mark.parametrize("name", [
    "one slot",
    "no refresh",
    "a refresh of one slot only",
    "a refresh once in a round, whose own number comes again",
    "lines in the slots of the other mode",
    "blocks that go on before their kernel has ended",
    "a call without lines, which waits for nobody",
])  # fmt: skip
def test_finds_what_a_plain_explorer_finds(name: str) -> None:
    model = replace(FAULTS[name].run.model(), fuse_waits=False)
    found = explore(model).counterexample
    assert found is not None
    assert found.violation is plainly_explore(model)[1]


@pytest.mark.parametrize("fuse_waits", [True, False])
@pytest.mark.parametrize(("flag", "violation"), [(1, None), (0, Violation.DEADLOCK)])
def test_poison_ends_the_poll_but_no_wait_before_it(fuse_waits: bool, flag: int, violation: Violation | None) -> None:
    steps = [
        Step("waits for the flag", (Wait("flag", 1, operator.eq),)),
        Step("polls", (Wait("line", 1, operator.eq),), instead=(Wait("poison", 1, operator.eq),)),
    ]
    words = {"flag": flag, "line": 0, "poison": 1}
    found = explore(Model({"reader": steps}, words, fuse_waits=fuse_waits)).counterexample
    assert (found.violation if found else None) is violation
