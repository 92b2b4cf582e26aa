"""Runs the Turing kernels on the CPU, from their own source: see emulated_turing.h."""

from __future__ import annotations

import ctypes
import functools
import math
from pathlib import Path

import torch
from attention_cases import Case
from emulated_build import build

from tpoverlap.attention.turing import launch


@functools.cache
def library() -> ctypes.CDLL:
    """The emulation, compiled once a process."""
    kernels = Path(launch.__file__).with_name("prefill.cu")
    loaded = build(Path(__file__).with_name("emulated_turing.cpp"), kernels.name, kernels.read_text(), "-O2")
    assert loaded.arguments_size() == ctypes.sizeof(launch.Arguments)
    return loaded


def readable_ranges(case: Case) -> list[int]:
    """Addresses that a correct kernel may load: keys and values of some request, and the table entries for them."""
    ranges: list[int] = []
    block_size = case.k_cache.shape[1]
    table = case.block_table
    for request, keys in enumerate(case.seq_lens.tolist()):
        blocks = -(-keys // block_size)
        if blocks:
            start = table[request].data_ptr()
            ranges += [start, start + blocks * table.element_size()]
        for j in range(keys):
            for cache in (case.k_cache, case.v_cache):
                for head in range(cache.shape[2]):
                    start = cache[int(table[request, j // block_size]), j % block_size, head].data_ptr()
                    ranges += [start, start + cache.shape[3] * cache.element_size()]
    return ranges


def run(
    case: Case, *, splits: int = 1, scale: float | None = None, seed: int = 0, ranges: list[int] | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and log-sum-exp as the launcher would have them; an emulated fault fails the test.

    ranges: what may be loaded of cache and block table, default :func:`readable_ranges`.
    """
    q = case.q
    out = torch.full_like(q, math.nan)
    lse = torch.full(q.shape[:2], math.nan)
    partial = torch.full((splits * q.shape[0] * q.shape[1] * (launch.HEAD_DIM + 1),), math.nan) if splits > 1 else None
    arguments = launch.make_arguments(
        *case.prefill, out, lse, partial, splits=splits, scale=q.shape[2] ** -0.5 if scale is None else scale
    )
    ranges = readable_ranges(case) if ranges is None else ranges
    message = ctypes.create_string_buffer(400)
    failed = library().run_attend(
        ctypes.byref(arguments),
        *launch.launch_grid(q, case.k_cache, case.block_table),
        splits,
        (ctypes.c_uint64 * max(1, len(ranges)))(*ranges),
        len(ranges) // 2,
        ctypes.c_uint64(seed),
        message,
        len(message),
    )
    assert not failed, message.value.decode()
    if splits > 1:
        grid = -(-q.shape[0] * q.shape[1] // launch.MERGE_ROWS)
        assert not library().run_merge(ctypes.byref(arguments), grid, 1, 1, message, len(message)), (
            message.value.decode()
        )
    return out, lse
