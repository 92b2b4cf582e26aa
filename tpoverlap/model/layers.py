"""The parts of one decoder layer, as one tensor-parallel rank holds them."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import nn
from torch.nn.modules.module import _has_any_global_hook

from tpoverlap.attention import allocate_kv_cache, decode_splits, paged_decode, paged_prefill, write_kv
from tpoverlap.model.fused import add_rms_norm, rms_norm, sigmoid_mul, silu_mul
from tpoverlap.model.metadata import AttentionMetadata

Rotary = tuple[torch.Tensor, torch.Tensor]
"""Cosines and sines of the tokens' rotary angles, each [tokens, head_dim / 2] in the model's dtype."""


class Group(Protocol):
    """The collectives that the decoder needs, those of ``tpoverlap.comm.GroupCoordinator``."""

    @property
    def rank_in_group(self) -> int: ...

    @property
    def world_size(self) -> int: ...

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor: ...

    def all_gather(self, x: torch.Tensor, dim: int) -> torch.Tensor: ...


class DecoderLayer(nn.Module):
    """Pre-norm residual layer, [tokens, hidden] to the same: attention (or what takes its place), then MLP."""

    def __init__(self, input_norm: RMSNorm, attention: nn.Module, post_attention_norm: RMSNorm, mlp: MLP) -> None:
        super().__init__()
        self.input_norm = input_norm
        self.attention = attention
        self.post_attention_norm = post_attention_norm
        self.mlp = mlp

    def forward(self, hidden: torch.Tensor, rotary: Rotary, metadata: AttentionMetadata) -> torch.Tensor:
        hidden, update = self.without_last_sum(hidden, None, rotary, metadata)
        return hidden + update

    def without_last_sum(
        self, hidden: torch.Tensor, update: torch.Tensor | None, rotary: Rotary, metadata: AttentionMetadata
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The layer of ``hidden`` + ``update`` (None: nothing to add), as two tensors whose sum is the result: whoever
        norms that sum makes it on the way."""
        if update is None:
            normed = self.input_norm(hidden)
        else:
            hidden, normed = norm_of_sum(self.input_norm, hidden, update)
        hidden, normed = norm_of_sum(self.post_attention_norm, hidden, self.attention(normed, rotary, metadata))
        return hidden, self.mlp(normed)


class Attention(nn.Module):
    """Causal grouped-query attention over a paged cache: x [tokens, hidden] to [tokens, hidden], summed over the ranks.

    qkv: this rank's query, key and value heads, fused in that order. q_norm, k_norm: over each head, before the
    rotation; None: the architecture has none. output_gate: ``qkv`` begins with a gate for each query head, whose
    sigmoid scales that head's result.

    prefill_backend, prefill_num_splits: as :func:`~tpoverlap.attention.paged_prefill` takes them. A decode's splits
    follow from the size of the cache.
    """

    def __init__(
        self,
        num_query_heads: int,
        num_kv_heads: int,
        head_dim: int,
        qkv: nn.Module,
        q_norm: RMSNorm | None,
        k_norm: RMSNorm | None,
        o: RowParallel,
        *,
        output_gate: bool = False,
    ) -> None:
        super().__init__()
        self.heads = (*((num_query_heads,) if output_gate else ()), num_query_heads, num_kv_heads, num_kv_heads)
        self.head_dim = head_dim
        self.qkv = qkv
        self.q_norm = q_norm
        self.k_norm = k_norm
        self.o = o
        self.prefill_backend = "auto"
        self.prefill_num_splits: int | None = None
        self.decode_num_splits = 16
        self.kv_cache: tuple[torch.Tensor, torch.Tensor] | None = None

    def allocate_kv_cache(self, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device) -> None:
        self.kv_cache = allocate_kv_cache(
            num_blocks, block_size, self.heads[-1], self.head_dim, dtype=dtype, device=device
        )
        self.decode_num_splits = decode_splits(num_blocks * block_size)

    def forward(self, x: torch.Tensor, rotary: Rotary, metadata: AttentionMetadata) -> torch.Tensor:
        *gate, q, k, v = self.qkv(x).view(x.shape[0], -1, self.head_dim).split_with_sizes(self.heads, dim=1)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        attended = self._attend(q, k, v, rotary, metadata)
        if gate:
            attended = sigmoid_mul(attended, gate[0])
        return self.o(attended.flatten(1))

    def _attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rotary: Rotary, metadata: AttentionMetadata
    ) -> torch.Tensor:
        if self.kv_cache is None:
            raise RuntimeError("the decoder has no key/value cache: call allocate_kv_cache first")
        k_cache, v_cache = self.kv_cache
        write_kv(k, v, k_cache, v_cache, metadata.slot_mapping, q=q, cos=rotary[0], sin=rotary[1])
        if metadata.decode_only:
            return paged_decode(
                q, k_cache, v_cache, metadata.block_table, metadata.seq_lens, num_splits=self.decode_num_splits
            )
        return paged_prefill(
            q,
            k_cache,
            v_cache,
            metadata.block_table,
            metadata.cu_seqlens_q,
            metadata.seq_lens,
            max_query_len=metadata.max_query_len,
            backend=self.prefill_backend,
            num_splits=self.prefill_num_splits,
        )


class MLP(nn.Module):
    """SiLU-gated MLP (SwiGLU, Shazeer 2020); ``gate_up`` holds this rank's gate rows, then its up rows."""

    def __init__(self, gate_up: nn.Module, down: RowParallel) -> None:
        super().__init__()
        self.gate_up = gate_up
        self.down = down

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(silu_mul(self.gate_up(x)))


class RowParallel(nn.Module):
    """A linear layer whose input features are spread over the ranks; the all-reduce adds their parts up.

    The bias belongs to the sum, so it is added once, after it.
    """

    def __init__(self, linear: nn.Module, bias: torch.Tensor | None, group: Group | None) -> None:
        super().__init__()
        self.linear = linear
        self.register_buffer("bias", bias)
        self.group = group

    bias: torch.Tensor | None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.linear(x)
        if self.group is not None:
            x = self.group.all_reduce(x)
        return x if self.bias is None else x + self.bias


class RMSNorm(nn.Module):
    """Root mean square layer norm over the last dimension: :func:`~tpoverlap.model.fused.rms_norm` with its weight."""

    def __init__(self, weight: torch.Tensor, eps: float) -> None:
        super().__init__()
        self.register_buffer("weight", weight)
        self.eps = eps

    weight: torch.Tensor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, self.weight, self.eps)


def norm_of_sum(norm: nn.Module, x: torch.Tensor, update: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x + update and the norm of it, together where the norm is an RMSNorm as it was made."""
    if isinstance(norm, RMSNorm) and is_as_made(norm, RMSNorm):
        return add_rms_norm(x, update, norm.weight, norm.eps)
    total = x + update
    return total, norm(total)


def is_as_made(module: nn.Module, kind: type[nn.Module]) -> bool:
    """Whether calling the module would run ``kind.forward`` and nothing else: no forward hooks, no other class, nothing
    compiled or put in its place."""
    held = module.__dict__
    return (
        type(module) is kind
        and not held["_forward_hooks"]
        and not held["_forward_pre_hooks"]
        and "forward" not in held
        and module._compiled_call_impl is None
        and not _has_any_global_hook()
    )
