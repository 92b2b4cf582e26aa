"""32-bit words in memory that several processes map: ordered store, bounded wait, wake.

A waiter spins for a few microseconds and then sleeps in the kernel (futex), so that it costs no core and holds no GIL.
On x86-64 plain loads and stores already have the order that a published payload needs. On AArch64 a membarrier system
call stands at each side; other processors are not supported.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import time

from tpoverlap.errors import ChannelError

MASK = 0xFFFF_FFFF
_HALF = 0x8000_0000
_FUTEX_WAIT, _FUTEX_WAKE = 0, 1
_MEMBARRIER_PRIVATE_EXPEDITED, _MEMBARRIER_REGISTER_PRIVATE_EXPEDITED = 1 << 3, 1 << 4
# (futex, membarrier) system call numbers.
_SYSCALLS = {"x86_64": (202, 324), "AMD64": (202, 324), "aarch64": (98, 283)}
_SPIN = 100
_YIELD_S = 100e-6
_ALL_WAITERS = 0x7FFF_FFFF


def reached(value: int, target: int) -> bool:
    """Whether a cyclic 32-bit counter that reads ``value`` has come to ``target`` (at most 2^31 - 1 behind it)."""
    return ((value - target) & MASK) < _HALF


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class SharedWords:
    """Waits on, and wakes waiters of, the words of one mapping.

    words: the mapping as a writable memoryview of format ``I``; address: where it lies in this process.
    """

    def __init__(self, words: memoryview, address: int) -> None:
        numbers = _SYSCALLS.get(platform.machine())
        if numbers is None:
            raise ChannelError(
                f"processor {platform.machine()!r} is not supported by the host-memory channel: x86-64 and AArch64 are"
            )
        self._words = words
        self._address = address
        self._futex, self._membarrier = numbers
        # Arguments of a fixed C type, made once, keep a call free of conversions. CDLL releases the GIL around it.
        self._syscall = ctypes.CDLL(None, use_errno=True).syscall
        self._syscall.restype = ctypes.c_long
        # A wake returns at once: whoever took the GIL meanwhile would hold the caller up for longer than the call.
        self._wake_call = ctypes.PyDLL(None).syscall
        self._wake_call.restype = ctypes.c_long
        self._wake_arguments: dict[int, tuple[ctypes.c_long, ...]] = {}
        self._needs_fence = platform.machine() == "aarch64"
        if self._needs_fence and self._raw(self._membarrier, _MEMBARRIER_REGISTER_PRIVATE_EXPEDITED, 0, 0) != 0:
            raise ChannelError(f"the membarrier system call is refused ({errno.errorcode.get(ctypes.get_errno())})")

    def _raw(self, number: int, *args: int) -> int:
        result: int = self._syscall(*_c_longs(number, *args))
        return result

    def _fence(self) -> None:
        self._raw(self._membarrier, _MEMBARRIER_PRIVATE_EXPEDITED, 0, 0)

    def load(self, index: int) -> int:
        return self._words[index]

    def store(self, index: int, value: int) -> None:
        """Stores ``value`` after every earlier store of this thread, and wakes the word's waiters."""
        if self._needs_fence:
            self._fence()
        self._words[index] = value & MASK
        self.wake(index)

    def wake(self, index: int) -> None:
        arguments = self._wake_arguments.get(index)
        if arguments is None:
            arguments = _c_longs(self._futex, self._address + 4 * index, _FUTEX_WAKE, _ALL_WAITERS, 0, 0, 0)
            self._wake_arguments[index] = arguments
        self._wake_call(*arguments)

    def wait(self, index: int, target: int, slice_s: float) -> bool:
        """Waits until the word has come to ``target``, for about ``slice_s`` seconds; returns whether it has."""
        words = self._words
        for _ in range(_SPIN):
            if ((words[index] - target) & MASK) < _HALF:
                if self._needs_fence:
                    self._fence()
                return True
        # A core that sleeps takes long to wake, on virtual machines above all. Yielding lets the other threads of this
        # process, and of a peer that shares the core, go on meanwhile.
        give_up_s = time.perf_counter() + _YIELD_S
        while time.perf_counter() < give_up_s:
            os.sched_yield()
            if ((words[index] - target) & MASK) < _HALF:
                self._fence()
                return True
        timeout = _Timespec(int(slice_s), int(slice_s % 1 * 1e9))
        value = words[index]
        if not reached(value, target):
            # The kernel compares the word with `value` before it sleeps, so a store in between is never missed.
            self._raw(self._futex, self._address + 4 * index, _FUTEX_WAIT, value, ctypes.addressof(timeout), 0, 0)
            value = words[index]
        if self._needs_fence:
            self._fence()
        return reached(value, target)


def _c_longs(*values: int) -> tuple[ctypes.c_long, ...]:
    return tuple(ctypes.c_long(value) for value in values)
