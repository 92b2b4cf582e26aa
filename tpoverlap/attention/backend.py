"""What an attention backend is: facts of a call, reasons against it, and the call itself.

A backend is anything with the attributes of :class:`PrefillBackend` or :class:`DecodeBackend`; a module serves. It is
imported only when a selection considers it, and neither importing it nor asking for its reasons touches a device or
compiles.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

# One launch serves all query tokens of all requests, instead of one single-query problem a token.
PACKED_PREFILL = "packed_prefill"
# A row of the prefill has the same bits as the same row decoded alone: what speculative verification needs.
PACKED_MATCHES_DECODE = "packed_matches_decode"
CAPABILITIES = frozenset({PACKED_PREFILL, PACKED_MATCHES_DECODE})


@dataclass(frozen=True)
class PrefillRequest:
    """Facts of a paged prefill, or of a decode (max_query_len 1), known without touching a device.

    capability: compute capability of the query's own device, None on CPU. dtype: of the query. cache_dtype: of the
    paged cache, None: that of the query. max_query_len: most query tokens that one request brings. batch_invariant: a
    row's bits must not depend on what else is in the batch. needs_lse: the log-sum-exp is asked for. vector_rows: both
    caches can be loaded by 16 bytes (:func:`~tpoverlap.attention.arguments.vector_rows`).
    """

    capability: tuple[int, int] | None
    dtype: torch.dtype
    head_dim: int
    q_heads: int
    kv_heads: int
    block_size: int
    max_query_len: int
    cache_dtype: torch.dtype | None = None
    causal: bool = True
    sliding_window: int | None = None
    softcap: float | None = None
    alibi: bool = False
    sinks: bool = False
    batch_invariant: bool = False
    needs_lse: bool = False
    vector_rows: bool = True

    @property
    def paged_dtype(self) -> torch.dtype:
        """Element type of the cache."""
        return self.dtype if self.cache_dtype is None else self.cache_dtype


class PrefillBackend(Protocol):
    """One way to run :func:`tpoverlap.attention.paged_prefill`."""

    @property
    def name(self) -> str: ...

    @property
    def capabilities(self) -> frozenset[str]:
        """Which of :data:`CAPABILITIES` it has."""
        ...

    def rejection_reasons(self, request: PrefillRequest, *, forced: bool = False) -> tuple[str, ...]:
        """Why it does not serve ``request``, one sentence a failed condition; empty: it does.

        forced: the caller chose it by name, so conditions of preference (where it is the fastest) do not count, only
        those without which it cannot run.
        """
        ...

    def prepare_prefill(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        block_table: torch.Tensor,
        cu_seqlens_q: torch.Tensor,
        seq_lens: torch.Tensor,
        *,
        scale: float,
        sliding_window: int | None,
        softcap: float | None,
        num_splits: int | None,
        max_query_len: int,
        out: torch.Tensor,
        lse: torch.Tensor | None,
    ) -> PreparedPrefill:
        """A call for tensors of these shapes, strides, dtypes and device, whatever is in them and wherever they lie.

        The arguments have been checked. What the call need not do again each time is done here. max_query_len bounds
        the query tokens of every request from above.
        """
        ...


class PreparedPrefill(Protocol):
    """A prefill of one signature."""

    def __call__(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        block_table: torch.Tensor,
        cu_seqlens_q: torch.Tensor,
        seq_lens: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor | None,
    ) -> None:
        """Fill ``out`` (shape and dtype of q, any strides) and, unless None, ``lse`` (float32 [tokens, q_heads])."""
        ...


class DecodeBackend(Protocol):
    """One way to run :func:`tpoverlap.attention.paged_decode`."""

    @property
    def name(self) -> str: ...

    @property
    def capabilities(self) -> frozenset[str]: ...

    def rejection_reasons(self, request: PrefillRequest, *, forced: bool = False) -> tuple[str, ...]:
        """As of :class:`PrefillBackend`."""
        ...

    def prepare_decode(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        block_table: torch.Tensor,
        seq_lens: torch.Tensor,
        *,
        scale: float,
        sliding_window: int | None,
        softcap: float | None,
        num_splits: int,
        out: torch.Tensor,
        lse: torch.Tensor | None,
    ) -> PreparedDecode:
        """A call for tensors of these shapes, strides, dtypes and device, whatever is in them and wherever they lie.

        The arguments have been checked. What the call need not do again each time is done here.
        """
        ...


class PreparedDecode(Protocol):
    """A decode of one signature."""

    def __call__(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        block_table: torch.Tensor,
        seq_lens: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor | None,
        workspace: torch.Tensor | None,
    ) -> None:
        """Fill ``out`` and, unless None, ``lse``, as in a prefill."""
        ...


def prepared_by(paged_decode: Callable[..., None]) -> Callable[..., PreparedDecode]:
    """The ``prepare_decode`` of a decode that has nothing to prepare."""

    def prepare_decode(*_: torch.Tensor, out: torch.Tensor, lse: torch.Tensor | None, **options: Any) -> PreparedDecode:
        def decode(
            q: torch.Tensor,
            k_cache: torch.Tensor,
            v_cache: torch.Tensor,
            block_table: torch.Tensor,
            seq_lens: torch.Tensor,
            out: torch.Tensor,
            lse: torch.Tensor | None,
            workspace: torch.Tensor | None,
        ) -> None:
            paged_decode(q, k_cache, v_cache, block_table, seq_lens, out=out, lse=lse, workspace=workspace, **options)

        return decode

    return prepare_decode


def prefill_prepared_by(paged_prefill: Callable[..., None]) -> Callable[..., PreparedPrefill]:
    """The ``prepare_prefill`` of a prefill that has nothing to prepare."""

    def prepare_prefill(
        *_: torch.Tensor, out: torch.Tensor, lse: torch.Tensor | None, **options: Any
    ) -> PreparedPrefill:
        def prefill(
            q: torch.Tensor,
            k_cache: torch.Tensor,
            v_cache: torch.Tensor,
            block_table: torch.Tensor,
            cu_seqlens_q: torch.Tensor,
            seq_lens: torch.Tensor,
            out: torch.Tensor,
            lse: torch.Tensor | None,
        ) -> None:
            paged_prefill(q, k_cache, v_cache, block_table, cu_seqlens_q, seq_lens, out=out, lse=lse, **options)

        return prefill

    return prepare_prefill
