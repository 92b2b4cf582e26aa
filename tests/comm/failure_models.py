"""Failures in models for the explorer: recorded at any moment, words poisoned at any moment, a reset after them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from explorer_model import FAILURE, Model, Point, Step, Wait, Watchers

from tpoverlap.comm.protocol import POISON, POISON_OFFSET
from tpoverlap.comm.words import MASK

FAILED, FAILED_AGAIN = "failed", "failed again"
"""Marks behind all operations before a reset, and behind all after it."""
_STOPPED, _RESTORED, _COMMITTED, RESET = "stopped", "restored", "committed", "reset"


@dataclass(frozen=True)
class Failing:
    """A failure at any moment.

    raises: a wait may look at the failure record and leave the operations; words are not poisoned then, and what is
    copied has to be right to the end. So it is on CPU. Else the steps run through, as queued launches do, poison lets
    their waits pass, and what they copy after a failure does not matter. dies: a rank that may stop forever.
    resets: all ranks come to reset and go on with operations of their own, in which it may fail again.

    The rest plants faults. repeats: poison is repeated. records_first: the record precedes the poison. The barriers
    of a reset, and that a rank's watcher is silent from before the first until behind the second.
    """

    raises: bool = False
    dies: int | None = None
    resets: bool = False
    repeats: bool = True
    records_first: bool = True
    first_barrier: bool = True
    second_barrier: bool = True
    watcher_stops: bool = True

    def model(
        self,
        processes: Mapping[str, Sequence[Step]],
        words: Mapping[str, int],
        leaders: Sequence[str],
        untouched: Mapping[str, int] | None = None,
    ) -> Model:
        """leaders: for every rank the process that resets. untouched: further words, which no watcher poisons."""
        victim: tuple[str, ...] = ()
        if self.dies is not None:
            victim = tuple(name for name in processes if name.startswith(f"rank {self.dies}"))
        pauses = [(leader, _STOPPED, RESET) for leader in leaders if self.resets and self.watcher_stops]
        poison = {} if self.raises else {word: _poison_of(word, start, processes) for word, start in words.items()}
        watchers = Watchers(poison, tuple(pauses), self.repeats, self.records_first, victim)
        return Model(processes, {**words, **(untouched or {}), FAILURE: 0}, watchers)

    def reset(
        self, rank: int, leaders: Sequence[str], drained: tuple[Point, ...], words: Mapping[str, int]
    ) -> list[Step]:
        """What the leader of ``rank`` does: drain, barrier, restoration of the rank's own ``words``, barrier.

        The second barrier ends by rank 0 clearing the failure record; until then nobody may call.
        """
        others = [leader for q, leader in enumerate(leaders) if q != rank]
        failed = Wait(FAILURE, 1, lambda value, target: value == target)
        steps = [Step("reset: drained; its watcher is silent from here", (failed,), drained, mark=_STOPPED)]
        if self.first_barrier:
            steps.append(Step("reset: first barrier", behind=tuple((other, _STOPPED) for other in others)))
        steps += [Step(f"reset: restores {word}", stores=((word, start),)) for word, start in words.items()]
        steps.append(Step("reset: has restored", mark=_RESTORED))
        if rank == 0:
            restored = tuple((other, _RESTORED) for other in others) if self.second_barrier else ()
            text = "reset: clears the failure record, which commits it"
            steps.append(Step(text, behind=restored, stores=((FAILURE, 0),), mark=_COMMITTED))
        elif self.second_barrier:
            steps.append(Step("reset: second barrier", behind=((leaders[0], _COMMITTED),)))
        return [*steps, Step("reset: done", mark=RESET)]


def _poison_of(word: str, start: int, processes: Mapping[str, Sequence[Step]]) -> int:
    """The poison of ``word``.

    Asserts that it satisfies every wait, however little its writer knew of the progress, and that nothing else passes
    for poison where only poison should.
    """
    steps = [step for steps in processes.values() for step in steps]
    waits = [wait for step in steps for wait in step.waits if wait.word == word]
    instead = [wait for step in steps for wait in step.instead if wait.word == word]
    stored = [start, *(value for step in steps for stored_word, value in step.stores if stored_word == word)]
    poisons = [POISON if word.startswith("box") else (value + POISON_OFFSET) & MASK for value in stored]
    assert all(wait.test(poison, wait.target) for poison in poisons for wait in (*waits, *instead))
    assert not any(wait.test(value, wait.target) for value in stored for wait in instead)
    return poisons[-1]
