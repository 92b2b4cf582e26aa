"""Paged prefill for compute capability 7.5, in CUDA C++: head dimension 256, FP16, split-KV by waves.

The module is a :class:`~tpoverlap.attention.backend.PrefillBackend`. It runs on every GPU from 7.5 up; it is preferred
where FlashAttention has no kernel, on 7.5 itself.
"""

from tpoverlap.attention.turing.launch import prepare_prefill
from tpoverlap.attention.turing.selection import MIN_QUERY_LEN, capabilities, name, rejection_reasons
from tpoverlap.attention.turing.splits import choose_num_splits

__all__ = [
    "MIN_QUERY_LEN",
    "capabilities",
    "choose_num_splits",
    "name",
    "prepare_prefill",
    "rejection_reasons",
]
