"""What the explorer explores: straight-line processes that share 32-bit words and memory.

A process runs its steps in order, each at one instant. A step may wait for words and for points of other processes,
store words, and begin or end accesses to memory; a copy is two steps, so that overlapping accesses are seen. Every
access has its place in the order that the protocol intends for its memory.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

FAILURE = "failure"
"""The word that says whether a failure is recorded, in models with watchers."""

Point = tuple[str, Hashable]
"""(process, mark): behind the process's step of that mark."""


@dataclass(frozen=True)
class Wait:
    """Until ``test(value of word, target)``."""

    word: str
    target: int
    test: Callable[[int, int], bool]


@dataclass(frozen=True)
class Access:
    """One access to bytes of ``memory``.

    Two parts of the same ``layout`` are disjoint; parts of different layouts overlap. order: its place among the
    accesses to this memory as the protocol intends them. text: what is written, or what the reader expects.
    """

    memory: str
    layout: Hashable
    part: Hashable
    order: tuple[int, int]
    writes: bool
    text: str

    def overlaps(self, other: Access) -> bool:
        return self.memory == other.memory and (self.layout != other.layout or self.part == other.part)

    def conflicts(self, other: Access) -> bool:
        return (self.writes or other.writes) and self.overlaps(other)


@dataclass(frozen=True)
class Step:
    """mark: a name for the point behind this step; ``behind`` are points that others must have reached.

    instead: any one of these lets the step pass too, whatever ``waits`` say.
    escape: the mark of its own behind which the process may go on instead of this step, once a failure is recorded.
    lenient: accesses are not checked once a failure is recorded, since their operation is known to have failed.
    """

    text: str
    waits: tuple[Wait, ...] = ()
    behind: tuple[Point, ...] = ()
    begins: tuple[Access, ...] = ()
    ends: tuple[Access, ...] = ()
    stores: tuple[tuple[str, int], ...] = ()
    mark: Hashable = None
    instead: tuple[Wait, ...] = ()
    escape: Hashable = None
    lenient: bool = False

    @property
    def only_waits(self) -> bool:
        acts = self.begins or self.ends or self.stores or self.instead
        return not acts and self.mark is None and self.escape is None


@dataclass(frozen=True)
class Watchers:
    """A failure that is recorded (FAILURE becomes 1) at any moment, and watchers that then poison words at any moment.

    poison: the poisoned value of each word. pauses: for each watcher the process and the marks between which it is
    silent; none: never. repeats: whether a word whose poison was undone is poisoned again. records_first: whether the
    failure is recorded before the first poison. victim: processes that may stop forever, all together, at any moment.
    """

    poison: Mapping[str, int]
    pauses: tuple[tuple[str, Hashable, Hashable], ...] = ()
    repeats: bool = True
    records_first: bool = True
    victim: tuple[str, ...] = ()


@dataclass(frozen=True)
class Model:
    """words: every word with its value at the start. fuse_waits: see :mod:`explorer_states`."""

    processes: Mapping[str, Sequence[Step]]
    words: Mapping[str, int]
    watchers: Watchers | None = None
    fuse_waits: bool = True

    @cached_property
    def stored(self) -> dict[str, dict[str, list[int]]]:
        """For every word the processes that store it, each with the values in their order."""
        result: dict[str, dict[str, list[int]]] = {word: {} for word in self.words}
        for name, steps in self.processes.items():
            for step in steps:
                for word, value in step.stores:
                    result[word].setdefault(name, []).append(value)
        return result
