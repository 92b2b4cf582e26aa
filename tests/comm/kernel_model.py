"""Kernel mode as a model for the explorer: calls through slots and flags, and calls through lines."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass, replace

from explorer_model import Access, Model, Step, Wait
from failure_models import FAILED, FAILED_AGAIN, RESET, Failing

from tpoverlap.comm.words import MASK, reached

_BLOCKS = range(2)
_LINES = range(2)
POISONED = 1 << 29
"""How far ahead a number counts as poison."""


@dataclass(frozen=True)
class Lines:
    """A call whose payload travels in ``count`` lines, line b by block b."""

    count: int


FEW, ALL = Lines(1), Lines(2)

Call = Lines | int
"""Lines, or through a slot and its flags: how many blocks have a part of the payload, 1 or 2."""


def refreshed(number: int, modulus: int) -> bool:
    """Whether an operation writes all lines of its slot: one for each slot, twice in a round of the numbers."""
    return number % (modulus // 2) < 2


@dataclass(frozen=True)
class KernelRun:
    """Each call is one kernel of two blocks a rank, which starts when the kernel before it has ended.

    Slot and flag: a block writes its part of the payload into the rank's slot, raises its flag to the call's sequence
    number, waits for the same block of every peer and reads their parts. One sequence a grid, a fixed grid: every block
    does so on every call.

    Lines: a block raises its flag, which nobody waits for, writes its line and polls the same line of every peer. Data
    and number of a line are written, and seen, at one instant, so a line is a word that holds the number, and its data
    is an access at the same step. A poll ends when the number is the call's, or when the peer's flag is poisoned.

    modulus: of the numbers, to see their wrap in a run of few calls.

    The rest plants faults. counts_per_block: blocks without a part are not launched, and each block counts its own
    calls. kernels_in_order: a kernel starts when all blocks of the one before have ended; else each block goes on by
    itself. refreshes: (number, modulus) to whether lines are refreshed. lines_in_slots: lines lie where the other mode
    has its payload, any word of which may look like the next number. clears_lines: a reset sets them to the first
    number. polls_see_poison: a poll looks at the flag too.
    """

    world_size: int
    calls: tuple[Call, ...]
    num_slots: int = 2
    first_number: int = MASK - 1
    modulus: int = MASK + 1
    failing: Failing | None = None
    after_reset: tuple[Call, ...] = ()
    counts_per_block: bool = False
    kernels_in_order: bool = True
    refreshes: Callable[[int, int], bool] = refreshed
    lines_in_slots: bool = False
    clears_lines: bool = True
    polls_see_poison: bool = True

    def model(self) -> Model:
        assert self.modulus > MASK or not self.failing, "poison lies far ahead"
        ranks = range(self.world_size)
        flags = {word: value for q in ranks for word, value in self._own_flags(q).items()}
        lines = {word: value for q in ranks for word, value in self._own_lines(q).items()}
        processes = {_block(q, b): self._steps(q, b) for q in ranks for b in _BLOCKS}
        if not self.failing:
            return Model(processes, {**flags, **lines})
        return self.failing.model(processes, flags, self._leaders, untouched=lines)

    @property
    def _leaders(self) -> list[str]:
        return [_block(q, 0) for q in range(self.world_size)]

    def _own_flags(self, rank: int) -> dict[str, int]:
        return {_flag(rank, b): self.first_number for b in _BLOCKS}

    def _own_lines(self, rank: int) -> dict[str, int]:
        if not any(isinstance(call, Lines) for call in (*self.calls, *self.after_reset)):
            return {}
        return {_line(rank, slot, line): self.first_number for slot in range(self.num_slots) for line in _LINES}

    def _steps(self, rank: int, block: int) -> list[Step]:
        steps = self._all_calls(rank, block, self.calls, first_call=0)
        if self.failing is None:
            return steps
        steps.append(Step("has ended all calls", mark=FAILED))
        if not self.failing.resets:
            return steps
        if block == 0:
            drained = tuple((_block(rank, b), FAILED) for b in _BLOCKS[1:])
            own_words = self._own_flags(rank) | (self._own_lines(rank) if self.clears_lines else {})
            steps += self.failing.reset(rank, self._leaders, drained, own_words)
        else:
            steps.append(Step("goes on after the reset", behind=((_block(rank, 0), RESET),)))
        steps += self._all_calls(rank, block, self.after_reset, first_call=len(self.calls))
        return [*steps, Step("has ended all calls", mark=FAILED_AGAIN)]

    def _all_calls(self, rank: int, block: int, calls: tuple[Call, ...], first_call: int) -> list[Step]:
        steps: list[Step] = []
        count = 0
        for index, call in enumerate(calls):
            n = first_call + index
            before = tuple((_block(rank, b), n - 1) for b in _BLOCKS if b != block and index > 0)
            if self.counts_per_block and isinstance(call, int) and block >= call:
                steps.append(Step(f"is not launched in call {n}", behind=before, mark=n))
                continue
            count += 1
            number = (self.first_number + (count if self.counts_per_block else index + 1)) % self.modulus
            one_call = self._refresh(n, rank, block, number, used=call.count if isinstance(call, Lines) else 0)
            if isinstance(call, Lines):
                one_call += self._lines_call(n, rank, block, number, call.count)
            else:
                one_call += self._slot_call(n, rank, block, number, call)
            if self.kernels_in_order:
                one_call[0] = replace(one_call[0], behind=before)
            one_call[-1] = replace(one_call[-1], mark=n)
            steps += one_call
        return steps

    # Through a slot and its flags

    def _slot_call(self, n: int, rank: int, block: int, number: int, busy: int) -> list[Step]:
        # A single busy block has the whole payload, else block b has half b.
        halves = [half for half in range(2) if block == (half if busy == 2 else 0)]
        peers = self._peers(rank)
        writes = tuple(self._half(n, rank, number, half, True) for half in halves)
        reads = tuple(self._half(n, q, number, half, False) for q in peers for half in halves)
        lenient = self.failing is not None
        flags = [Wait(_flag(q, block), number, self._reached) for q in peers]
        lines = [_line(rank, number % self.num_slots, half) for half in halves if self.lines_in_slots]
        next_number = (number + self.num_slots) % self.modulus
        return [
            Step(f"begins to write its part of call {n}", begins=writes, lenient=lenient),
            Step(
                f"has written its part of call {n}",
                ends=writes,
                stores=tuple((line, next_number) for line in lines),
                mark=("written", n),
            ),
            Step(f"raises its flag to {number}", stores=((_flag(rank, block), number),)),
            *(Step(f"waits until {flag.word} has come to {number}", (flag,)) for flag in flags),
            Step(f"begins to read its parts of call {n}", begins=reads, lenient=lenient),
            Step(f"has read its parts of call {n}", ends=reads),
        ]

    def _half(self, n: int, rank: int, number: int, half: int, writes: bool) -> Access:
        slot = f"slot {number % self.num_slots} of rank {rank}"
        return Access(slot, n, half, (n, 1 if writes else 2), writes, f"call {n}, half {half} of rank {rank}")

    def _reached(self, value: int, target: int) -> bool:
        scale = (MASK + 1) // self.modulus
        return reached(value * scale, target * scale)

    # Through lines

    def _lines_call(self, n: int, rank: int, block: int, number: int, count: int) -> list[Step]:
        steps = [Step(f"raises its flag to {number}", stores=((_flag(rank, block), number),))]
        if block >= count:
            return steps
        steps.append(self._write_line(n, rank, number, block, f"writes its line of call {n} with number {number}"))
        for q in self._peers(rank):
            word = _line(q, number % self.num_slots, block)
            flag = Wait(_flag(q, block), number, _is_poisoned)
            read = (self._data(n, q, number, block, False),)
            text = f"sees {number} in {word}" + (f", or poison in {flag.word}" if self.polls_see_poison else "")
            steps.append(
                Step(
                    text,
                    (Wait(word, number, operator.eq),),
                    begins=read,
                    ends=read,
                    instead=(flag,) if self.polls_see_poison else (),
                    lenient=self.failing is not None,
                )
            )
        return steps

    def _refresh(self, n: int, rank: int, block: int, number: int, used: int) -> list[Step]:
        """The grid's threads take the lines that the call leaves alone, from the first such line on."""
        if not (self._own_lines(rank) and self.refreshes(number, self.modulus)):
            return []
        lines = [line for line in _LINES[used:] if (line - used) % len(_BLOCKS) == block]
        return [self._write_line(n, rank, number, line, f"refreshes line {line} with {number}") for line in lines]

    def _write_line(self, n: int, rank: int, number: int, line: int, text: str) -> Step:
        write = (self._data(n, rank, number, line, True),)
        stores = ((_line(rank, number % self.num_slots, line), number),)
        return Step(text, begins=write, ends=write, stores=stores, lenient=self.failing is not None)

    def _data(self, n: int, rank: int, number: int, line: int, writes: bool) -> Access:
        memory = f"{'slot' if self.lines_in_slots else 'lines of slot'} {number % self.num_slots} of rank {rank}"
        text = f"line {line} of call {n} of rank {rank}"
        return Access(memory, "lines", line, (n, 1 if writes else 2), writes, text)

    def _peers(self, rank: int) -> list[int]:
        return [q for q in range(self.world_size) if q != rank]


def _is_poisoned(value: int, operation: int) -> bool:
    return POISONED <= (value - operation) & MASK < 1 << 31


def _block(rank: int, block: int) -> str:
    return f"rank {rank} block {block}"


def _flag(rank: int, block: int) -> str:
    return f"flag {rank}.{block}"


def _line(rank: int, slot: int, line: int) -> str:
    return f"line {rank}.{slot}.{line}"
