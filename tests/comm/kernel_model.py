"""Kernel mode as a model for the explorer."""

from __future__ import annotations

from dataclasses import dataclass

from explorer_model import Access, Model, Step, Wait
from failure_models import FAILED, FAILED_AGAIN, RESET, Failing

from tpoverlap.comm.words import MASK, reached

_BLOCKS = range(2)


@dataclass(frozen=True)
class KernelRun:
    """Each call is one kernel of two blocks a rank, which starts when the kernel before it has ended.

    A block writes its part of the payload into the rank's slot, raises its flag to the call's sequence number, waits
    for the same block of every peer and reads their parts. One sequence a grid, a fixed grid: every block does so on
    every call. blocks_with_payload: how many blocks have a part in each call, 1 or 2.

    counts_per_block plants the fault: blocks without a part are not launched, and each block counts its own calls.
    """

    world_size: int
    blocks_with_payload: tuple[int, ...]
    num_slots: int = 2
    first_number: int = MASK - 1
    counts_per_block: bool = False
    failing: Failing | None = None
    after_reset: tuple[int, ...] = ()

    def model(self) -> Model:
        words = {_flag(q, b): self.first_number for q in range(self.world_size) for b in _BLOCKS}
        processes = {_block(q, b): self._steps(q, b) for q in range(self.world_size) for b in _BLOCKS}
        if not self.failing:
            return Model(processes, words)
        return self.failing.model(processes, words, self._leaders)

    @property
    def _leaders(self) -> list[str]:
        return [_block(q, 0) for q in range(self.world_size)]

    def _steps(self, rank: int, block: int) -> list[Step]:
        steps = self._calls(rank, block, self.blocks_with_payload, first_call=0)
        if self.failing is None:
            return steps
        steps.append(Step("has ended all calls", mark=FAILED))
        if not self.failing.resets:
            return steps
        if block == 0:
            drained = tuple((_block(rank, b), FAILED) for b in _BLOCKS[1:])
            own_words = {_flag(rank, b): self.first_number for b in _BLOCKS}
            steps += self.failing.reset(rank, self._leaders, drained, own_words)
        else:
            steps.append(Step("goes on after the reset", behind=((_block(rank, 0), RESET),)))
        steps += self._calls(rank, block, self.after_reset, first_call=len(self.blocks_with_payload))
        return [*steps, Step("has ended all calls", mark=FAILED_AGAIN)]

    def _calls(self, rank: int, block: int, calls: tuple[int, ...], first_call: int) -> list[Step]:
        steps: list[Step] = []
        count = 0
        for index, busy in enumerate(calls):
            n = first_call + index
            before = tuple((_block(rank, b), n - 1) for b in _BLOCKS if b != block and index > 0)
            if self.counts_per_block and block >= busy:
                steps.append(Step(f"is not launched in call {n}", behind=before, mark=n))
                continue
            count += 1
            number = (self.first_number + (count if self.counts_per_block else index + 1)) & MASK
            # A single busy block has the whole payload, else block b has half b.
            halves = [half for half in range(2) if block == (half if busy == 2 else 0)]
            peers = [q for q in range(self.world_size) if q != rank]
            writes = tuple(self._access(n, rank, number, half, True) for half in halves)
            reads = tuple(self._access(n, q, number, half, False) for q in peers for half in halves)
            lenient = self.failing is not None
            flags = [Wait(_flag(q, block), number, reached) for q in peers]
            steps += [
                Step(f"begins to write its part of call {n}", behind=before, begins=writes, lenient=lenient),
                Step(f"has written its part of call {n}", ends=writes, mark=("written", n)),
                Step(f"raises its flag to {number}", stores=((_flag(rank, block), number),)),
                *(Step(f"waits until {flag.word} has come to {number}", (flag,)) for flag in flags),
                Step(f"begins to read its parts of call {n}", begins=reads, lenient=lenient),
                Step(f"has read its parts of call {n}", ends=reads, mark=n),
            ]
        return steps

    def _access(self, n: int, rank: int, number: int, half: int, writes: bool) -> Access:
        slot = f"slot {number % self.num_slots} of rank {rank}"
        return Access(slot, n, half, (n, 1 if writes else 2), writes, f"call {n}, half {half} of rank {rank}")


def _block(rank: int, block: int) -> str:
    return f"rank {rank} block {block}"


def _flag(rank: int, block: int) -> str:
    return f"flag {rank}.{block}"
