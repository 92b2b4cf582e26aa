"""Paged attention: prefill of packed requests and split-KV decode over block tables, and the cache they read.

The kernels are chosen by :func:`select_prefill_backend` and :func:`select_decode_backend`; on CPU tensors a torch
reference serves.
"""

from tpoverlap.attention.api import decode_workspace_size, paged_decode, paged_prefill
from tpoverlap.attention.backend import CAPABILITIES, DecodeBackend, PrefillBackend, PrefillRequest
from tpoverlap.attention.kv_cache import BlockTables, CacheFullError, allocate_kv_cache, decode_splits, slot_mapping
from tpoverlap.attention.kv_write import write_kv
from tpoverlap.attention.selection import (
    DECODE_BACKENDS,
    PREFILL_BACKENDS,
    Selection,
    select_decode_backend,
    select_prefill_backend,
)

__all__ = [
    "CAPABILITIES",
    "DECODE_BACKENDS",
    "PREFILL_BACKENDS",
    "BlockTables",
    "CacheFullError",
    "DecodeBackend",
    "PrefillBackend",
    "PrefillRequest",
    "Selection",
    "allocate_kv_cache",
    "decode_splits",
    "decode_workspace_size",
    "paged_decode",
    "paged_prefill",
    "select_decode_backend",
    "select_prefill_backend",
    "slot_mapping",
    "write_kv",
]
