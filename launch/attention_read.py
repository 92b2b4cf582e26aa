"""The floor of a paged decode: a kernel that reads the same keys and values through the same block table.

It computes nothing but one sum a program, so that no load is left out, and has no chain of lengths, splits and merges:
what a decode takes longer is its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
import triton
import triton.language as tl
from attention_problems import Problem

# Blocks of keys that a program reads, all loads in flight at once.
BLOCKS = 8


@triton.jit
def _read_kernel(  # type: ignore[no-untyped-def]
    k_cache,
    v_cache,
    block_table,
    sums,
    columns,
    block_stride,
    row_stride,
    head_stride,
    BLOCK_SIZE: tl.constexpr,
    DIM: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """Program (p, h, r) reads blocks [p * BLOCKS, (p + 1) * BLOCKS) of request r's head h."""
    head, request = tl.program_id(1), tl.program_id(2)
    table = block_table + request * columns + tl.program_id(0) * BLOCKS
    rows = tl.arange(0, BLOCK_SIZE)[:, None] * row_stride + tl.arange(0, DIM)[None, :] + head * head_stride
    total = tl.zeros([BLOCK_SIZE, DIM], tl.float32)
    for i in tl.static_range(BLOCKS):
        start = tl.load(table + i).to(tl.int64) * block_stride
        total += tl.load(k_cache + start + rows).to(tl.float32) + tl.load(v_cache + start + rows).to(tl.float32)
    program = (request * tl.num_programs(1) + head) * tl.num_programs(0) + tl.program_id(0)
    tl.store(sums + program, tl.sum(total))


class PlainRead:
    """Reads of a problem's keys and values, one for each of its block tables."""

    def __init__(self, problem: Problem) -> None:
        shape = problem.shape
        _, self._block_size, _, _ = problem.k_cache.shape
        self._grid = (shape.keys // (self._block_size * BLOCKS), shape.kv_heads, shape.requests)
        if shape.keys % (self._block_size * BLOCKS):
            raise ValueError(f"a plain read takes keys in {self._block_size * BLOCKS}s, not {shape.keys}")
        self._problem = problem
        self._sums = problem.q.new_empty(self._grid[::-1], dtype=torch.float32)

    def calls(self) -> Sequence[Callable[[], None]]:
        return [partial(self._read, table) for table in self._problem.tables]

    def check(self) -> None:
        """RuntimeError unless every key and value of the first block table was read."""
        self._read(self._problem.tables[0])
        blocks = self._problem.tables[0].long()
        caches = (self._problem.k_cache, self._problem.v_cache)
        of_blocks = sum(cache.double().sum(dim=(1, 3))[blocks] for cache in caches)  # [requests, columns, heads]
        want = of_blocks.view(len(blocks), -1, BLOCKS, self._grid[1]).sum(2).transpose(1, 2)  # type: ignore[union-attr]
        if not torch.allclose(self._sums.double(), want, rtol=1e-3, atol=1e-2):
            raise RuntimeError(f"{self._problem.shape.name}: the plain read left out keys")

    def _read(self, table: torch.Tensor) -> None:
        k_cache, v_cache = self._problem.k_cache, self._problem.v_cache
        block_stride, row_stride, head_stride, _ = k_cache.stride()
        _read_kernel[self._grid](
            k_cache,
            v_cache,
            table,
            self._sums,
            table.shape[1],
            block_stride,
            row_stride,
            head_stride,
            BLOCK_SIZE=self._block_size,
            DIM=self._problem.shape.head_dim,
            BLOCKS=BLOCKS,
            num_warps=4,
        )
