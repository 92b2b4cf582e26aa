"""The order of steps that makes a collective through shared slots safe, as data.

Each rank has two counters that its peers can read: ``published``, the pieces that it has made readable, and
``consumed``, the last operation whose peer data it has read completely. An operation is a straight line of steps; the
providers execute the same lists (with memory copies, or as stream operations) that the tests explore exhaustively, in
all interleavings.

Counters are 32-bit and cyclic. An operation numbered ``op`` uses slot ``op % num_slots`` of every rank; it may write
its slot once every reader has consumed operation ``op - num_slots``. With ``base`` pieces published before it, its
k-th piece is readable at ``published >= base + k``. Steps name k; the executor of the steps adds the base.

Steps lie in two lanes, ``up`` (own slot) and ``down`` (the peers' slots). A lane runs in order; a step that needs one
of the other lane names it in ``after``. The order of the list itself is a topological order of all dependencies
between ranks (upload and publish of a piece stand before the wait for it), so lanes that a device serializes in issue
order cost time, never a deadlock.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto
from functools import cache

POISON_OFFSET = 1 << 30
"""A poisoned counter stands this far ahead of every value that somebody may wait for."""

FULL, EMPTY, POISON = 1, 2, 3
"""States of a mailbox word. A wait is a bitwise AND with the state waited for, so that POISON satisfies both."""


class Kind(Enum):
    WAIT_CONSUMED = auto()
    """Until ``rank`` has consumed the operation that used this slot before."""
    UPLOAD = auto()
    """Copy piece ``piece`` of the own data (two shots: of the shards that other ranks own) into the own slot."""
    PUBLISH = auto()
    """Own ``published`` becomes base + ``count``."""
    WAIT_PUBLISHED = auto()
    """Until ``rank`` has published base + ``count``."""
    COLLECT = auto()
    """Read piece ``piece`` from the slots of all peers."""
    REDUCE = auto()
    """Two shots: add piece ``piece`` of the own shard over all ranks, reading the peers' slots."""
    UPLOAD_RESULT = auto()
    """Two shots: copy piece ``piece`` of the own shard's sum into the own slot."""
    COLLECT_RESULT = auto()
    """Two shots: read piece ``piece`` of the other shards' sums from the slots of their owners."""
    CONSUME = auto()
    """Own ``consumed`` becomes the operation's number."""
    WAIT_EMPTY = auto()
    """Mailbox: until reader ``rank`` has emptied word (self, rank, piece)."""
    FILL = auto()
    """Mailbox: word (self, rank, piece) becomes FULL."""
    WAIT_FULL = auto()
    """Mailbox: until writer ``rank`` has filled word (rank, self, piece)."""
    DRAIN = auto()
    """Mailbox: word (rank, self, piece) becomes EMPTY."""


@dataclass(frozen=True, slots=True)
class Step:
    kind: Kind
    lane: str
    rank: int = -1
    piece: int = 0
    count: int = 0
    after: tuple[int, ...] = ()


@cache
def one_shot(rank: int, world_size: int, num_pieces: int) -> tuple[Step, ...]:
    """Every rank publishes its whole payload and reads all others': one exchange, (n - 1) payloads read a rank.

    Serves all-reduce of small payloads and of two ranks, all-gather and broadcast.
    """
    peers = _peers(rank, world_size)
    steps = [Step(Kind.WAIT_CONSUMED, "up", rank=q) for q in peers]
    for p in range(num_pieces):
        steps.append(Step(Kind.UPLOAD, "up", piece=p))
        steps.append(Step(Kind.PUBLISH, "up", piece=p, count=p + 1))
    for p in range(num_pieces):
        steps += [Step(Kind.WAIT_PUBLISHED, "down", rank=q, piece=p, count=p + 1) for q in peers]
        steps.append(Step(Kind.COLLECT, "down", piece=p))
    steps.append(Step(Kind.CONSUME, "down"))
    return tuple(steps)


@cache
def two_shot(rank: int, world_size: int, num_pieces: int, gather: bool = True) -> tuple[Step, ...]:
    """Rank i owns shard i: all upload the shards that they do not own, the owner adds and uploads the sum, all read it.

    2 (n - 1) / n payloads read a rank. The sum takes the place in the owner's slot where its own shard would lie,
    which the first shot leaves unused. ``gather=False`` ends after the sum: a reduce-scatter.
    """
    peers = _peers(rank, world_size)
    steps = [Step(Kind.WAIT_CONSUMED, "up", rank=q) for q in peers]
    for p in range(num_pieces):
        steps.append(Step(Kind.UPLOAD, "up", piece=p))
        steps.append(Step(Kind.PUBLISH, "up", piece=p, count=p + 1))
    for p in range(num_pieces):
        steps += [Step(Kind.WAIT_PUBLISHED, "down", rank=q, piece=p, count=p + 1) for q in peers]
        steps.append(Step(Kind.REDUCE, "down", piece=p))
        if gather:
            steps.append(Step(Kind.UPLOAD_RESULT, "up", piece=p, after=(len(steps) - 1,)))
            steps.append(Step(Kind.PUBLISH, "up", piece=p, count=num_pieces + p + 1))
    if gather:
        for p in range(num_pieces):
            steps += [Step(Kind.WAIT_PUBLISHED, "down", rank=q, piece=p, count=num_pieces + p + 1) for q in peers]
            steps.append(Step(Kind.COLLECT_RESULT, "down", piece=p))
    steps.append(Step(Kind.CONSUME, "down"))
    return tuple(steps)


@cache
def mailbox(rank: int, world_size: int, num_pieces: int) -> tuple[Step, ...]:
    """One shot without counters, for captured graphs, whose values are baked in: one word a (writer, reader, piece).

    Piece p must lie at the same place of the slot in every operation: word p speaks for that place alone.
    """
    peers = _peers(rank, world_size)
    steps = []
    for p in range(num_pieces):
        steps += [Step(Kind.WAIT_EMPTY, "up", rank=q, piece=p) for q in peers]
        steps.append(Step(Kind.UPLOAD, "up", piece=p))
        steps += [Step(Kind.FILL, "up", rank=q, piece=p) for q in peers]
    for p in range(num_pieces):
        steps += [Step(Kind.WAIT_FULL, "down", rank=q, piece=p) for q in peers]
        steps.append(Step(Kind.COLLECT, "down", piece=p))
        steps += [Step(Kind.DRAIN, "down", rank=q, piece=p) for q in peers]
    return tuple(steps)


def pieces_published(steps: tuple[Step, ...]) -> int:
    """How far ``published`` advances over an operation of these steps."""
    return max((s.count for s in steps if s.kind is Kind.PUBLISH), default=0)


def _peers(rank: int, world_size: int) -> list[int]:
    return [q for q in range(world_size) if q != rank]
