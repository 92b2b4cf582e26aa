"""The one CPU on which the workers of an executor take turns."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

_LOOP = 600
_LOOPS = 3
# Times the shortest loop of all, above which a CPU counts as slow.
_SLOW = 1.25


def loop_s() -> float:
    """The shortest of a few loops of Python on the calling thread's CPU, some 30 us in all."""
    shortest_s = math.inf
    for _ in range(_LOOPS):
        start_s = time.perf_counter()
        sum(range(_LOOP))
        shortest_s = min(shortest_s, time.perf_counter() - start_s)
    return shortest_s


class SharedCpu:
    """One of ``cpus`` that is not slow at present: the one taken so far, or the first of the others.

    A CPU whose core also serves another one, such as another virtual machine's, may run at half its speed for seconds,
    and every microsecond that the host takes to issue a piece may be one by which all ranks are late.
    """

    def __init__(self, cpus: Sequence[int], measure: Callable[[], float] = loop_s) -> None:
        """cpus: in order of preference; at least one. measure: seconds of some work on the calling thread's CPU."""
        self.cpu = cpus[0]
        self._cpus = tuple(cpus)
        self._measure = measure
        self._shortest_s: float | None = None

    def settle(self, move: Callable[[int], None]) -> None:
        """Chooses the CPU, and leaves the calling thread there. move: moves that thread."""
        found: dict[int, float] = {}
        for cpu in (self.cpu, *(cpu for cpu in self._cpus if cpu != self.cpu)):
            move(cpu)
            found[cpu] = self._measure()
            if self._shortest_s is not None and found[cpu] <= _SLOW * self._shortest_s:
                break
        else:
            # The first time, and when none is as fast as one has been: then that was another clock.
            self._shortest_s = min(found.values())
            cpu = next(cpu for cpu, seconds in found.items() if seconds <= _SLOW * self._shortest_s)
            move(cpu)
        self.cpu = cpu
        self._shortest_s = min(self._shortest_s, found[cpu])
