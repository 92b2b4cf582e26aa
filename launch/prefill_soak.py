"""Many short prompts one after the other: whether memory grows."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from prefill_arms import PrefillArm
from prefill_trials import PrefillTrials
from progress_bar import Progress

LENGTHS = 5
# Every length has come twice by then, so that buffers have their final sizes.
SETTLED = 2 * LENGTHS


@dataclass(frozen=True)
class Footprint:
    """Bytes after a prompt, on the rank that has most: torch's allocations on the device, what it holds for them, and
    the process's resident memory."""

    allocated: int
    reserved: int
    resident: int


def soak(trials: PrefillTrials, arm: PrefillArm, prompts: int, max_length: int) -> list[Footprint]:
    """Prefills ``prompts`` prompts of a few lengths up to ``max_length`` tokens, in turn; one entry each."""
    chooser = random.Random(17)
    lengths = [max_length, *(chooser.randint(max_length // 4, max_length) for _ in range(LENGTHS - 1))]
    found = []
    with Progress("soak", prompts) as progress:
        for number in range(prompts):
            if arm.team == trials.team.name:
                trials.prefill(arm, trials.make_prompt(lengths[number % LENGTHS]))
            found.append(_footprint(trials))
            progress.advance()
    return found


def growth(found: Sequence[Footprint]) -> Footprint:
    """How far the last prompts of all lengths have come above the first ones that count. More than SETTLED needed."""
    before, after = found[SETTLED - LENGTHS : SETTLED], found[-LENGTHS:]

    def grown(read: Callable[[Footprint], int]) -> int:
        return max(map(read, after)) - max(map(read, before))

    return Footprint(grown(lambda f: f.allocated), grown(lambda f: f.reserved), grown(lambda f: f.resident))


def _footprint(trials: PrefillTrials) -> Footprint:
    allocated = reserved = 0
    if trials.team.device.type == "cuda":
        torch.cuda.synchronize()
        allocated, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    mine = (allocated, reserved, pages * os.sysconf("SC_PAGE_SIZE"))
    return Footprint(*(round(trials.team.largest(value)) for value in mine))
