"""The thread that turns a dead, stuck or disagreeing peer into an exception on every rank.

It watches the peers' processes (pidfd, which also sees a zombie), the times and descriptors of the calls under way,
and the failure record, and releases whoever waits, again and again until reset or destroy. It makes no CUDA call and
reads progress from the segment alone.
"""

from __future__ import annotations

import contextlib
import os
import select
import threading
from typing import Protocol

from tpoverlap.comm.host import HostIdentity
from tpoverlap.errors import ChannelError

TICK_S = 0.025


class Watched(Protocol):
    """What the watcher asks of a channel, from its own thread."""

    def on_peer_dead(self, rank: int) -> None: ...

    def on_tick(self) -> None: ...

    def on_watcher_error(self, error: BaseException) -> None: ...


class Watcher:
    """Watches the other ranks' processes and calls the channel every :data:`TICK_S` seconds, until :meth:`stop`."""

    def __init__(self, name: str, rank: int, hosts: list[HostIdentity], watched: Watched) -> None:
        self._watched = watched
        self._poll = select.poll()
        self._pidfds: dict[int, int] = {}
        self._stop_fd = os.eventfd(0, os.EFD_CLOEXEC)
        self._poll.register(self._stop_fd, select.POLLIN)
        try:
            for q, host in enumerate(hosts):
                if q != rank:
                    self._pidfds[self._open(q, host.pid)] = q
        except ChannelError:
            self._close()
            raise
        self._thread = threading.Thread(target=self._run, name=f"tpoverlap-watcher:{name}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        if self._stop_fd < 0:
            return
        os.eventfd_write(self._stop_fd, 1)
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join()
        self._close()

    def dead_ranks(self) -> list[int]:
        """The peers whose processes have ended, in rank order. Any thread may ask."""
        ended = select.poll()
        for fd in self._pidfds:
            ended.register(fd, select.POLLIN)
        return sorted(self._pidfds[fd] for fd, _ in ended.poll(0))

    def _open(self, rank: int, pid: int) -> int:
        try:
            fd = os.pidfd_open(pid)
        except OSError as e:
            raise ChannelError(f"cannot watch rank {rank} (pid {pid}): {e.strerror}") from e
        self._poll.register(fd, select.POLLIN)
        return fd

    def _run(self) -> None:
        with contextlib.suppress(OSError):  # a fork of this process has no watcher, and its descriptors may be closed
            while True:
                events = self._poll.poll(TICK_S * 1000)
                for fd, _ in events:
                    if fd == self._stop_fd:
                        return
                try:
                    for fd, _ in events:
                        # Level-triggered: a dead process stays readable, and is reported once a poll.
                        self._watched.on_peer_dead(self._pidfds[fd])
                    self._watched.on_tick()
                except Exception as e:
                    # And goes on: who waits must still be released, and a group that was reset must be watched.
                    self._watched.on_watcher_error(e)
                if events:
                    # Without this pause a dead peer would turn the loop into a spin.
                    select.select([self._stop_fd], [], [], TICK_S)

    def _close(self) -> None:
        for fd in (*self._pidfds, self._stop_fd):
            if fd >= 0:
                os.close(fd)
        self._pidfds = {}
        self._stop_fd = -1
