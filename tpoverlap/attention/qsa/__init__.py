"""QSA: attention over the blocks of tokens that compressed keys select.

A layer keeps two side caches (``KeyStateCache``, ``CompressedKeyCache``). Each step builds their metadata
(``QSAMetadataBuilder``), writes the batch's keys (``update_key_caches``) and selects what each query attends to
(``select_tokens``).
"""

from tpoverlap.attention.qsa.builder import QSABatchMetadata, QSAMetadataBuilder
from tpoverlap.attention.qsa.caches import CompressedKeyCache, KeyStateCache
from tpoverlap.attention.qsa.compression import compress_keys, update_key_caches
from tpoverlap.attention.qsa.key_transform import KeyTransform
from tpoverlap.attention.qsa.metadata import (
    QSAMetadata,
    build_metadata,
    canonical_rope_positions,
    circular_slot_mapping,
    compressed_slot_mapping,
    k_work_capacity,
)
from tpoverlap.attention.qsa.scoring import score_paged, score_request_segments
from tpoverlap.attention.qsa.selection import SelectionReport, select_tokens

__all__ = [
    "CompressedKeyCache",
    "KeyStateCache",
    "KeyTransform",
    "QSABatchMetadata",
    "QSAMetadata",
    "QSAMetadataBuilder",
    "SelectionReport",
    "build_metadata",
    "canonical_rope_positions",
    "circular_slot_mapping",
    "compress_keys",
    "compressed_slot_mapping",
    "k_work_capacity",
    "score_paged",
    "score_request_segments",
    "select_tokens",
    "update_key_caches",
]
