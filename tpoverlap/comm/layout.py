"""Where everything lies in a group's shared segment.

One header page (identity of the segment, failure record), one page a rank (its progress, its call descriptors, its
protocol words, each word in a 64-byte line of its own), then the payload slots. Only a rank itself writes its page,
but for the poison of a failure and the restoration of a reset.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass

MAGIC = b"TPOVRLP1"
VERSION = 1
PAGE = 4096
LINE = 64

# Header: magic, version, world size, segment size, slot bytes, slots a rank, nonce.
HEADER = struct.Struct("<8sIIQQQ16s")
FAILURE_STATE = 1024  # 0: no failure; 1: the record below is complete
FAILURE_LENGTH = 1028
FAILURE_TEXT = 1032
FAILURE_TEXT_BYTES = 3000

# Rank page: offsets of its parts.
_LEFT = 0
_STARTED_NS, _CALL, _FINISHED_CALL = LINE, LINE + 8, LINE + 16
_DESCRIPTORS = 1024
NUM_DESCRIPTORS = 16
DESCRIPTOR_TEXT_BYTES = LINE - 12  # after the call number (8) and the text's length (4)
_WORDS = 2048
PUBLISHED, CONSUMED = 0, 1


@dataclass(frozen=True)
class Layout:
    """Offsets in bytes. slot_bytes is a multiple of the page size; num_slots a power of two."""

    world_size: int
    slot_bytes: int
    num_slots: int

    @property
    def size(self) -> int:
        return PAGE * (1 + self.world_size) + self.world_size * self.num_slots * self.slot_bytes

    def header(self, nonce: bytes) -> bytes:
        return HEADER.pack(MAGIC, VERSION, self.world_size, self.size, self.slot_bytes, self.num_slots, nonce)

    def left(self, rank: int) -> int:
        """32-bit flag: the rank has destroyed its side of the group."""
        return self._page(rank) + _LEFT

    def started_ns(self, rank: int) -> int:
        """64-bit monotonic time, in ns, since when the rank has waited in the call under way; 0 between calls."""
        return self._page(rank) + _STARTED_NS

    def call(self, rank: int) -> int:
        """64-bit number of the rank's last call, begun or finished."""
        return self._page(rank) + _CALL

    def finished_call(self, rank: int) -> int:
        """64-bit number of the rank's last finished call."""
        return self._page(rank) + _FINISHED_CALL

    def descriptor(self, rank: int, call: int) -> int:
        return self._page(rank) + _DESCRIPTORS + call % NUM_DESCRIPTORS * LINE

    def word(self, rank: int, which: int) -> int:
        return self._page(rank) + _WORDS + which * LINE

    def slot(self, rank: int, slot: int) -> int:
        return PAGE * (1 + self.world_size) + (rank * self.num_slots + slot) * self.slot_bytes

    @staticmethod
    def _page(rank: int) -> int:
        return PAGE * (1 + rank)


def page_aligned(num_bytes: int) -> int:
    return -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
