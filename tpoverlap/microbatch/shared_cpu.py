"""The one CPU on which the workers of an executor take turns."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence

from tpoverlap.microbatch.worker import move_to

_LOOP = 600
_LOOPS = 3
# Times the shortest loop of all, above which a CPU counts as slow.
_SLOW = 1.25
# CPUs that are compared: each takes some 60 us.
_MOST = 8


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
    and every microsecond that the host takes to issue a piece may be one by which all ranks are late. A CPU that other
    threads of this system occupy is not told from a free one: the scheduler gives whole slices, a loop is shorter.
    """

    def __init__(self, cpus: Sequence[int], measure: Callable[[], float] = loop_s) -> None:
        """cpus: in order of preference; at least one, and the first few are enough. measure: seconds of some work on
        the calling thread's CPU. Compares them for the first time, in a thread of its own."""
        self.cpu = cpus[0]
        self._cpus = tuple(cpus[:_MOST])
        self._measure = measure
        self._shortest_s = math.inf
        first = threading.Thread(target=self.settle, args=(lambda cpu: move_to({cpu}),))
        first.start()
        first.join()

    def settle(self, move: Callable[[int], bool]) -> None:
        """Chooses the CPU, and leaves the calling thread there. move: moves that thread, and tells whether it did; a
        CPU to which it does not is none to choose."""
        found: dict[int, float] = {}
        for cpu in (self.cpu, *(cpu for cpu in self._cpus if cpu != self.cpu)):
            if not move(cpu):
                continue
            found[cpu] = self._measure()
            if found[cpu] <= _SLOW * self._shortest_s < math.inf:
                break
        else:
            if not found:
                return
            # The first time, and when none is as fast as one has been: then that was another clock.
            self._shortest_s = min(found.values())
            cpu = next(cpu for cpu, seconds in found.items() if seconds <= _SLOW * self._shortest_s)
            move(cpu)
        self.cpu = cpu
        self._shortest_s = min(self._shortest_s, found[cpu])
