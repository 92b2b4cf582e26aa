"""Where everything lies in a group's shared segment.

One header page (identity of the segment, failure record), an area a rank (its progress, its protocol words, each in a
64-byte line of its own, its call descriptors), then the payload slots of each mode. Only a rank itself writes its area,
but for the poison of a failure. Modes share no slot and no word.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass

MAGIC = b"TPOVRLP1"
VERSION = 4
PAGE = 4096
LINE = 64

# Header: magic, version, world size, segment size, slot bytes of the four modes, nonce.
HEADER = struct.Struct("<8sIIQQQQQ16s")
RESETS = 512  # 64 bits: how many resets the group has had
FAILURE_STATE = 1024  # 0: no failure; 1: the record below is complete
FAILURE_LENGTH = 1028
FAILURE_TEXT = 1032
FAILURE_TEXT_BYTES = 3000

# A rank's area: offsets of its parts.
_LEFT = 0
_STARTED_NS, _CALL, _FINISHED_CALL = LINE, LINE + 8, LINE + 16
_RESET_ATTEMPT, _RESTORED_FOR = 2 * LINE, 3 * LINE
_WORDS = 1024
_KERNEL_FLAGS = PAGE
_MAILBOX = 2 * PAGE
_DESCRIPTORS = 4 * PAGE
NUM_DESCRIPTORS = 1024
DESCRIPTOR_TEXT_BYTES = LINE - 12  # after the call number (8) and the text's length (4)
_RANK_BYTES = _DESCRIPTORS + NUM_DESCRIPTORS * LINE

# Protocol words of a rank.
CPU_PUBLISHED, CPU_CONSUMED, COPY_PUBLISHED, COPY_CONSUMED, KERNEL_CONSUMED, CAPTURED_BUSY = range(6)
MAX_KERNEL_BLOCKS = PAGE // LINE
KERNEL_LINES_BYTES = 128 << 10  # of a slot of kernel mode's lines, each of which holds its number beside its data
MAX_PIECES = 16
MAX_WORLD_SIZE = 2 * PAGE // (MAX_PIECES * LINE)

NUM_SLOTS = 2
"""Slots of a rank in the modes that count operations: a power of two, so that op % slots survives the wrap."""


@dataclass(frozen=True)
class Layout:
    """Offsets in bytes. Slot sizes are multiples of the page size; 0 for a mode that the group does not have.

    Captured operations have one slot a rank, in MAX_PIECES equal parts; the other modes have NUM_SLOTS.
    """

    world_size: int
    cpu_slot_bytes: int
    kernel_slot_bytes: int = 0
    copy_slot_bytes: int = 0
    captured_slot_bytes: int = 0

    @property
    def size(self) -> int:
        return self._captured_slots + self.world_size * self.captured_slot_bytes

    def header(self, nonce: bytes) -> bytes:
        return HEADER.pack(
            MAGIC,
            VERSION,
            self.world_size,
            self.size,
            self.cpu_slot_bytes,
            self.kernel_slot_bytes,
            self.copy_slot_bytes,
            self.captured_slot_bytes,
            nonce,
        )

    def left(self, rank: int) -> int:
        """32-bit flag: the rank has destroyed its side of the group."""
        return self._rank(rank) + _LEFT

    def started_ns(self, rank: int) -> int:
        """64-bit monotonic time, in ns, since when the rank has waited in the call under way; 0 between calls."""
        return self._rank(rank) + _STARTED_NS

    def call(self, rank: int) -> int:
        """64-bit number of the rank's last call, begun or finished."""
        return self._rank(rank) + _CALL

    def finished_call(self, rank: int) -> int:
        """64-bit number of the rank's last finished call."""
        return self._rank(rank) + _FINISHED_CALL

    def reset_attempt(self, rank: int) -> int:
        """64-bit number of the attempt at a reset for which the rank has drained; 0: it has given up."""
        return self._rank(rank) + _RESET_ATTEMPT

    def restored_for(self, rank: int) -> int:
        """The attempts of all ranks, 64 bits each, for which the rank has restored its words."""
        return self._rank(rank) + _RESTORED_FOR

    def descriptor(self, rank: int, call: int) -> int:
        return self._rank(rank) + _DESCRIPTORS + call % NUM_DESCRIPTORS * LINE

    def word(self, rank: int, which: int) -> int:
        return self._rank(rank) + _WORDS + which * LINE

    def kernel_flag(self, rank: int, block: int) -> int:
        """What block ``block`` of the rank's grid has published; the blocks' words follow each other by LINE."""
        return self._rank(rank) + _KERNEL_FLAGS + block * LINE

    def mailbox(self, writer: int, reader: int, piece: int) -> int:
        return self._rank(writer) + _MAILBOX + (reader * MAX_PIECES + piece) * LINE

    def cpu_slot(self, rank: int, slot: int) -> int:
        return self._cpu_slots + (rank * NUM_SLOTS + slot) * self.cpu_slot_bytes

    def kernel_slot(self, rank: int, slot: int) -> int:
        return self._kernel_slots + (rank * NUM_SLOTS + slot) * self.kernel_slot_bytes

    def kernel_lines(self, rank: int, slot: int) -> int:
        return self._kernel_lines + (rank * NUM_SLOTS + slot) * self._kernel_lines_bytes

    def copy_slot(self, rank: int, slot: int) -> int:
        return self._copy_slots + (rank * NUM_SLOTS + slot) * self.copy_slot_bytes

    def captured_slot(self, rank: int) -> int:
        return self._captured_slots + rank * self.captured_slot_bytes

    @property
    def _cpu_slots(self) -> int:
        return self._rank(self.world_size)

    @property
    def _kernel_slots(self) -> int:
        return self._cpu_slots + self.world_size * NUM_SLOTS * self.cpu_slot_bytes

    @property
    def _kernel_lines(self) -> int:
        return self._kernel_slots + self.world_size * NUM_SLOTS * self.kernel_slot_bytes

    @property
    def _kernel_lines_bytes(self) -> int:
        return KERNEL_LINES_BYTES if self.kernel_slot_bytes else 0

    @property
    def _copy_slots(self) -> int:
        return self._kernel_lines + self.world_size * NUM_SLOTS * self._kernel_lines_bytes

    @property
    def _captured_slots(self) -> int:
        return self._copy_slots + self.world_size * NUM_SLOTS * self.copy_slot_bytes

    @staticmethod
    def _rank(rank: int) -> int:
        return PAGE + rank * _RANK_BYTES


def page_aligned(num_bytes: int) -> int:
    return -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
