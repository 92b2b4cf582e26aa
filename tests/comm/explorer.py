"""Explores every interleaving of a model's processes and finds the first state in which something is wrong.

Checked in every state:

- An access begins only when every earlier access to the same bytes that conflicts with it has ended. A write that
  violates this destroys what somebody still reads or writes (OVERWRITTEN); a read sees something else than it expects
  (MIXED_UP). Conversely, where it holds every reader sees exactly the operation and piece that it expects.
- Somebody can move, or all have come to their end (else DEADLOCK; once a failure is recorded NOT_DRAINED).

Every step takes its process forward, so the sum of positions orders the states. They are explored level by level,
each state once. What watchers do stays in a level, and a level is closed under it before it is left. Hence the only
cycles are a watcher's idle repetitions, and that no state is stuck proves termination: every run in which processes and
watchers get their turn ends with all processes at their end.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

import numpy as np
from explorer_model import Model
from explorer_states import Move, States


class Violation(Enum):
    DEADLOCK = "deadlock"
    OVERWRITTEN = "overwritten"
    MIXED_UP = "mixed up"
    NOT_DRAINED = "not drained"


@dataclass(frozen=True)
class Counterexample:
    """memory: what was accessed wrongly; empty where nobody can move. trace: the way there, a line a step."""

    violation: Violation
    message: str
    memory: str
    trace: list[str] = field(repr=False)

    def __str__(self) -> str:
        return "\n".join([f"{self.violation.name}: {self.message}", *self.trace])


@dataclass(frozen=True)
class Exploration:
    """completes: whether some state has all processes at their end."""

    num_states: int
    completes: bool
    counterexample: Counterexample | None


def explore(model: Model, max_states: int = 20_000_000) -> Exploration:
    """All reachable states of ``model``, up to the first violation. MemoryError above ``max_states``."""
    return _Explorer(model).run(max_states)


class _Explorer:
    def __init__(self, model: Model) -> None:
        self._model = model
        self._states = States(model)
        self._levels: list[np.ndarray] = []

    def run(self, max_states: int) -> Exploration:
        states = self._states
        waiting = {0: [np.array([states.initial], dtype=np.int64)]}
        num_states = 0
        completes = False
        while waiting:
            level = min(waiting)
            codes = self._closed(_distinct(waiting.pop(level)))
            self._levels.append(codes)
            num_states += len(codes)
            if num_states > max_states:
                raise MemoryError(f"more than {max_states} states")
            can_move = np.zeros(len(codes), dtype=bool)
            for move in states.steps_from(codes):
                for process, rows in states.hazards(codes, move):
                    return Exploration(num_states, completes, self._hazard(int(codes[rows[0]]), move.process, process))
                can_move[move.rows] = True
                gains = states.positions(move.codes, move.process) - states.positions(codes[move.rows], move.process)
                for gain in np.flatnonzero(np.bincount(gains)):
                    waiting.setdefault(level + int(gain), []).append(move.codes[gains == gain])
            for act in states.acts():
                move = act(codes)
                can_move[move.rows] |= move.is_progress
            finished = states.finished(codes)
            completes = completes or bool(finished.any())
            stuck = np.flatnonzero(~can_move & ~finished)
            if len(stuck):
                return Exploration(num_states, completes, self._stuck(int(codes[stuck[0]])))
        return Exploration(num_states, completes, None)

    def _closed(self, codes: np.ndarray) -> np.ndarray:
        """``codes`` and all that watchers and a death can make of them."""
        for act in self._states.acts():
            codes = _distinct([codes, act(codes).codes])
        return codes

    # Counterexamples

    def _hazard(self, code: int, i: int, j: int) -> Counterexample:
        """Process i is about to begin an access in state ``code`` that is at odds with one of process j."""
        states = self._states
        k, position = self._position(code, i), self._position(code, j)
        other, mine = next(
            (other, mine)
            for process, other, mine, end in states.earlier_accesses(i, k)
            if process == j and position < end
        )
        begun = any(other in step.begins for step in states.steps[j][:position])
        message = (
            f"{states.names[i]} begins to {_verb(mine.writes)} {mine.text} in {mine.memory} before {states.names[j]} "
            f"has {'finished' if begun else 'begun'} to {_verb(other.writes)} {other.text} there"
        )
        violation = Violation.OVERWRITTEN if mine.writes else Violation.MIXED_UP
        trace = [
            *self._trace(code),
            f"then {states.names[i]}: {states.steps[i][k].text}",
            *self._contents(code, mine.memory),
        ]
        return Counterexample(violation, message, mine.memory, trace)

    def _stuck(self, code: int) -> Counterexample:
        states = self._states
        violation = Violation.NOT_DRAINED if states.recorded(np.array([code]))[0] else Violation.DEADLOCK
        standing = [
            f"{name} before '{steps[position].text}'"
            for i, (name, steps) in enumerate(zip(states.names, states.steps, strict=True))
            if (position := self._position(code, i)) < len(steps)
        ]
        return Counterexample(violation, "nobody can move: " + ", ".join(standing), "", self._trace(code))

    def _contents(self, code: int, memory: str) -> list[str]:
        """What ``memory`` holds, and who accesses it."""
        written, under_way = [], []
        for i, (name, steps) in enumerate(zip(self._states.names, self._states.steps, strict=True)):
            done = steps[: self._position(code, i)]
            ended = {access for step in done for access in step.ends}
            for access in (access for step in done for access in step.begins if access.memory == memory):
                if access not in ended:
                    under_way.append(f"{name} {_verb(access.writes)}s {access.text}")
                elif access.writes:
                    written.append(access)
        kept = [a for a in written if not any(b.overlaps(a) and b.order > a.order for b in written)]
        holds = "; ".join(access.text for access in kept) or "nothing yet"
        return [f"{memory} holds: {holds}", *(f"under way there: {text}" for text in under_way)]

    def _trace(self, code: int) -> list[str]:
        """One way from the start to ``code``."""
        lines: list[str] = []
        level = len(self._levels) - 1
        while (found := self._predecessor(code, level)) is not None:
            level, before, move = found
            name = "watcher" if move.process < 0 else self._states.names[move.process]
            text = move.text or self._states.steps[move.process][self._position(before, move.process)].text
            lines.append(f"{name:14} {text}{self._changes(before, code)}")
            code = before
        lines.append("start          " + ", ".join(f"{word} = {value}" for word, value in self._model.words.items()))
        return [f"{number:4} {line}" for number, line in enumerate(reversed(lines))]

    def _predecessor(self, code: int, level: int) -> tuple[int, int, Move] | None:
        for earlier in range(level, -1, -1):
            codes = self._levels[earlier]
            for move in (*self._states.steps_from(codes), *(act(codes) for act in self._states.acts())):
                found = np.flatnonzero(move.codes == code)
                if len(found):
                    return earlier, int(codes[move.rows[found[0]]]), move
        return None

    def _changes(self, before: int, after: int) -> str:
        indices = {
            word: self._states.value_indices(np.array([before, after]), word).tolist() for word in self._model.words
        }
        values = self._states.values
        changes = [f"{word}: {values[word][a]} -> {values[word][b]}" for word, (a, b) in indices.items() if a != b]
        return f"   [{', '.join(changes)}]" if changes else ""

    def _position(self, code: int, process: int) -> int:
        return int(self._states.positions(np.array([code]), process)[0])


def _distinct(arrays: list[np.ndarray]) -> np.ndarray:
    # np.unique hashes integers in recent versions, which takes many times longer here than sorting them.
    codes = np.sort(np.concatenate(arrays))
    return codes[np.concatenate([[True], codes[1:] != codes[:-1]])]


def _verb(writes: bool) -> str:
    return "write" if writes else "read"
