"""Configuration of the transport and of the micro-batch executor.

Every field is checked when the object is made; a wrong value raises :class:`~tpoverlap.errors.ConfigError` naming it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tpoverlap.errors import ConfigError

# Eleven days: what transports count in milliseconds or nanoseconds stays far inside their integers.
MAX_TIMEOUT_S = 1_000_000


def _check_int(field: str, value: object, low: int, high: int | None = None) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < low or (high is not None and value > high):
        limits = f"an integer >= {low}" if high is None else f"an integer from {low} to {high}"
        raise ConfigError(f"{field}={value!r} is not supported: give {limits}")


@dataclass(frozen=True)
class HostReduceConfig:
    """How a group's collectives travel through host memory.

    max_bytes: largest payload, in bytes, of the latency-optimized path (kernel mode on GPUs).
    copy_engine_max_bytes: slot size of the copy-engine path and largest payload of one of its operations, in bytes;
        larger payloads run as consecutive operations. 0 turns the path off.
    timeout_s: how long a rank waits for its peers, in seconds, counted from its own publish.
    wire: format of the data between ranks. Only ``"exact"`` (the tensor's own dtype).
    peer_access: ``"auto"`` lets the copy-engine path step aside where GPUs really reach each other's memory;
        ``"ignore"`` keeps it.
    copy_engine_pieces: pieces in which the copy-engine path moves an operation's payload, 1 to 16; ``"auto"``: by size.
    """

    max_bytes: int = 262_144
    copy_engine_max_bytes: int = 20_971_520
    timeout_s: float = 30.0
    wire: Literal["exact"] = "exact"
    peer_access: Literal["auto", "ignore"] = "auto"
    copy_engine_pieces: int | Literal["auto"] = "auto"

    def __post_init__(self) -> None:
        _check_int("max_bytes", self.max_bytes, 0)
        _check_int("copy_engine_max_bytes", self.copy_engine_max_bytes, 0)
        if self.max_bytes % 16:
            raise ConfigError(f"max_bytes={self.max_bytes} is not supported: give a multiple of 16")
        size = self.copy_engine_max_bytes
        if size and (size <= self.max_bytes or size % 16):
            raise ConfigError(
                f"copy_engine_max_bytes={size} is not supported: give 0 (off) or a multiple of 16 "
                f"above max_bytes={self.max_bytes}"
            )
        if self.copy_engine_pieces != "auto":
            _check_int("copy_engine_pieces", self.copy_engine_pieces, 1, 16)
        seconds = self.timeout_s
        if not isinstance(seconds, (int, float)) or isinstance(seconds, bool) or not 0 < seconds <= MAX_TIMEOUT_S:
            raise ConfigError(
                f"timeout_s={seconds!r} is not supported: give a positive number of seconds, {MAX_TIMEOUT_S:,} at most"
            )
        if self.wire != "exact":
            raise ConfigError(f"wire={self.wire!r} is not supported: only 'exact' is")
        if self.peer_access not in ("auto", "ignore"):
            raise ConfigError(f"peer_access={self.peer_access!r} is not supported: give 'auto' or 'ignore'")


@dataclass(frozen=True)
class OverlapConfig:
    """When and how a batch is cut into pieces that overlap.

    min_tokens: batches of fewer tokens run whole; 0 turns splitting off.
    num_pieces: 2, 3, 4 or ``"auto"``.
    cut_multiple: automatic cuts are rounded to a multiple of this many tokens.
    """

    min_tokens: int = 0
    num_pieces: int | Literal["auto"] = "auto"
    cut_multiple: int = 128

    def __post_init__(self) -> None:
        _check_int("min_tokens", self.min_tokens, 0)
        if self.num_pieces != "auto" and (not isinstance(self.num_pieces, int) or not 2 <= self.num_pieces <= 4):
            raise ConfigError(f"num_pieces={self.num_pieces!r} is not supported: give 2, 3, 4 or 'auto'")
        _check_int("cut_multiple", self.cut_multiple, 1)
