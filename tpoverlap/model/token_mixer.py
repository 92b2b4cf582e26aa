"""A gated token mixer with a recurrent state in place of attention, whose cost does not grow with the context.

Retention (Sun et al. 2023, "Retentive Network") in its chunkwise form, with grouped queries: per key/value head a
matrix S, which each token decays by a factor of the head and adds its key and value to; a query reads q S. The state
after the last token of a batch is stored in the slot of the ``state_block`` tokens that this token belongs to (align
mode), so that earlier blocks' states stay and a following chunk or piece goes on from what the one before it has left.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import nn

from tpoverlap.cuda.triton_available import triton_installed, triton_interpreted
from tpoverlap.cuda.triton_dispatch import capability_of
from tpoverlap.errors import ConfigError
from tpoverlap.model.fused import sigmoid_mul
from tpoverlap.model.layers import RMSNorm, Rotary, RowParallel
from tpoverlap.model.metadata import AttentionMetadata, StateSlots

_TRITON_HEAD_DIMS = (16, 32, 64, 128, 256)
BLOCK = 128
"""Tokens whose scores are computed at once; what lies before them comes from a state."""


class TokenMixer(nn.Module):
    """This rank's heads of the mixer, called like :class:`~tpoverlap.model.layers.Attention`.

    projections: x -> gates, queries, keys and values of this rank's heads, fused in that order. q_norm, k_norm: over
    each head. state_block: see above.
    """

    def __init__(
        self,
        num_query_heads: int,
        num_kv_heads: int,
        head_dim: int,
        projections: nn.Module,
        q_norm: RMSNorm,
        k_norm: RMSNorm,
        o: RowParallel,
        *,
        decay: Decay,
        state_block: int,
    ) -> None:
        super().__init__()
        self.heads = (num_query_heads, num_query_heads, num_kv_heads, num_kv_heads)
        self.head_dim = head_dim
        self.projections = projections
        self.q_norm = q_norm
        self.k_norm = k_norm
        self.o = o
        self.state_block = state_block
        self.decay = decay
        self.states: torch.Tensor | None = None

    def allocate_states(self, num_slots: int, device: torch.device) -> None:
        """A zeroed FP32 state for each slot."""
        shape = (num_slots, self.heads[-1], self.head_dim, self.head_dim)
        self.states = torch.zeros(shape, dtype=torch.float32, device=device)

    def forward(self, x: torch.Tensor, rotary: Rotary, metadata: AttentionMetadata) -> torch.Tensor:
        """rotary is not used: the decay tells the distance between tokens."""
        gate, q, k, v = self.projections(x).view(x.shape[0], -1, self.head_dim).split_with_sizes(self.heads, dim=1)
        if self._in_triton(x) and not metadata.decode_only:
            return self.o(self._mix_in_triton(gate, q, k, v, metadata).flatten(1))
        k = self.k_norm(k) * self.head_dim**-0.5
        mixed = self._mix(self.q_norm(q), k, v, metadata)
        mixed = F.rms_norm(mixed, mixed.shape[-1:], eps=self.q_norm.eps)
        return self.o(sigmoid_mul(mixed, gate).flatten(1))

    def _in_triton(self, x: torch.Tensor) -> bool:
        if not (x.is_cuda or triton_interpreted()) or not triton_installed():
            return False
        if x.is_cuda and capability_of(x) < (8, 0):
            # No BF16, and too little shared memory for the largest heads.
            return x.dtype == torch.float16 and self.head_dim in _TRITON_HEAD_DIMS[:-1]
        return x.dtype in (torch.float16, torch.bfloat16) and self.head_dim in _TRITON_HEAD_DIMS

    def _mix_in_triton(
        self, gate: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, metadata: AttentionMetadata
    ) -> torch.Tensor:
        from tpoverlap.model.token_mixer_triton import mix_prefill

        states, slots = self._cache(metadata)
        starts = metadata.query_start_loc
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        if starts[-1] < q.shape[0]:
            out.zero_()  # padding
        q_norm = self.q_norm
        norms = q_norm.weight, self.k_norm.weight, q_norm.eps
        shared = self.decay.log, states, (slots.before, slots.after, slots.fresh)
        for request, (start, stop) in enumerate(pairwise(starts)):
            if start < stop:
                own = (x if stop - start == q.shape[0] else x[start:stop] for x in (gate, q, k, v, out))
                gate_rows, q_rows, k_rows, v_rows, out_rows = own
                mix_prefill(gate_rows, q_rows, k_rows, v_rows, *norms, *shared, request, out_rows)
        return out

    def _cache(self, metadata: AttentionMetadata) -> tuple[torch.Tensor, StateSlots]:
        if self.states is None or metadata.state_slots is None:
            raise RuntimeError("the decoder has no cache for its states: call allocate_kv_cache first")
        return self.states, metadata.state_slots

    def _mix(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, metadata: AttentionMetadata) -> torch.Tensor:
        cache, slots = self._cache(metadata)
        states = cache.index_select(0, slots.before)
        states = torch.where(slots.fresh[:, None, None, None], 0.0, states)
        if metadata.decode_only:
            mixed, states = step(q, k, v, self.decay, states)
        else:
            mixed, after = q.new_zeros(q.shape), []
            for request, (start, stop) in enumerate(pairwise(metadata.query_start_loc)):
                rows = slice(start, stop)
                mixed[rows], state = retain(q[rows], k[rows], v[rows], self.decay, states[request])
                after.append(state)
            states = torch.stack(after)
        cache.index_copy_(0, slots.after, states)
        return mixed


def step(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, decay: Decay, states: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """One token a request, by the recurrence itself. Shapes as for :func:`retain`, with a request in place of a token;
    states [requests, key/value heads, head_dim, head_dim]."""
    states = states * decay.log.exp()[:, None, None] + k.float()[..., None] * v.float()[..., None, :]
    grouped = q.float().unflatten(1, (states.shape[1], -1))
    return (grouped @ states).flatten(1, 2).to(q.dtype), states


def retain(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, decay: Decay, state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The new tokens of one request, in blocks of :data:`BLOCK` that are all computed at once.

    q [tokens, query heads, head_dim]; k, v [tokens, key/value heads, head_dim]; state: FP32 [key/value heads, head_dim,
    head_dim], before the first token. Returns what the queries read, like q, and the state after the last token.
    Products of queries are taken in their dtype, states in FP32. Zeros in front fill the first block.
    """
    tokens, kv_heads = q.shape[0], k.shape[1]
    factors = decay.factors(tokens, q.dtype)
    padding = -tokens % BLOCK
    keys, values = _blocks(k, padding), _blocks(v, padding)
    queries = _blocks(q, padding).unflatten(1, (kv_heads, -1))  # [blocks, kv heads, group, BLOCK, head_dim]
    shape = queries.shape

    scores = (queries.flatten(2, 3) @ keys.transpose(-1, -2)).view(*shape[:-1], BLOCK) * factors.within
    near = scores.flatten(2, 3) @ values

    added = (keys.float() * factors.to_end).transpose(-1, -2) @ values.float()  # what each block adds, at its end
    states = torch.einsum("hij,jhkv->ihkv", factors.carried, added) + factors.since_start * state
    far = (queries * factors.reading).flatten(2, 3) @ states[:-1].to(q.dtype)

    mixed = (near + far).view(shape).permute(0, 3, 1, 2, 4).reshape(-1, q.shape[1], shape[-1])
    return mixed[padding:], states[-1]


@dataclass(frozen=True)
class Factors:
    """Powers of the decays for a number of tokens, in ``blocks`` blocks.

    within [kv heads, 1, BLOCK, BLOCK]: from a key to a later query of its block, 0 to an earlier one. to_end [kv heads,
    BLOCK, 1]: from a key to its block's end. carried [kv heads, blocks + 1, blocks]: from the end of block j to the
    start of block i, or the end of all. since_start [blocks + 1, kv heads, 1, 1]: from the state before the tokens to
    there. reading [blocks, kv heads, 1, BLOCK, 1]: from the start of a block to a query of it.
    """

    within: torch.Tensor
    to_end: torch.Tensor
    carried: torch.Tensor
    since_start: torch.Tensor
    reading: torch.Tensor


class Decay(nn.Module):
    """The decays of this rank's key/value heads, FP32 [heads], each above 0 and at most 1; layers may share them."""

    log: torch.Tensor
    _KEPT = 8

    def __init__(self, decay: torch.Tensor) -> None:
        super().__init__()
        if not bool(((decay > 0) & (decay <= 1)).all()):
            raise ValueError(f"decays lie above 0 and at most at 1, got {decay.tolist()}")
        self.register_buffer("log", decay.double().log().float())
        self._factors: OrderedDict[tuple[int, torch.dtype, torch.device], Factors] = OrderedDict()

    def factors(self, tokens: int, dtype: torch.dtype) -> Factors:
        """Those of the last few numbers of tokens are kept: all layers and chunks ask for the same ones."""
        key = (tokens, dtype, self.log.device)
        if key not in self._factors:
            self._factors[key] = self._make(tokens, dtype)
            if len(self._factors) > self._KEPT:
                self._factors.popitem(last=False)
        return self._factors[key]

    def _make(self, tokens: int, dtype: torch.dtype) -> Factors:
        blocks, padding = -(-tokens // BLOCK), -tokens % BLOCK
        position = torch.arange(BLOCK, dtype=torch.float32, device=self.log.device)
        borders = torch.arange(blocks + 1, dtype=torch.float32, device=self.log.device) * BLOCK
        log = self.log[:, None, None]

        def power(steps: torch.Tensor) -> torch.Tensor:
            """[heads, *steps]; 0 for negative steps."""
            return torch.where(steps >= 0, (steps.clamp(min=0) * log).exp(), 0.0)

        # The first block begins behind the padding.
        starts = borders.clamp(min=padding)
        queries = (borders[:-1, None] + position + 1 - starts[:-1, None]).clamp(min=0)
        return Factors(
            within=power(position[:, None] - position)[:, None].to(dtype),
            to_end=power((BLOCK - 1 - position)[:, None]),
            carried=power(borders[:, None] - borders[1:]),
            since_start=power((starts - padding)[:, None]).transpose(0, 1)[..., None],
            reading=power(queries).transpose(0, 1)[:, :, None, :, None].to(dtype),
        )


def blocks_per_state(state_block: int, num_blocks: int, block_size: int) -> int:
    """Cache blocks that share a state's slot. Errors: as :meth:`~tpoverlap.model.decoder.Decoder.allocate_kv_cache`."""
    runs = state_block // block_size
    if state_block % block_size or num_blocks % runs:
        raise ConfigError(
            f"{num_blocks} blocks of {block_size} tokens cannot hold states of {state_block} tokens: give a block size "
            "that divides the state's, and a whole number of states"
        )
    return runs


def _blocks(x: torch.Tensor, padding: int) -> torch.Tensor:
    """[tokens, heads, head_dim] -> [blocks, heads, BLOCK, head_dim]."""
    return F.pad(x, (0, 0, 0, 0, padding, 0)).unflatten(0, (-1, BLOCK)).transpose(1, 2)
