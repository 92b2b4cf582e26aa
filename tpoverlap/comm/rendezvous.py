"""How the ranks of a group come to map one segment: through the group's store, with one outcome for all."""

from __future__ import annotations

import contextlib
import json
import secrets
import time
from collections.abc import Callable
from typing import Any

from torch.distributed import DistNetworkError, DistStoreError, Store

from tpoverlap.comm.host import HostIdentity, host_identity
from tpoverlap.comm.layout import HEADER, MAGIC, VERSION, Layout
from tpoverlap.comm.segment import Segment, SegmentKind
from tpoverlap.errors import ChannelError, CollectiveTimeoutError


class StoreExchange:
    """Collectives over a key-value store, for the few moments when nothing else can be relied on."""

    def __init__(self, store: Store, rank: int, world_size: int, timeout_s: float) -> None:
        self._store = store
        self._rank = rank
        self._world_size = world_size
        self._timeout_s = timeout_s

    def all_gather(self, key: str, value: Any, check: Callable[[], None] | None = None) -> list[Any]:
        """Every rank's ``value`` (JSON), in rank order. ``check`` is called now and then and may end the wait.

        Raises CollectiveTimeoutError naming the ranks that did not come within the timeout, and ChannelError when
        the store itself fails.
        """
        keys = [f"{key}/{q}" for q in range(self._world_size)]
        give_up = time.monotonic() + self._timeout_s
        try:
            self._store.set(keys[self._rank], json.dumps(value))
            # Asking is cheap and, unlike a wait that times out, leaves no trace in the log.
            pause_s = 0.0005
            while not self._store.check(keys):
                if check is not None:
                    check()
                if time.monotonic() > give_up:
                    missing = [q for q, k in enumerate(keys) if not self._store.check([k])]
                    raise CollectiveTimeoutError(
                        f"ranks {missing} did not come to {key!r} within {self._timeout_s:g} s"
                    )
                time.sleep(pause_s)
                pause_s = min(0.02, pause_s * 1.5)
            return [json.loads(self._store.get(k)) for k in keys]
        except (DistStoreError, DistNetworkError) as e:
            raise ChannelError(f"the group's store does not answer at {key!r}: {e}") from e

    def barrier(self, key: str, check: Callable[[], None] | None = None) -> None:
        self.all_gather(key, None, check)

    def forget(self, key: str) -> None:
        """Deletes this rank's value of ``key``, once every rank has read it."""
        with contextlib.suppress(RuntimeError):  # some stores cannot delete; the key is small
            self._store.delete_key(f"{key}/{self._rank}")


def gather_hosts(exchange: StoreExchange, identity: HostIdentity | None = None) -> list[HostIdentity]:
    """The identity of every rank's process."""
    mine = identity or host_identity()
    return [HostIdentity(**fields) for fields in exchange.all_gather("host", mine.to_dict())]


def open_segment(
    exchange: StoreExchange, rank: int, layout: Layout, kinds: tuple[SegmentKind, ...] = ("memfd", "named")
) -> Segment:
    """Creates the group's segment on rank 0 and maps it on all others; the first kind that serves on all ranks.

    Raises ChannelError, on every rank alike, with each rank's reason.
    """
    problems: list[str] = []
    for kind in kinds:
        segment, reasons = _try_kind(exchange, rank, layout, kind)
        if not any(reasons):
            assert segment is not None
            return segment
        if segment is not None:
            segment.close()
        problems += [f"{kind}, rank {q}: {reason}" for q, reason in enumerate(reasons) if reason]
    raise ChannelError("; ".join(problems))


def _try_kind(
    exchange: StoreExchange, rank: int, layout: Layout, kind: SegmentKind
) -> tuple[Segment | None, list[str]]:
    segment: Segment | None = None
    mine = ""
    offer: dict[str, str] | None = None
    try:
        if rank == 0:
            nonce = secrets.token_bytes(16)
            try:
                segment = Segment.create(layout.size, kind)
                segment.bytes[: HEADER.size] = layout.header(nonce)
                offer = {"path": segment.path, "nonce": nonce.hex()}
            except ChannelError as e:
                mine = str(e)
        offer = exchange.all_gather(f"segment/{kind}", offer)[0]
        if rank != 0 and offer is not None:
            try:
                segment = _open_checked(offer["path"], layout, kind, bytes.fromhex(offer["nonce"]))
            except ChannelError as e:
                mine = str(e)
        reasons = exchange.all_gather(f"opened/{kind}", mine)
    except BaseException:
        if segment is not None:
            segment.unlink()
            segment.close()
        raise
    exchange.forget(f"segment/{kind}")
    # Every rank has mapped it or has said why not: the name is of no use any more. Any rank may be the last one left.
    if segment is not None:
        segment.unlink()
    return segment, reasons


def _open_checked(path: str, layout: Layout, kind: SegmentKind, nonce: bytes) -> Segment:
    segment = Segment.open(path, layout.size, kind)
    try:
        check_header(segment, layout, nonce)
    except ChannelError:
        segment.close()
        raise
    return segment


def check_header(segment: Segment, layout: Layout, nonce: bytes) -> None:
    """Raises ChannelError unless the segment is the one that this group's rank 0 made, of this version and shape."""
    found = HEADER.unpack(bytes(segment.bytes[: HEADER.size]))
    expected = HEADER.unpack(layout.header(nonce))
    if found == expected:
        return
    if found[0] != MAGIC:
        raise ChannelError(f"{segment.path} is not a tpoverlap segment (magic {found[0]!r})")
    if found[1] != VERSION:
        raise ChannelError(
            f"{segment.path} has protocol version {found[1]}, this rank speaks {VERSION}: "
            "install the same tpoverlap on all ranks"
        )
    names = ("magic", "version", "world size", "size", "cpu slot", "kernel slot", "copy slot", "captured slot", "nonce")
    differing = [f"{n} {f!r} (expected {e!r})" for n, f, e in zip(names, found, expected, strict=True) if f != e]
    raise ChannelError(f"{segment.path} belongs to another group: {', '.join(differing)}")
