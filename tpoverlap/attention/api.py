"""Paged attention over block tables: prefill of packed requests, and decode of one token a request."""

from __future__ import annotations

import dataclasses
from typing import Literal, overload

import torch

from tpoverlap.attention.arguments import (
    MAX_DECODE_SPLITS,
    check_count,
    check_options,
    check_tensors,
    output_like,
    vector_rows,
)
from tpoverlap.attention.backend import PACKED_PREFILL, PrefillBackend, PrefillRequest, PreparedDecode, PreparedPrefill
from tpoverlap.attention.prepared import keep
from tpoverlap.attention.selection import Selection, select_decode_backend, select_prefill_backend
from tpoverlap.cuda.triton_dispatch import capability_of


@overload
def paged_prefill(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    scale: float | None = ...,
    sliding_window: int | None = ...,
    softcap: float | None = ...,
    num_splits: int | None = ...,
    batch_invariant: bool = ...,
    backend: str = ...,
    out: torch.Tensor | None = ...,
    return_lse: Literal[False] = ...,
    max_query_len: int | None = ...,
) -> torch.Tensor: ...


@overload
def paged_prefill(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    scale: float | None = ...,
    sliding_window: int | None = ...,
    softcap: float | None = ...,
    num_splits: int | None = ...,
    batch_invariant: bool = ...,
    backend: str = ...,
    out: torch.Tensor | None = ...,
    return_lse: Literal[True],
    max_query_len: int | None = ...,
) -> tuple[torch.Tensor, torch.Tensor]: ...


def paged_prefill(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    scale: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    num_splits: int | None = None,
    batch_invariant: bool = False,
    backend: str = "auto",
    out: torch.Tensor | None = None,
    return_lse: bool = False,
    max_query_len: int | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Causal attention of packed query tokens over the paged keys and values of their requests.

    q [tokens, q_heads, head_dim], FP16, BF16 or FP32, any strides; request r owns rows cu_seqlens_q[r] to
    cu_seqlens_q[r + 1]. k_cache, v_cache [blocks, block_size, kv_heads, head_dim] of the same dtype, any strides,
    q_heads a multiple of kv_heads. block_table int32 [requests, max_blocks]: the blocks of each request in order;
    entries of blocks whose keys no row sees, after the last key or before every window, may hold anything, and so may
    such keys (before a window, and behind a library's backend, anything finite). cu_seqlens_q int32 [requests + 1],
    from 0. seq_lens int32 [requests]: keys of each request, the new tokens counted. Row i of the n of a request sees
    key j iff j <= seq_len - n + i (bottom-right aligned), and with ``sliding_window`` W only the last W of those. Rows
    that see no key (rows past cu_seqlens_q[-1] among them) give 0.

    scale: of the scores, default 1 / sqrt(head_dim). softcap: c tanh(score / c) in place of each scaled score.
    num_splits: parts that a backend with split-KV cuts each key range into; None or 0: its own choice.
    batch_invariant: a row's bits must not depend on the other requests. backend: ``"auto"`` or a name of
    ``PREFILL_BACKENDS``; "auto" asks for a packed prefill. out: takes the result. max_query_len: upper bound, in
    tokens, of what one request brings; given, a GPU's lengths need not be read back to choose a backend.

    Returns the output [tokens, q_heads, head_dim] in the dtype of q and, with ``return_lse``, the natural log-sum-exp
    of each row's scores, float32 [tokens, q_heads] (-inf where no key is seen). Inference only: no gradient is
    recorded.

    Raises ValueError for tensors or options that do not fit (on CPU also for lengths and block ids out of range; on
    GPUs a wrong id gives the keys of another block, never foreign memory), UnsupportedError where no backend serves,
    with each one's reasons.
    """
    signature = (
        q.shape,
        q.dtype,
        q.device,
        k_cache.shape,
        k_cache.dtype,
        k_cache.device,
        v_cache.shape,
        v_cache.dtype,
        v_cache.device,
        block_table.shape,
        block_table.dtype,
        block_table.device,
        cu_seqlens_q.shape,
        cu_seqlens_q.dtype,
        cu_seqlens_q.device,
        seq_lens.shape,
        seq_lens.dtype,
        seq_lens.device,
        q.stride(),
        k_cache.stride(),
        v_cache.stride(),
        block_table.stride(),
        cu_seqlens_q.stride(),
        seq_lens.stride(),
        # What vector_rows asks of the caches beside their strides.
        (k_cache.data_ptr() | v_cache.data_ptr()) & 15,
        None if out is None else (out.shape, out.dtype, out.device, out.stride()),
        scale,
        sliding_window,
        type(sliding_window),  # 1.0 and True equal 1, and are refused
        softcap,
        num_splits,
        type(num_splits),
        batch_invariant,
        return_lse,
        max_query_len,
        type(max_query_len),
        backend,
    )
    prefill = _prepared_prefills.get(signature)
    if prefill is None:
        prefill, always = _prepare_prefill(
            q,
            k_cache,
            v_cache,
            block_table,
            cu_seqlens_q,
            seq_lens,
            scale,
            sliding_window,
            softcap,
            num_splits,
            batch_invariant,
            return_lse,
            max_query_len,
            backend,
            out,
        )
        if always:
            keep(_prepared_prefills, signature, prefill)
    if out is None:
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
    lse = _lse_of(q) if return_lse else None
    prefill(q, k_cache, v_cache, block_table, cu_seqlens_q, seq_lens, out, lse)
    return out if lse is None else (out, lse)


@overload
def paged_decode(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    scale: float | None = ...,
    sliding_window: int | None = ...,
    softcap: float | None = ...,
    num_splits: int = ...,
    backend: str = ...,
    out: torch.Tensor | None = ...,
    workspace: torch.Tensor | None = ...,
    return_lse: Literal[False] = ...,
) -> torch.Tensor: ...


@overload
def paged_decode(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    scale: float | None = ...,
    sliding_window: int | None = ...,
    softcap: float | None = ...,
    num_splits: int = ...,
    backend: str = ...,
    out: torch.Tensor | None = ...,
    workspace: torch.Tensor | None = ...,
    return_lse: Literal[True],
) -> tuple[torch.Tensor, torch.Tensor]: ...


def paged_decode(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    scale: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    num_splits: int = 16,
    backend: str = "auto",
    out: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None,
    return_lse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention of one new token a request: :func:`paged_prefill` where every request brings one.

    q [requests, q_heads, head_dim]; row r sees the seq_lens[r] keys of request r, the new one counted. The other
    tensors, the options, results and errors are those of :func:`paged_prefill`.

    num_splits: 1 to 128 parts that each row's keys are cut into (Flash-Decoding). The parts depend on the row's own
    length and this number only, so a row has the same bits in every batch. workspace: float32 [>=
    decode_workspace_size(...)] for the partial results, 16-byte aligned; None: one that is kept for the stream, or the
    call's own.
    """
    signature = (
        q.shape,
        q.dtype,
        q.device,
        k_cache.shape,
        k_cache.dtype,
        k_cache.device,
        v_cache.shape,
        v_cache.dtype,
        v_cache.device,
        block_table.shape,
        block_table.dtype,
        block_table.device,
        seq_lens.shape,
        seq_lens.dtype,
        seq_lens.device,
        q.stride(),
        k_cache.stride(),
        v_cache.stride(),
        block_table.stride(),
        seq_lens.stride(),
        None if out is None else (out.shape, out.dtype, out.device, out.stride()),
        scale,
        sliding_window,
        type(sliding_window),  # 1.0 and True equal 1, and are refused
        softcap,
        num_splits,
        type(num_splits),
        return_lse,
        backend,
    )
    decode = _prepared_decodes.get(signature)
    if decode is None:
        decode = _prepare_decode(
            q,
            k_cache,
            v_cache,
            block_table,
            seq_lens,
            scale,
            sliding_window,
            softcap,
            num_splits,
            return_lse,
            backend,
            out,
        )
        keep(_prepared_decodes, signature, decode)
    if workspace is not None:
        _check_workspace(workspace, q, num_splits)
    if out is None:
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
    lse = _lse_of(q) if return_lse else None
    decode(q, k_cache, v_cache, block_table, seq_lens, out, lse, workspace)
    return out if lse is None else (out, lse)


def _lse_of(q: torch.Tensor) -> torch.Tensor:
    """As ``q.new_empty(q.shape[:2], dtype=torch.float32)`` in half the host time, which a short decode waits for."""
    tokens, heads, _ = q.shape
    return torch.empty_strided((tokens, heads), (heads, 1), dtype=torch.float32, device=q.device)


def decode_workspace_size(rows: int, q_heads: int, head_dim: int, num_splits: int = 16) -> int:
    """FP32 elements of a :func:`paged_decode` workspace: maximum, sum and accumulator of each row, head and part."""
    return rows * q_heads * num_splits * (head_dim + 2)


_prepared_decodes: dict[tuple[object, ...], PreparedDecode] = {}
_prepared_prefills: dict[tuple[object, ...], PreparedPrefill] = {}


def _prepare_prefill(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float | None,
    sliding_window: int | None,
    softcap: float | None,
    num_splits: int | None,
    batch_invariant: bool,
    return_lse: bool,
    max_query_len: int | None,
    backend: str,
    out: torch.Tensor | None,
) -> tuple[PreparedPrefill, bool]:
    """The call of a signature, and whether every call of that signature is this one."""
    check_tensors(q, k_cache, v_cache, block_table, seq_lens, cu_seqlens_q)
    scale = check_options(scale, sliding_window, softcap, q.shape[2])
    check_count("num_splits", 0 if num_splits is None else num_splits, 0)
    check_count("max_query_len", 0 if max_query_len is None else max_query_len, 0)
    most = q.shape[0] if max_query_len is None else max_query_len
    request = dataclasses.replace(
        _request(q, k_cache, most, sliding_window, softcap, batch_invariant, return_lse),
        vector_rows=vector_rows(k_cache) and vector_rows(v_cache),
    )
    required = (PACKED_PREFILL,) if backend == "auto" else ()
    selection, keep = _select_by_lengths(request, cu_seqlens_q, max_query_len is None, backend, required)
    prefill = selection.backend.prepare_prefill(
        q,
        k_cache,
        v_cache,
        block_table,
        cu_seqlens_q,
        seq_lens,
        scale=scale,
        sliding_window=sliding_window,
        softcap=softcap,
        num_splits=num_splits,
        max_query_len=most,
        out=output_like(q, out),
        lse=_lse_of(q) if return_lse else None,
    )
    return prefill, keep


def _prepare_decode(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float | None,
    sliding_window: int | None,
    softcap: float | None,
    num_splits: int,
    return_lse: bool,
    backend: str,
    out: torch.Tensor | None,
) -> PreparedDecode:
    check_tensors(q, k_cache, v_cache, block_table, seq_lens, None)
    scale = check_options(scale, sliding_window, softcap, q.shape[2])
    check_count("num_splits", num_splits, 1, MAX_DECODE_SPLITS)
    request = _request(q, k_cache, 1, sliding_window, softcap, True, return_lse)
    return select_decode_backend(request, backend=backend).backend.prepare_decode(
        q,
        k_cache,
        v_cache,
        block_table,
        seq_lens,
        scale=scale,
        sliding_window=sliding_window,
        softcap=softcap,
        num_splits=num_splits,
        out=output_like(q, out),
        lse=_lse_of(q) if return_lse else None,
    )


def _request(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    max_query_len: int,
    sliding_window: int | None,
    softcap: float | None,
    batch_invariant: bool,
    needs_lse: bool,
) -> PrefillRequest:
    return PrefillRequest(
        capability=capability_of(q) if q.is_cuda else None,
        dtype=q.dtype,
        head_dim=q.shape[2],
        q_heads=q.shape[1],
        kv_heads=k_cache.shape[2],
        block_size=k_cache.shape[1],
        max_query_len=max_query_len,
        cache_dtype=k_cache.dtype,
        sliding_window=sliding_window,
        softcap=softcap,
        batch_invariant=batch_invariant,
        needs_lse=needs_lse,
    )


def _select_by_lengths(
    most: PrefillRequest, cu_seqlens_q: torch.Tensor, lengths_decide: bool, backend: str, required: tuple[str, ...]
) -> tuple[Selection[PrefillBackend], bool]:
    """Select by the most query tokens that a request brings, and say whether the lengths' values had no part in it.

    ``most`` holds their upper bound. Without ``lengths_decide`` that one decides. Else lengths are read, which waits
    for a GPU, only where the bounds that shapes give would choose differently. Under capture the upper bound decides: a
    graph serves all lengths.
    """
    selection = select_prefill_backend(most, backend=backend, required=required)
    requests = cu_seqlens_q.shape[0] - 1
    if not lengths_decide or requests < 2:
        return selection, True
    least = dataclasses.replace(most, max_query_len=-(-most.max_query_len // requests))
    if select_prefill_backend(least, backend=backend, required=required).name == selection.name:
        return selection, True
    if not (cu_seqlens_q.is_cuda and torch.cuda.is_current_stream_capturing()):
        exact = dataclasses.replace(most, max_query_len=int(cu_seqlens_q.diff().amax()))
        selection = select_prefill_backend(exact, backend=backend, required=required)
    return selection, False


def _check_workspace(workspace: torch.Tensor, q: torch.Tensor, num_splits: int) -> None:
    needed = decode_workspace_size(q.shape[0], q.shape[1], q.shape[2], num_splits)
    if (
        workspace.dtype != torch.float32
        or workspace.device != q.device
        or not workspace.is_contiguous()
        or workspace.numel() < needed
        or workspace.data_ptr() % 16
    ):
        raise ValueError(
            f"workspace must be contiguous, 16-byte aligned float32 on {q.device} with at least {needed} elements, "
            f"got {workspace.dtype} {tuple(workspace.shape)} on {workspace.device}"
        )
