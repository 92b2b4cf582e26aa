"""Problems of the attention benchmark: random paged requests past the L2 cache, and the check of a result."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from tpoverlap.attention import paged_prefill

BLOCK_SIZE = 16
# Copies of a problem's keys are made until they exceed the L2 cache so many times.
L2_MULTIPLE = 4


@dataclass(frozen=True)
class Shape:
    """requests of n query tokens each, with as many keys."""

    requests: int
    n: int
    keys: int
    q_heads: int
    kv_heads: int
    head_dim: int

    @property
    def name(self) -> str:
        """As in ``2048 after 32768, 12/2 heads of 128`` or ``16 x 8192, 16/16 heads of 128``."""
        heads = f"{self.q_heads}/{self.kv_heads} heads of {self.head_dim}"
        if self.n == 1:
            return f"{self.requests} x {self.keys}, {heads}"
        before = self.keys - self.n
        return f"{self.n} after {before}, {heads}" if before else f"{self.n} prompt, {heads}"

    @property
    def key(self) -> str:
        """For names of figures."""
        heads = f"q{self.q_heads}_kv{self.kv_heads}_d{self.head_dim}"
        return f"{self.requests}x{self.keys}_{heads}" if self.n == 1 else f"{self.n}_of_{self.keys}_{heads}"

    @property
    def kv_bytes(self) -> int:
        return self.requests * self.keys * self.kv_heads * self.head_dim * 2 * 2

    @property
    def flops(self) -> int:
        """Of the products with keys that are seen."""
        seen = self.n * self.keys - self.n * (self.n - 1) // 2
        return 4 * self.requests * self.q_heads * self.head_dim * seen


@dataclass
class Problem:
    """FP16 tensors of a shape; ``tables`` name disjoint, shuffled blocks, so that turns do not find keys in the L2."""

    shape: Shape
    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    tables: list[torch.Tensor]
    cu_seqlens_q: torch.Tensor
    seq_lens: torch.Tensor
    _expected: tuple[torch.Tensor, torch.Tensor] | None = field(default=None, repr=False)

    @classmethod
    def random(cls, shape: Shape, l2_bytes: int, seed: int = 0) -> Problem:
        gen = torch.Generator("cuda").manual_seed(seed)
        columns = -(-shape.keys // BLOCK_SIZE)
        copies = max(2, -(-L2_MULTIPLE * l2_bytes // shape.kv_bytes)) if shape.n == 1 else 1
        copies = min(copies, 64)
        blocks = copies * shape.requests * columns
        size = (blocks, 2, BLOCK_SIZE, shape.kv_heads, shape.head_dim)
        storage = torch.randn(size, generator=gen, device="cuda", dtype=torch.float16)
        order = torch.randperm(blocks, generator=gen, device="cuda").to(torch.int32)
        tokens = shape.requests * shape.n
        return cls(
            shape,
            torch.randn(tokens, shape.q_heads, shape.head_dim, generator=gen, device="cuda", dtype=torch.float16),
            storage[:, 0],
            storage[:, 1],
            list(order.view(copies, shape.requests, columns)),
            torch.arange(0, tokens + 1, shape.n, dtype=torch.int32, device="cuda"),
            torch.full((shape.requests,), shape.keys, dtype=torch.int32, device="cuda"),
        )

    def prefill(self, copy: int = 0) -> tuple[torch.Tensor, ...]:
        return (self.q, self.k_cache, self.v_cache, self.tables[copy], self.cu_seqlens_q, self.seq_lens)

    def decode(self, copy: int = 0) -> tuple[torch.Tensor, ...]:
        return (self.q, self.k_cache, self.v_cache, self.tables[copy], self.seq_lens)

    def dense(self, copy: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q, k, v [requests, heads, tokens, head_dim] for kernels without a block table."""
        shape = self.shape
        rows = self.tables[copy].long()
        keys = (
            cache[rows].reshape(shape.requests, -1, shape.kv_heads, shape.head_dim)[:, : shape.keys].transpose(1, 2)
            for cache in (self.k_cache, self.v_cache)
        )
        k, v = (x.contiguous() for x in keys)
        q = self.q.view(shape.requests, shape.n, shape.q_heads, shape.head_dim).transpose(1, 2).contiguous()
        return q, k, v

    def check(self, out: torch.Tensor, lse: torch.Tensor | None = None) -> None:
        """RuntimeError unless a result for copy 0 agrees with the torch reference (FP32) to FP16's accuracy."""
        if self._expected is None:
            self._expected = _reference(self)
        want, want_lse = self._expected
        relative = ((out.float() - want.float()).norm() / want.float().norm()).item()
        if not relative < 3e-3:
            raise RuntimeError(f"{self.shape.name}: the output is off by {relative:.2g} of its norm")
        if lse is not None and not torch.allclose(lse, want_lse, rtol=1e-3, atol=1e-3):
            raise RuntimeError(f"{self.shape.name}: the log-sum-exp is wrong")


def _reference(problem: Problem) -> tuple[torch.Tensor, torch.Tensor]:
    """From the last query tokens' point of view all keys matter: long chunks are checked in full, in FP32."""
    tensors = problem.prefill()
    result = paged_prefill(*tensors, backend="reference", return_lse=True)
    return result[0], result[1]


def graph_of(calls: Sequence[Callable[[], object]]) -> Callable[[], None]:
    """A replay of all calls, captured after one eager round."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    # A collection inside the capture can free captured memory's owners and void it.
    gc.collect()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return graph.replay
