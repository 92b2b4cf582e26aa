"""A model's states, packed into 63 bits each, and the moves between them, for whole arrays of states at once.

A memory cell remembers what it holds, who writes it and who reads it: all of that is a function of the processes'
positions, so a state is one position a process and one value a word. Where a single process stores a word and nobody
poisons it, its value follows from that process's position too.

The only reduction is that a wait that can never turn false again is fused into the step after it (``fuse_waits``). It
is sound. Such a step changes nothing but its process's position, nobody refers to a position between it and the step
after it (it has no mark), and it can be put off until right before that step, where it still holds. So with and
without it the same accesses begin in the same surroundings, and a process that is stuck at one of several waits is
stuck before all of them. That the wait never turns false again is checked: no watcher touches the word, a single
process stores it, and over its values in their order the condition turns from false to true at most once.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from explorer_model import FAILURE, Access, Model, Step, Wait

STATE_BITS = 63
_DEAD = "dead"


@dataclass(frozen=True)
class Move:
    """The same step of one process, or act of a watcher, from each of the states ``rows`` of an array to ``codes``."""

    process: int  # -1: no process
    text: str  # empty: the process's own step
    rows: np.ndarray
    codes: np.ndarray
    is_progress: bool = True


@dataclass(frozen=True)
class _Tables:
    """What one process does at each of its positions, to be looked up with arrays of positions."""

    runs: np.ndarray
    waits: dict[str, np.ndarray]  # [position * values + value index]: whether the wait passes
    instead: dict[str, np.ndarray]  # the same for what passes instead of all waits
    behind: dict[int, np.ndarray]  # the position that another process must have reached
    hazards: dict[int, np.ndarray]  # the same for the accesses that begin: below it is a violation
    keep: np.ndarray
    put: np.ndarray
    escape: np.ndarray  # position, or -1
    lenient: np.ndarray


class States:
    """names: of the processes; steps: theirs, after fusion. Positions count steps done."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._watchers = model.watchers
        self.names = list(model.processes)
        self.steps = [self._fused(steps) if model.fuse_waits else list(steps) for steps in model.processes.values()]
        self.values = self._collect_values()
        self._followed = self._follow_words()
        self._pack_fields()
        self._marks = [
            {step.mark: k + 1 for k, step in enumerate(steps) if step.mark is not None} for steps in self.steps
        ]
        self._ends = [{access: k + 1 for k, step in enumerate(steps) for access in step.ends} for steps in self.steps]
        self._tables = [self._compile(i) for i in range(len(self.names))]

    @property
    def initial(self) -> int:
        code = 0
        for word, value in self._model.words.items():
            if word not in self._followed:
                code |= self.values[word].index(value) << self._fields[word][0]
        return code

    # Views of states

    def positions(self, codes: np.ndarray, process: int) -> np.ndarray:
        return self._get(codes, process)

    def value_indices(self, codes: np.ndarray, word: str) -> np.ndarray:
        """Indices into ``values[word]``."""
        if word in self._followed:
            i, indices = self._followed[word]
            return indices[self.positions(codes, i)]
        return self._get(codes, word)

    def recorded(self, codes: np.ndarray) -> np.ndarray:
        """Where a failure is recorded."""
        return self._get(codes, FAILURE) == 1 if self._watchers else np.zeros(len(codes), dtype=bool)

    def finished(self, codes: np.ndarray) -> np.ndarray:
        """Where every process that lives has come to its end."""
        finished = np.ones(len(codes), dtype=bool)
        for i, steps in enumerate(self.steps):
            ended = self.positions(codes, i) == len(steps)
            if self._is_victim(i):
                ended |= self._get(codes, _DEAD) == 1
            finished &= ended
        return finished

    # Moves

    def steps_from(self, codes: np.ndarray) -> Iterator[Move]:
        """What processes can do in each state."""
        positions = [self.positions(codes, i) for i in range(len(self.names))]
        values = {word: self.value_indices(codes, word) for word in self.values}
        recorded = self.recorded(codes)
        for i, tables in enumerate(self._tables):
            at = positions[i]
            able = tables.runs[at]
            if self._is_victim(i):
                able &= self._get(codes, _DEAD) == 0
            escapes = able & recorded & (tables.escape[at] >= 0)
            for j, need in tables.behind.items():
                able &= positions[j] >= need[at]
            passes = np.ones(len(codes), dtype=bool)
            for word, table in tables.waits.items():
                passes &= table[at * len(self.values[word]) + values[word]]
            for word, table in tables.instead.items():
                passes |= table[at * len(self.values[word]) + values[word]]
            able &= passes
            rows = np.flatnonzero(able)
            if len(rows):
                yield Move(i, "", rows, (codes[rows] & tables.keep[at[rows]]) | tables.put[at[rows]])
            rows = np.flatnonzero(escapes)
            if len(rows):
                shift, mask = self._fields[i]
                escaped = (codes[rows] & ~(mask << shift)) | (tables.escape[at[rows]] << shift)
                yield Move(i, "raises the recorded failure", rows, escaped)

    def acts(self) -> Iterator[Callable[[np.ndarray], Move]]:
        """Everything that is no process's step; what one makes possible comes after it."""
        if self._watchers is None:
            return
        if self._watchers.victim:
            yield partial(self._set_bit, _DEAD, "the victim dies", False)
        yield partial(self._set_bit, FAILURE, "records a failure", True)
        for word in self._watchers.poison:
            yield partial(self._poison, word)

    def hazards(self, codes: np.ndarray, move: Move) -> Iterator[tuple[int, np.ndarray]]:
        """(process, rows of ``codes``) with whose access an access that ``move`` begins there is at odds."""
        tables = self._tables[move.process]
        if move.text or not tables.hazards:
            return
        before = codes[move.rows]
        at = self.positions(before, move.process)
        waived = tables.lenient[at] & self.recorded(before)
        for j, need in tables.hazards.items():
            rows = move.rows[(self.positions(before, j) < need[at]) & ~waived]
            if len(rows):
                yield j, rows

    def earlier_accesses(self, i: int, k: int) -> Iterator[tuple[int, Access, Access, int]]:
        """For step ``k`` of process ``i``: (another process, its access that has to come first, the access that the
        step begins, the position at which the former has ended)."""
        for mine in self.steps[i][k].begins:
            for j, ends in enumerate(self._ends):
                for other, end in ends.items():
                    if other is mine or not mine.conflicts(other):
                        continue
                    assert j == i or mine.order != other.order, f"no order between {mine} and {other}"
                    if other.order < mine.order:
                        yield j, other, mine, end

    # Parts

    def _get(self, codes: np.ndarray, name: Hashable) -> np.ndarray:
        shift, mask = self._fields[name]
        return (codes >> shift) & mask

    def _is_victim(self, i: int) -> bool:
        return self._watchers is not None and self.names[i] in self._watchers.victim

    def _set_bit(self, name: str, text: str, is_progress: bool, codes: np.ndarray) -> Move:
        rows = np.flatnonzero(self._get(codes, name) == 0)
        return Move(-1, text, rows, codes[rows] | (1 << self._fields[name][0]), is_progress)

    def _poison(self, word: str, codes: np.ndarray) -> Move:
        watchers = self._watchers
        assert watchers is not None
        shift, mask = self._fields[word]
        index = self.values[word].index(watchers.poison[word])
        able = self._get(codes, word) != index
        if watchers.records_first:
            able &= self.recorded(codes)
        if watchers.pauses:
            active = np.zeros(len(codes), dtype=bool)
            for process, since, until in watchers.pauses:
                i = self.names.index(process)
                at = self.positions(codes, i)
                active |= (at < self._marks[i][since]) | (at >= self._marks[i][until])
            able &= active
        spent = 0
        if not watchers.repeats:
            able &= self._get(codes, ("spent", word)) == 0
            spent = 1 << self._fields["spent", word][0]
        rows = np.flatnonzero(able)
        return Move(-1, f"poisons {word}", rows, (codes[rows] & ~(mask << shift)) | (index << shift) | spent)

    # Compilation

    def _fused(self, steps: Sequence[Step]) -> list[Step]:
        result: list[Step] = []
        pending: list[Step] = []
        for step in steps:
            if step.only_waits and all(self._is_lasting(wait) for wait in step.waits):
                pending.append(step)
                continue
            if step.instead:
                # It must not pass instead of earlier waits as well.
                result, pending = result + pending, []
            parts, pending = [*pending, step], []
            fused = replace(
                step,
                text="; ".join(part.text for part in parts),
                waits=tuple(wait for part in parts for wait in part.waits),
                behind=tuple(point for part in parts for point in part.behind),
            )
            result.append(fused)
        return result + pending

    def _is_lasting(self, wait: Wait) -> bool:
        if self._watchers and (wait.word == FAILURE or wait.word in self._watchers.poison):
            return False
        stored = list(self._model.stored[wait.word].values())
        if len(stored) > 1:
            return False
        values = [self._model.words[wait.word], *(stored[0] if stored else [])]
        passes = [wait.test(value, wait.target) for value in values]
        return passes == sorted(passes)

    def _collect_values(self) -> dict[str, list[int]]:
        """The values that each word may take; a state holds the index of one."""
        values: dict[str, dict[int, None]] = {word: {value: None} for word, value in self._model.words.items()}
        for word, stored in self._model.stored.items():
            values[word] |= {value: None for one in stored.values() for value in one}
        if self._watchers:
            values[FAILURE] = {0: None, 1: None}
            for word, value in self._watchers.poison.items():
                assert value not in values[word], f"the poison of {word} is also a regular value"
                values[word][value] = None
        return {word: list(options) for word, options in values.items()}

    def _follow_words(self) -> dict[str, tuple[int, np.ndarray]]:
        """The words that follow from one process's position: that process, and the value's index at each position."""
        result: dict[str, tuple[int, np.ndarray]] = {}
        for word, start in self._model.words.items():
            writers = list(self._model.stored[word])
            if self._watchers is None and len(writers) == 1:
                i = self.names.index(writers[0])
                values = [start]
                for step in self.steps[i]:
                    values.append(dict(step.stores).get(word, values[-1]))
                result[word] = (i, np.array([self.values[word].index(value) for value in values]))
        return result

    def _pack_fields(self) -> None:
        """Gives each position, word and flag its (shift, mask)."""
        largest: dict[Hashable, int] = {i: len(steps) for i, steps in enumerate(self.steps)}
        largest |= {word: len(options) - 1 for word, options in self.values.items() if word not in self._followed}
        if self._watchers:
            largest[_DEAD] = 1
            if not self._watchers.repeats:
                largest |= {("spent", word): 1 for word in self._watchers.poison}
        self._fields: dict[Hashable, tuple[int, int]] = {}
        shift = 0
        for name, value in largest.items():
            self._fields[name] = (shift, (1 << value.bit_length()) - 1)
            shift += value.bit_length()
        if shift > STATE_BITS:
            raise ValueError(f"a state of this model needs {shift} bits, {STATE_BITS} are available")

    def _compile(self, i: int) -> _Tables:
        steps = self.steps[i]
        n = len(steps) + 1
        shift, mask = self._fields[i]
        tables = _Tables(
            runs=np.arange(n) < len(steps),
            waits={},
            instead={},
            behind={},
            hazards={},
            keep=np.full(n, -1, dtype=np.int64),
            put=np.zeros(n, dtype=np.int64),
            escape=np.full(n, -1, dtype=np.int64),
            lenient=np.array([step.lenient for step in steps] + [False]),
        )
        for k, step in enumerate(steps):
            for wait in step.waits:
                options = self.values[wait.word]
                table = tables.waits.setdefault(wait.word, np.ones(n * len(options), dtype=bool))
                here = slice(k * len(options), (k + 1) * len(options))
                table[here] &= [wait.test(value, wait.target) for value in options]
            for wait in step.instead:
                options = self.values[wait.word]
                table = tables.instead.setdefault(wait.word, np.zeros(n * len(options), dtype=bool))
                here = slice(k * len(options), (k + 1) * len(options))
                table[here] |= [wait.test(value, wait.target) for value in options]
            for process, mark in step.behind:
                j = self.names.index(process)
                need = tables.behind.setdefault(j, np.zeros(n, dtype=np.int64))
                need[k] = max(need[k], self._marks[j][mark])
            for j, _, _, end in self.earlier_accesses(i, k):
                need = tables.hazards.setdefault(j, np.zeros(n, dtype=np.int64))
                need[k] = max(need[k], end)
            keep, put = ~(mask << shift), (k + 1) << shift
            for word, value in step.stores:
                if word not in self._followed:
                    word_shift, word_mask = self._fields[word]
                    keep &= ~(word_mask << word_shift)
                    put |= self.values[word].index(value) << word_shift
            tables.keep[k], tables.put[k] = keep, put
            if step.escape is not None:
                tables.escape[k] = self._marks[i][step.escape]
        return tables
