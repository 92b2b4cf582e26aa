"""A second, slow and plain explorer, to judge the fast one by: it stores what the fast one derives.

A state holds every word and every memory cell: what lies there, whether it is complete, and who has yet to read it.
No waits are fused. Of failures it knows those that nobody dies of and no reset follows.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace

from explorer import Violation
from explorer_model import FAILURE, Access, Model, Step, Wait


@dataclass(frozen=True)
class _Cell:
    """The last content written to one part of a memory; unread: processes that have yet to read it."""

    write: Access
    complete: bool
    unread: frozenset[tuple[str, Access]]


@dataclass(frozen=True)
class _State:
    positions: tuple[int, ...]
    words: tuple[int, ...]
    cells: frozenset[_Cell]


class _Wrong(Exception):
    pass


def plainly_explore(model: Model) -> tuple[int, Violation | None]:
    """How many different positions and words were reached, and the first violation."""
    plain = _PlainExplorer(model)
    waiting = deque([plain.initial])
    seen = {plain.initial}
    violation: Violation | None = None
    while waiting and not violation:
        state = waiting.popleft()
        try:
            following = set(plain.following(state))
        except _Wrong as wrong:
            violation = wrong.args[0]
            continue
        if not following and not plain.finished(state):
            violation = Violation.NOT_DRAINED if plain.failed(state) else Violation.DEADLOCK
        waiting += following - seen
        seen |= following
    return len({(state.positions, state.words) for state in seen}), violation


class _PlainExplorer:
    def __init__(self, model: Model) -> None:
        assert not model.watchers or not (model.watchers.victim or model.watchers.pauses)
        self._watchers = model.watchers
        self._names = list(model.processes)
        self._steps = list(model.processes.values())
        self._words = list(model.words)
        self._marks = {
            (name, step.mark): k + 1 for name, steps in model.processes.items() for k, step in enumerate(steps)
        }
        accesses = [(name, a) for name, steps in model.processes.items() for step in steps for a in step.begins]
        self._sources = {a: _sources(a, [b for _, b in accesses if b.writes]) for _, a in accesses if not a.writes}
        self._readers = {
            write: frozenset((name, a) for name, a in accesses if not a.writes and write in self._sources[a])
            for _, write in accesses
        }
        self.initial = _State((0,) * len(self._names), tuple(model.words.values()), frozenset())

    def finished(self, state: _State) -> bool:
        return all(at == len(steps) for at, steps in zip(state.positions, self._steps, strict=True))

    def failed(self, state: _State) -> bool:
        return self._watchers is not None and self._value(state, FAILURE) == 1

    def following(self, state: _State) -> Iterator[_State]:
        for i, (at, steps) in enumerate(zip(state.positions, self._steps, strict=True)):
            if at < len(steps) and self._may(state, steps[at]):
                yield self._after(state, i, steps[at])
        if self._watchers:
            failed = self.failed(state)
            if not failed:
                yield self._with(state, FAILURE, 1)
            for word, value in self._watchers.poison.items():
                if failed and self._value(state, word) != value:
                    yield self._with(state, word, value)

    def _may(self, state: _State, step: Step) -> bool:
        def holds(wait: Wait) -> bool:
            return wait.test(self._value(state, wait.word), wait.target)

        return (all(map(holds, step.waits)) or any(map(holds, step.instead))) and all(
            state.positions[self._names.index(process)] >= self._marks[process, mark] for process, mark in step.behind
        )

    def _after(self, state: _State, i: int, step: Step) -> _State:
        checked = not (step.lenient and self.failed(state))
        cells = set(state.cells)
        for access in step.begins:
            (self._begin_write if access.writes else self._begin_read)(cells, access, checked)
        for access in step.ends:
            for cell in [cell for cell in cells if cell.write == access or (self._names[i], access) in cell.unread]:
                cells.remove(cell)
                unread = cell.unread - {(self._names[i], access)}
                cells.add(replace(cell, complete=cell.complete or cell.write == access, unread=unread))
        positions = tuple(at + (j == i) for j, at in enumerate(state.positions))
        state = _State(positions, state.words, frozenset(cells))
        for word, value in step.stores:
            state = self._with(state, word, value)
        return state

    def _begin_write(self, cells: set[_Cell], access: Access, checked: bool) -> None:
        for cell in [cell for cell in cells if cell.write.overlaps(access)]:
            if checked and (cell.unread or not cell.complete or cell.write.order > access.order):
                raise _Wrong(Violation.OVERWRITTEN)
            cells.remove(cell)
        cells.add(_Cell(access, False, self._readers[access]))

    def _begin_read(self, cells: set[_Cell], access: Access, checked: bool) -> None:
        there = {cell.write for cell in cells if cell.complete}
        if checked and not self._sources[access] <= there:
            raise _Wrong(Violation.MIXED_UP)

    def _value(self, state: _State, word: str) -> int:
        return state.words[self._words.index(word)]

    def _with(self, state: _State, word: str, value: int) -> _State:
        index = self._words.index(word)
        return replace(state, words=(*state.words[:index], value, *state.words[index + 1 :]))


def _sources(read: Access, writes: list[Access]) -> set[Access]:
    """The writes whose content ``read`` expects: the last ones before it that nothing overwrites."""
    before = [a for a in writes if a.overlaps(read) and a.order < read.order]
    return {a for a in before if not any(b.overlaps(a) and b.order > a.order for b in before)}
