"""What the packed prefill is compared with: other kernels on the same problem, each checked before it is timed."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

import torch
import torch.nn.functional as F
from attention_problems import Problem
from torch.nn.attention import SDPBackend, sdpa_kernel

from tpoverlap.attention import flash_attn, flashinfer
from tpoverlap.attention.triton import rows

Call = Callable[[], torch.Tensor]


def sdpa_flash(problem: Problem) -> Call:
    """torch's FlashAttention-2 on gathered keys; its causal mask is bottom-right aligned. Gathering is not timed."""
    q, k, v = problem.dense()
    flash = torch.ops.aten._scaled_dot_product_flash_attention
    return lambda: _packed(flash(q, k, v, 0.0, True, False)[0])


def sdpa_cudnn(problem: Problem) -> Call:
    """cuDNN through torch on gathered keys; its causal mask is top-left aligned, so only whole prompts."""
    if problem.shape.n != problem.shape.keys:
        raise NotImplementedError("cuDNN's causal mask in torch is top-left aligned")
    q, k, v = problem.dense()

    def call() -> torch.Tensor:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return _packed(F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True))

    return call


def flex_paged(problem: Problem) -> Call:
    """FlexAttention over shuffled pages of 128 keys, with the block mask that torch's paged attention converts."""
    from torch.nn.attention.experimental._paged_attention import PagedAttention
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    shape = problem.shape
    if shape.requests != 1 or shape.keys % 128 or shape.n % 128:
        raise NotImplementedError("one request of whole pages of 128 tokens")
    q, k, v = problem.dense()
    pages = shape.keys // 128
    paged = PagedAttention(pages, 128, 1, device="cuda")
    # Pages are handed out from the end of this list.
    paged.empty_pages = torch.randperm(pages).tolist()
    first = torch.zeros(1, dtype=torch.int64, device="cuda")
    paged.reserve(first[0], torch.tensor(shape.keys, device="cuda"))
    k_cache, v_cache = torch.empty_like(k), torch.empty_like(v)
    paged.assign(first, torch.arange(shape.keys, device="cuda")[None], k, v, k_cache, v_cache)
    before = shape.keys - shape.n

    def causal(b: torch.Tensor, h: torch.Tensor, i: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
        return j <= i + before

    mask = create_block_mask(causal, 1, 1, shape.n, shape.keys, device="cuda", BLOCK_SIZE=(128, 128))
    mask = paged.convert_logical_block_mask(mask, first)
    compiled = torch.compile(flex_attention, dynamic=False)
    return lambda: _packed(compiled(q, k_cache, v_cache, block_mask=mask, enable_gqa=True))


def per_row(problem: Problem) -> Call:
    """One decode a prompt row, as many launches as the partial buffer asks for."""
    return _backend(problem, rows.paged_prefill)


def flash_attn_paged(problem: Problem) -> Call:
    if importlib.util.find_spec("flash_attn") is None:
        raise NotImplementedError("flash-attn is not installed")
    return _backend(problem, flash_attn.paged_prefill)


def flashinfer_paged(problem: Problem) -> Call:
    """FlashInfer's paged prefill, planned once outside the timing, as an engine plans once for all layers."""
    if importlib.util.find_spec("flashinfer") is None:
        raise NotImplementedError("flashinfer is not installed")
    run = flashinfer.planned(*problem.prefill(), scale=problem.shape.head_dim**-0.5, sliding_window=None, softcap=None)
    return lambda: run()[0]


def _backend(problem: Problem, paged_prefill: Callable[..., None]) -> Call:
    out = torch.empty_like(problem.q)

    def call() -> torch.Tensor:
        paged_prefill(
            *problem.prefill(),
            scale=problem.shape.head_dim**-0.5,
            sliding_window=None,
            softcap=None,
            num_splits=None,
            max_query_len=problem.shape.n,
            out=out,
            lse=None,
        )
        return out

    return call


def _packed(out: torch.Tensor) -> torch.Tensor:
    """[requests, heads, n, head_dim] as packed rows: a view."""
    return out.transpose(1, 2).flatten(0, 1)


PEERS: dict[str, Callable[[Problem], Call]] = {
    "SDPA flash": sdpa_flash,
    "SDPA cuDNN": sdpa_cudnn,
    "FlexAttention": flex_paged,
    "FlashInfer": flashinfer_paged,
    "FlashAttention": flash_attn_paged,
    "decode per row": per_row,
}
