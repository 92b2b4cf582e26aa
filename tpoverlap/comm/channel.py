"""One group's shared segment with everything that makes it trustworthy: calls, descriptors, failures, reset.

A channel moves no data itself: providers execute protocol steps in its regions. Every call of the group, whichever
provider serves it, begins and finishes here, so that one place knows what each rank is doing.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
import weakref
from contextlib import ExitStack

from tpoverlap.comm.call_log import CallLog
from tpoverlap.comm.failure import Failure, FailureKind, FailureRecord
from tpoverlap.comm.host import HostIdentity
from tpoverlap.comm.layout import Layout
from tpoverlap.comm.region import CpuRegion, Device, Region
from tpoverlap.comm.rendezvous import StoreExchange, gather_hosts, open_segment
from tpoverlap.comm.reset import ResetRendezvous
from tpoverlap.comm.segment import SegmentKind
from tpoverlap.comm.watcher import TICK_S, Watcher
from tpoverlap.comm.words import SharedWords
from tpoverlap.errors import ChannelError, TpOverlapError

# A device may still be reading what a peer published before it left.
_LEFT_PATIENCE_S = 0.25
# How often waits are released after a failure, and for how long at that pace.
_RELEASE_PAUSE_S, _DRAIN_S = 0.0002, 30.0
# How long a destroy waits for another thread's call to end.
_DESTROY_PATIENCE_S = 2.0
_open_channels: weakref.WeakSet[Channel] = weakref.WeakSet()


class _Process:
    """pid: of this process. A fork notes its own, so that no call has to ask the system."""

    pid = os.getpid()

    @classmethod
    def forked(cls) -> None:
        cls.pid = os.getpid()


os.register_at_fork(after_in_child=_Process.forked)


class Channel:
    """Opened by all ranks of a group together; ChannelError on all of them when it cannot be.

    name: the group's, for messages. exchange: the group's store. layout: sizes, the same on all ranks. timeout_s:
    how long a call waits for its peers. kinds: segment kinds to try in turn. host: this rank's identity, for tests.
    first_number: where the cyclic counters start.
    """

    def __init__(
        self,
        name: str,
        rank: int,
        exchange: StoreExchange,
        layout: Layout,
        timeout_s: float,
        *,
        kinds: tuple[SegmentKind, ...] = ("memfd", "named"),
        host: HostIdentity | None = None,
        first_number: int = 0,
    ) -> None:
        self.name = name
        self.rank = rank
        self.layout = layout
        self.timeout_s = timeout_s
        self._pid = _Process.pid
        # Taken by setdefault and freed by pop, one step each: no interrupt leaves a group that nobody uses taken.
        self._user: dict[str, int] = {}
        self._inside_call = False
        self._run = 0
        self._delivered = False
        self._resetting = False
        self._resetting_lock = threading.RLock()
        self._failed_since_s = 0.0
        self._destroyed = False

        hosts = gather_hosts(exchange, host)
        _require_one_host(hosts)
        self.segment = open_segment(exchange, rank, layout, kinds)
        problem = ""
        try:
            self._log = CallLog(self.segment, layout, rank)
            self._record = FailureRecord(self.segment)
            self._resets = ResetRendezvous(self.segment, layout, self._record, rank, timeout_s)
            self._words = SharedWords(self.segment.words, self.segment.address)
            self.region = CpuRegion(self._words, layout, rank, self.check, first_number)
            self.regions: list[Region] = [self.region]
            self.devices: list[Device] = []
            self._watcher = Watcher(name, rank, hosts, self)
        except ChannelError as e:
            problem = str(e)
        try:
            problems = [f"rank {q}: {why}" for q, why in enumerate(exchange.all_gather("channel", problem)) if why]
            if problems:
                raise ChannelError("; ".join(problems))
        except BaseException:
            if not problem:
                self._watcher.stop()
            self.segment.close()
            raise
        self._watcher.start()
        _open_channels.add(self)

    # Calls

    def require_member(self) -> None:
        """Raises ChannelError in a forked child, and once the group is destroyed."""
        if self._destroyed:
            raise ChannelError(f"group {self.name!r} is destroyed: make a new one")
        if _Process.pid != self._pid:
            raise ChannelError(
                f"group {self.name!r} belongs to process {self._pid}, not to its fork {_Process.pid}: "
                "make the group after the fork"
            )

    def call(self, operation: str, on_device: bool = False) -> CallContext:
        """A context for one call, or one after the other, which ``operation`` describes ("name dtype bytes mode").

        on_device: the call only queues its operation. Entering raises the group's failure if it has one, and
        ChannelError when another thread, a forked child or a destroyed group is at work. An exception inside, such as
        Ctrl-C, ends the call on every rank: after half a call this rank's counters do not fit its peers'.
        """
        return CallContext(self, operation, on_device)

    def begin(self, operation: str) -> None:
        """Of :class:`CallContext`."""
        self.require_member()
        self._occupy("one thread at a time may call collectives")
        try:
            if self._inside_call:
                why = "was interrupted twice, or its signal handler called a collective,"
                self.fail(FailureKind.ABORTED, self.rank, f"rank {self.rank} {why}")
            if self.devices:
                self.compare_calls()
            self.check()
            self._inside_call = True
            self._log.begin(operation)
        except BaseException as e:
            self.interrupted(e)
            self._user.pop("thread", None)
            raise

    def published(self) -> None:
        """Restarts the call's clock: from here on the rank waits for its peers alone."""
        self._log.restart_clock()

    def interrupted(self, error: BaseException) -> None:
        """Of :class:`CallContext`: ends the call under way on every rank."""
        self.abort(f"{type(error).__name__} during {self._log.operation or 'its call'}", raised=True)

    def finish(self, sound: bool, completed: bool) -> None:
        """Of :class:`CallContext`. sound: it has no exception. completed: it has read all that it needed."""
        self._log.end(completed)
        self._inside_call = self._inside_call and not sound
        self._user.pop("thread", None)

    def _occupy(self, rule: str) -> None:
        """Makes the calling thread the group's user."""
        if self._used_elsewhere():
            raise ChannelError(f"group {self.name!r} is used by two threads at once: {rule}")

    def _used_elsewhere(self) -> bool:
        """Whether another thread uses the group; if none does, the calling thread does from now on."""
        me = threading.get_ident()
        return self._user.setdefault("thread", me) != me

    def compare_descriptor(self, peer: int) -> None:
        """Raises CollectiveMismatchError, here and on all ranks, if the peer is in another call than this rank.

        To be called once the peer has published a piece of this call.
        """
        difference = self._log.difference(peer)
        if difference:
            self.fail(FailureKind.MISMATCH, peer, difference)
            self.check()

    # Failure

    @property
    def failed(self) -> bool:
        return self._record.present

    @property
    def failure_delivered(self) -> bool:
        """Whether this rank has raised the present failure to its caller."""
        return self._delivered

    def check(self) -> None:
        """Raises the group's failure, if it has one."""
        if self._record.present:
            failure = self._record.read()
            if failure is not None:  # else a reset has just ended, in another thread
                raise self._delivered_error(failure)

    def compare_calls(self) -> None:
        """Finds what the watcher has not come to yet: a peer in another call, whose data a device may have read."""
        with self._resetting_lock:
            if not (self._destroyed or self._resetting or self._record.present) and _Process.pid == self._pid:
                difference = self._log.next_difference()
                if difference:
                    self.fail(FailureKind.MISMATCH, *difference)

    def begin_run(self) -> None:
        """All ranks begin the same runs between two resets."""
        self._run += 1

    def end_run(self) -> None:
        """Raises the group's failure, unless its reporter met it in a later run than this rank's: it is the next
        one's then."""
        self.compare_calls()
        failure = self._record.read()
        if failure is not None and failure.run <= self._run:
            raise self._delivered_error(failure)

    def failure_error(self) -> TpOverlapError:
        failure = self._record.read()
        assert failure is not None
        return self._delivered_error(failure)

    def _delivered_error(self, failure: Failure) -> TpOverlapError:
        self._delivered = True
        return failure.error(self.name)

    def abort(self, why: str, raised: bool = False) -> None:
        """Ends the call under way on every rank with CollectiveAbortedError. Any thread may call it.

        raised: this rank's caller gets an exception anyway.
        """
        with self._resetting_lock:  # not while a destroy frees the segment
            if self._destroyed or _Process.pid != self._pid:
                return
            self._delivered = self._delivered or raised
            self.fail(FailureKind.ABORTED, self.rank, f"rank {self.rank} aborted ({why})")

    def fail(self, kind: FailureKind, culprit: int, detail: str, over_resettable: bool = False) -> None:
        """Records a failure, unless there is one (or one that no reset can mend), and releases whoever waits."""
        failure = Failure(kind, culprit, self.rank, self._log.number, self._log.operation, detail, self._run)
        self._record.write(failure, over_resettable)
        self._release()

    @property
    def generation(self) -> int:
        """How many resets the channel has had."""
        return self._resets.count

    def reset(self) -> None:
        """Makes the group work again after an abort, a timeout or a mismatch. Collective: every rank calls it.

        Raises PeerLostError if a peer has died, CollectiveTimeoutError if a rank does not come.
        """
        self.require_member()
        failure = self._record.read()
        if failure is not None and not failure.resettable:
            raise self._delivered_error(failure)
        self._occupy("no thread may use it during a reset")
        try:
            for device in self.devices:
                device.drain()
            # From here on nobody may act on the old failure: each rank stops before it says that it has drained.
            with self._resetting_lock:
                self._resetting = True
            self._resets.join(self._restore, self._check_peers_alive)
            self._run = 0
            self._delivered = self._inside_call = False
        except BaseException as e:
            # Some ranks may be restored and others not: no call may begin before a reset has succeeded.
            self.fail(FailureKind.TIMEOUT, self.rank, f"a reset failed ({type(e).__name__}: {e})")
            raise
        finally:
            self._resetting = False
            self._user.pop("thread", None)

    def destroy(self) -> None:
        """Leaves the group. Peers that still wait for this rank get PeerLostError.

        What fails, such as a device after an error of its own, does not keep the rest from being freed; it is raised.
        """
        if self._destroyed:
            return
        with self._resetting_lock:
            self._destroyed = True
        if _Process.pid != self._pid:
            return
        if self._used_elsewhere():
            # The other thread's call must end before its memory goes.
            self.fail(FailureKind.ABORTED, self.rank, f"rank {self.rank} destroyed the group during its call")
            give_up_s = time.monotonic() + _DESTROY_PATIENCE_S
            while self._used_elsewhere() and time.monotonic() < give_up_s:
                time.sleep(0.001)
        with ExitStack() as stack:
            stack.callback(self._leave)
            for device in self.devices:
                stack.callback(device.close)

    def _leave(self) -> None:
        self.segment.words[self.layout.left(self.rank) // 4] = 1
        self._watcher.stop()
        _open_channels.discard(self)
        self.segment.close()

    # Called by the watcher's thread

    def on_peer_dead(self, rank: int) -> None:
        if not self._has_left(rank):
            self.fail(FailureKind.LOST, rank, f"rank {rank} died")

    def on_tick(self) -> None:
        with self._resetting_lock:
            if not self._record.present and not self._resetting:
                self._look_for_failure()
        if self._record.present:
            self._release_for(TICK_S)
        else:
            self._failed_since_s = 0.0

    def on_watcher_error(self, error: BaseException) -> None:
        self.fail(FailureKind.ABORTED, self.rank, f"the watcher of rank {self.rank} failed: {error!r}")

    def _look_for_failure(self) -> None:
        difference = self._log.next_difference()
        if difference:
            self.fail(FailureKind.MISMATCH, *difference)
            return
        host_s = self._log.waited_s()
        device_s = max(region.waiting_s() for region in self.regions)
        waited_s = max(host_s, device_s)
        if not waited_s:
            return
        absent = self._log.absent()
        # A peer that came to this call has published all of it before it left; a replay has no number.
        for q in self._peers() if device_s > _LEFT_PATIENCE_S else absent:
            if self._has_left(q):
                self.fail(FailureKind.LOST, q, f"rank {q} has left (it destroyed the group or exited)")
                return
        if waited_s > self.timeout_s:
            late = absent or self._log.unfinished() or self._peers()
            what = "did not come" if absent else "did not get on"
            self.fail(FailureKind.TIMEOUT, late[0], f"ranks {late} {what} within {self.timeout_s:g} s")

    def _release_for(self, seconds: float) -> None:
        """Releases again and again: a device with thousands of operations in its queue undoes each release at once."""
        now = time.monotonic()
        self._failed_since_s = self._failed_since_s or now
        self._release()
        while now < self._failed_since_s + _DRAIN_S and time.monotonic() < now + seconds:
            time.sleep(_RELEASE_PAUSE_S)
            self._release()

    def _release(self) -> None:
        # A release during or after the restoration of a reset would let a stale wait pass, unmarked.
        with self._resetting_lock:
            if self._record.present and not self._resetting:
                for region in self.regions:
                    region.release()

    # Parts

    def _peers(self) -> list[int]:
        return [q for q in range(self.layout.world_size) if q != self.rank]

    def _has_left(self, rank: int) -> bool:
        return self.segment.words[self.layout.left(rank) // 4] != 0

    def _check_peers_alive(self) -> None:
        """In a reset: the loss of a peer is final, and takes the place of the failure that was to be mended."""
        dead = self._watcher.dead_ranks()
        if dead:
            self.fail(FailureKind.LOST, dead[0], f"rank {dead[0]} died", over_resettable=True)
            self.check()

    def _restore(self) -> None:
        """Sets the regions and this rank's part of the log to their start."""
        for region in self.regions:
            region.restore()
        self._log.restore()


class CallContext:
    """See :meth:`Channel.call`."""

    __slots__ = ("_channel", "_on_device", "_operation")

    def __init__(self, channel: Channel, operation: str, on_device: bool) -> None:
        self._channel = channel
        self._operation = operation
        self._on_device = on_device

    def __enter__(self) -> None:
        self._channel.begin(self._operation)

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            if error is not None:
                self._channel.interrupted(error)
        finally:
            self._channel.finish(error is None, error is None and not self._on_device)


def _require_one_host(hosts: list[HostIdentity]) -> None:
    elsewhere = [q for q, h in enumerate(hosts) if not h.same_host(hosts[0])]
    if elsewhere:
        raise ChannelError(
            f"ranks {elsewhere} are on another host than rank 0: the host-memory channel joins ranks of one host",
            reason="ranks_on_different_hosts",
        )
    if any(h.pid_namespace != hosts[0].pid_namespace for h in hosts):
        raise ChannelError("the ranks run in different pid namespaces and cannot watch each other: use one container")


@atexit.register
def _leave_open_groups() -> None:
    for channel in list(_open_channels):
        channel.destroy()
