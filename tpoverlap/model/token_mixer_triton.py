# mypy: disable-error-code="no-untyped-def"
"""The token mixer's prefill in three Triton launches for a request: what its blocks add to the state, the states
between them, and what the queries read.

The algorithm is :func:`tpoverlap.model.token_mixer.retain`'s (RetNet, Sun et al. 2023, chunkwise form) with the head
norms before it and the gate behind it; as torch operators it is some fifty launches, whose host time a piece of a
thousand tokens cannot hide. Blocks begin at the request's first token.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from tpoverlap.cuda.triton_dispatch import on_device_of
from tpoverlap.cuda.triton_launch import FastLaunch

BLOCK = 64
"""Tokens whose scores are computed at once."""
_SLICE = 64
_SCAN = 1024


@triton.jit
def _rstd(x, D: tl.constexpr, eps):
    return 1.0 / tl.sqrt(tl.sum(x * x, axis=1) / D + eps)


@triton.jit(do_not_specialize=["tokens"])
def _added_kernel(
    k, v, weight, log_decay, added, tokens, eps, scale,
    k_token, k_head, v_token, v_head,
    D: tl.constexpr, BLOCK: tl.constexpr, SLICE: tl.constexpr,
):  # fmt: skip
    """added[block, head] = the sum of decay^(tokens behind i in the block) k_i v_i^T, rows of one slice of k."""
    block, head, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    i = block * BLOCK + tl.arange(0, BLOCK)
    d = tl.arange(0, D)
    s = part * SLICE + tl.arange(0, SLICE)
    inside = (i < tokens)[:, None]
    rows = i.to(tl.int64)[:, None]
    whole = tl.load(k + rows * k_token + head * k_head + d[None, :], mask=inside, other=0.0).to(tl.float32)
    rstd = _rstd(whole, D, eps)
    keys = tl.load(k + rows * k_token + head * k_head + s[None, :], mask=inside, other=0.0).to(tl.float32)
    keys = keys * rstd[:, None] * tl.load(weight + s).to(tl.float32)[None, :] * scale
    last = tl.minimum(tokens - block * BLOCK, BLOCK) - 1
    steps = last - tl.arange(0, BLOCK)
    keys = keys * tl.exp(steps.to(tl.float32) * tl.load(log_decay + head))[:, None]
    keys = tl.where(steps[:, None] >= 0, keys, 0.0)
    values = tl.load(v + rows * v_token + head * v_head + d[None, :], mask=inside, other=0.0).to(tl.float32)
    result = tl.dot(tl.trans(keys), values)
    at = (block.to(tl.int64) * tl.num_programs(1) + head) * D * D
    tl.store(added + at + s[:, None] * D + d[None, :], result)


@triton.jit(do_not_specialize=["tokens", "num_blocks", "request"])
def _scan_kernel(
    added, before_blocks, states, before, after, fresh, log_decay, tokens, num_blocks, request,
    D: tl.constexpr, BLOCK: tl.constexpr, SCAN: tl.constexpr,
):  # fmt: skip
    """before_blocks[block] = the state before it; the last one goes to the request's slot."""
    part, head = tl.program_id(0), tl.program_id(1)
    heads = tl.num_programs(1)
    e = part * SCAN + tl.arange(0, SCAN)
    size: tl.constexpr = D * D
    slot = tl.load(before + request) * heads + head
    state = tl.load(states + slot * size + e, mask=e < size, other=0.0)
    state = tl.where(tl.load(fresh + request).to(tl.int32) != 0, 0.0, state)
    log = tl.load(log_decay + head)
    before_blocks += head * size + e
    added += head * size + e
    for block in range(num_blocks):
        tl.store(before_blocks, state.to(before_blocks.dtype.element_ty), mask=e < size)
        count = tl.minimum(tokens - block * BLOCK, BLOCK).to(tl.float32)
        state = state * tl.exp(count * log) + tl.load(added, mask=e < size, other=0.0)
        before_blocks += heads * size
        added += heads * size
    tl.store(states + (tl.load(after + request) * heads + head) * size + e, state, mask=e < size)


@triton.jit(do_not_specialize=["tokens"])
def _read_kernel(
    gate, q, k, v, before_blocks, q_weight, k_weight, log_decay, out, tokens, eps, scale,
    q_token, q_head, k_token, k_head, v_token, v_head,
    GROUP: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, SLICE: tl.constexpr,
):  # fmt: skip
    """Queries of one block and head: products with the block's keys, and with the state before it."""
    block, head = tl.program_id(0), tl.program_id(1)
    kv_head, kv_heads = head // GROUP, tl.num_programs(1) // GROUP
    i = tl.arange(0, BLOCK)
    d = tl.arange(0, D)
    row = (block * BLOCK + i).to(tl.int64)[:, None]
    inside = (block * BLOCK + i < tokens)[:, None]
    dtype = out.dtype.element_ty
    queries = tl.load(q + row * q_token + head * q_head + d[None, :], mask=inside, other=0.0).to(tl.float32)
    q_rstd = _rstd(queries, D, eps)
    keys = tl.load(k + row * k_token + kv_head * k_head + d[None, :], mask=inside, other=0.0).to(tl.float32)
    k_rstd = _rstd(keys, D, eps)
    log = tl.load(log_decay + kv_head)
    reading = tl.exp((i + 1).to(tl.float32) * log)
    scores = tl.zeros((BLOCK, BLOCK), tl.float32)
    far = tl.zeros((BLOCK, D), tl.float32)
    state = before_blocks + (block.to(tl.int64) * kv_heads + kv_head) * D * D
    for part in range(D // SLICE):
        s = part * SLICE + tl.arange(0, SLICE)
        a = tl.load(q + row * q_token + head * q_head + s[None, :], mask=inside, other=0.0).to(tl.float32)
        a = a * q_rstd[:, None] * tl.load(q_weight + s).to(tl.float32)[None, :]
        b = tl.load(k + row * k_token + kv_head * k_head + s[None, :], mask=inside, other=0.0).to(tl.float32)
        b = b * k_rstd[:, None] * tl.load(k_weight + s).to(tl.float32)[None, :] * scale
        scores += tl.dot(a.to(dtype), tl.trans(b.to(dtype)))
        rows = tl.load(state + s[:, None] * D + d[None, :])
        far += tl.dot((a * reading[:, None]).to(dtype), rows)
    steps = i[:, None] - i[None, :]
    scores = tl.where(steps >= 0, scores * tl.exp(tl.maximum(steps, 0).to(tl.float32) * log), 0.0)
    values = tl.load(v + row * v_token + kv_head * v_head + d[None, :], mask=inside, other=0.0)
    mixed = far + tl.dot(scores.to(dtype), values)
    mixed = mixed * _rstd(mixed, D, eps)[:, None]
    opening = tl.load(gate + row * q_token + head * q_head + d[None, :], mask=inside, other=0.0).to(tl.float32)
    mixed = mixed / (1.0 + tl.exp(-opening))
    at = (row * tl.num_programs(1) + head) * D + d[None, :]
    tl.store(out + at, mixed.to(dtype), mask=inside)


def mix_prefill(
    gate: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    eps: float,
    log_decay: torch.Tensor,
    states: torch.Tensor,
    slots: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    request: int,
    out: torch.Tensor,
) -> None:
    """The new tokens of one request: norms, mixing, norm and gate; its state goes on in its slots.

    gate, q [tokens, query heads, head_dim] with equal strides; k, v [tokens, key/value heads, head_dim]; the last
    dimension is contiguous. q_weight, k_weight [head_dim]; keys are also scaled by head_dim^-0.5. log_decay: FP32
    [key/value heads]. states: FP32 [slots, key/value heads, head_dim, head_dim], contiguous. slots: slot before,
    slot after, and whether there is no state yet, of each request. out: contiguous, like q.
    """
    plan = _plan(q.shape, k.shape, q.stride(), k.stride(), v.stride(), q.dtype, q_weight.dtype, q.device, eps)
    added = q.new_empty(plan.states, dtype=torch.float32)
    before_blocks = q.new_empty(plan.states)
    tokens, blocks, kv_heads = plan.tokens, plan.states[0], plan.states[1]
    with on_device_of(q):
        plan.add(blocks, (k, v, k_weight, log_decay, added), plan.add_values, y=kv_heads, z=plan.slices)
        scanned = (added, before_blocks, states, *slots, log_decay)
        plan.scan(plan.scan_programs, scanned, (tokens, blocks, request), y=kv_heads)
        read = (gate, q, k, v, before_blocks, q_weight, k_weight, log_decay, out)
        plan.read(blocks, read, plan.read_values, y=plan.query_heads)


@dataclass(frozen=True, slots=True)
class _Plan:
    """The launches of one signature. states: shape of a state a block. values: the arguments that are no tensors."""

    add: FastLaunch
    scan: FastLaunch
    read: FastLaunch
    tokens: int
    query_heads: int
    states: tuple[int, int, int, int]
    slices: int
    scan_programs: int
    add_values: tuple[float, ...]
    read_values: tuple[float, ...]


@functools.lru_cache(1024)
def _plan(
    q_shape: torch.Size,
    k_shape: torch.Size,
    q_strides: tuple[int, ...],
    k_strides: tuple[int, ...],
    v_strides: tuple[int, ...],
    dtype: torch.dtype,
    weights: torch.dtype,
    device: torch.device,
    eps: float,
) -> _Plan:
    tokens, query_heads, dim = q_shape
    kv_heads = k_shape[1]
    strides = (*k_strides[:2], *v_strides[:2])
    scale = dim**-0.5
    add, scan, read = _launches(device, dtype, weights, dim, query_heads // kv_heads, (*q_strides[:2], *strides))
    return _Plan(
        add=add,
        scan=scan,
        read=read,
        tokens=tokens,
        query_heads=query_heads,
        states=(triton.cdiv(tokens, BLOCK), kv_heads, dim, dim),
        slices=dim // min(_SLICE, dim),
        scan_programs=triton.cdiv(dim * dim, _SCAN),
        add_values=(tokens, float(eps), scale, *strides),
        read_values=(tokens, float(eps), scale, *q_strides[:2], *strides),
    )


@functools.cache
def _launches(
    device: torch.device, dtype: torch.dtype, weights: torch.dtype, dim: int, group: int, strides: tuple[int, ...]
) -> tuple[FastLaunch, FastLaunch, FastLaunch]:
    """Those of one specialization: Triton looks at the strides' values."""
    sizes = {"D": dim, "BLOCK": BLOCK}
    tile = {**sizes, "SLICE": min(_SLICE, dim)}
    return (
        FastLaunch(_added_kernel, tile, num_warps=8, num_stages=1),
        FastLaunch(_scan_kernel, {**sizes, "SCAN": _SCAN}),
        FastLaunch(_read_kernel, {"GROUP": group, **tile}, num_warps=8, num_stages=1),
    )
