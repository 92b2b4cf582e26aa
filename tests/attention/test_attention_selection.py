"""Which backend is chosen, the reasons against the others, and the adapters of attention libraries."""

from __future__ import annotations

import dataclasses
import math
import sys
import types

import pytest
import torch
from attention_cases import make_case, solve

from tpoverlap.attention import (
    PREFILL_BACKENDS,
    PrefillRequest,
    api,
    flash_attn,
    flashinfer,
    library,
    paged_decode,
    paged_prefill,
    select_decode_backend,
    select_prefill_backend,
)
from tpoverlap.attention.arguments import vector_rows
from tpoverlap.attention.triton import common
from tpoverlap.errors import UnsupportedError

HOPPER = PrefillRequest(
    capability=(9, 0),
    dtype=torch.float16,
    head_dim=128,
    q_heads=12,
    kv_heads=2,
    block_size=16,
    max_query_len=2048,
)
TURING = dataclasses.replace(HOPPER, capability=(7, 5), head_dim=256)
CPU = dataclasses.replace(HOPPER, capability=None)


@pytest.fixture(autouse=True)
def _libraries_absent(monkeypatch):
    monkeypatch.setattr(library, "_installed", lambda module: False)
    monkeypatch.setattr(common, "triton_installed", lambda: True)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)


def test_the_per_row_prefill_is_the_default_and_the_packed_one_is_asked_for():
    default = select_prefill_backend(HOPPER)
    assert default.name == "triton_rows"
    assert default.capabilities == {"packed_matches_decode"}
    assert any("requiring packed_prefill" in reason for reason in default.rejections["triton"])
    packed = select_prefill_backend(HOPPER, required=("packed_prefill",))
    assert packed.name == "triton"
    assert packed.capabilities == {"packed_prefill"}
    assert set(packed.rejections) == {"turing"}
    assert select_prefill_backend(HOPPER) == default
    assert select_prefill_backend(HOPPER, required=("packed_matches_decode",)).name == "triton_rows"
    assert select_prefill_backend(HOPPER, backend="triton").name == "triton"


def test_turing_is_preferred_where_it_serves():
    assert select_prefill_backend(TURING, required=("packed_prefill",)).name == "turing"
    for change, reason in (
        ({"max_query_len": 64}, "65 query tokens"),
        ({"batch_invariant": True}, "batch invariant"),
        ({"softcap": 30.0}, "softcap"),
        ({"head_dim": 128}, "head_dim"),
        ({"vector_rows": False}, "16-byte aligned"),
        ({"capability": (8, 6)}, "capability 7.5"),
    ):
        selection = select_prefill_backend(dataclasses.replace(TURING, **change), required=("packed_prefill",))
        assert selection.name == "triton"
        assert any(reason in given for given in selection.rejections["turing"])


@pytest.mark.parametrize("cache", ["k_cache", "v_cache"])
@pytest.mark.parametrize(
    ("layout", "shift", "served"),
    [
        ("plain", 0, True),
        ("plain", 8, True),
        ("interleaved", 0, True),
        ("heads", 0, True),
        ("plain", 1, False),
        ("plain", 4, False),
        ("strided", 0, False),
    ],
)
def test_the_rows_of_both_caches_decide_whether_16_byte_loads_serve(monkeypatch, cache, layout, shift, served):
    """One cache of the layout, whose first row lies shift elements behind a 16-byte boundary."""
    case = make_case(4, [(70, 90)], dtype=torch.float16, layout=layout)
    good = make_case(4, [(70, 90)], dtype=torch.float16)
    mixed = dataclasses.replace(good, **{cache: _shifted(getattr(case, cache), shift)})
    asked = []

    def select(request, **options):
        asked.append(request.vector_rows)
        return select_prefill_backend(request, **options)

    monkeypatch.setattr(api, "select_prefill_backend", select)
    monkeypatch.setattr(api, "_prepared_prefills", {})
    paged_prefill(*mixed.prefill)
    assert asked == [served]


def _shifted(x, elements):
    """The same values and strides, in a new storage of which the first elements are unused."""
    storage = x.new_empty(elements + sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True)) + 1)
    return storage.as_strided(x.shape, x.stride(), elements).copy_(x)


@pytest.mark.parametrize(
    ("shape", "strides", "served"),
    [
        ((2, 16, 1, 256), (2**31 - 8, 256, 256, 1), True),
        ((2, 16, 1, 256), (2**31, 256, 256, 1), False),  # blocks 4 GiB apart
        ((1, 16, 1, 256), (2**31, 256, 3, 1), True),  # strides that nothing is reached by
        ((2, 16, 1, 256), (256, 2**31, 256, 1), False),
        ((2, 16, 2, 256), (8192, 512, 260, 1), False),
        ((2, 16, 2, 256), (8192, 1, 4096, 16), False),  # a row's elements are not adjacent
    ],
)
def test_strides_that_16_byte_loads_serve(shape, strides, served):
    assert vector_rows(torch.empty_strided(shape, strides, dtype=torch.float16, device="meta")) == served


def test_cpu_tensors_go_to_the_reference():
    selection = select_prefill_backend(CPU)
    assert selection.name == "reference"
    assert list(selection.rejections) == [name for name in PREFILL_BACKENDS if name != "reference"]
    assert all(selection.rejections.values())
    assert select_decode_backend(dataclasses.replace(CPU, max_query_len=1)).name == "reference"


def test_without_triton_a_library_serves_and_says_why_not(monkeypatch):
    monkeypatch.setattr(common, "triton_installed", lambda: False)
    assert select_prefill_backend(HOPPER).name == "reference"
    monkeypatch.setattr(library, "_installed", lambda module: True)
    wide = dataclasses.replace(HOPPER, block_size=256)
    assert select_prefill_backend(wide).name == "flash_attn"
    assert "multiples of 256" in select_prefill_backend(HOPPER).rejections["flash_attn"][0]
    assert any("choose it by name" in r for r in select_prefill_backend(HOPPER).rejections["flashinfer"])
    assert select_prefill_backend(HOPPER, backend="flashinfer").name == "flashinfer"


def test_what_nobody_serves_is_refused_with_every_reason():
    quantized = dataclasses.replace(HOPPER, cache_dtype=torch.float8_e4m3fn, alibi=True)
    with pytest.raises(UnsupportedError) as caught:
        select_prefill_backend(quantized)
    assert all(f"{name}: " in str(caught.value) for name in PREFILL_BACKENDS)
    with pytest.raises(UnsupportedError, match="ALiBi"):
        select_prefill_backend(quantized, backend="triton")
    with pytest.raises(UnsupportedError, match="BF16 needs compute capability"):
        select_prefill_backend(dataclasses.replace(TURING, dtype=torch.bfloat16), backend="triton")
    with pytest.raises(UnsupportedError, match="lacks packed_prefill"):
        select_prefill_backend(HOPPER, required=("packed_prefill", "packed_matches_decode"), backend="triton_rows")
    with pytest.raises(ValueError, match="unknown capabilities"):
        select_prefill_backend(HOPPER, required=("fast",))


def test_the_interpreter_makes_triton_available_on_cpu_but_not_in_bf16(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert select_decode_backend(CPU).name == "triton"
    assert select_decode_backend(dataclasses.replace(CPU, dtype=torch.bfloat16)).name == "reference"


def test_selecting_touches_no_device():
    select_prefill_backend(HOPPER, required=("packed_prefill",))
    assert not torch.cuda.is_initialized()


RAGGED = [(5, 700), (0, 3), (7, 3), (4, 0), (1, 513)]


def _gathered(case, keys_of, **options):
    """The definition, over a table that a library was given in its own form."""
    out, lse = solve(dataclasses.replace(case, block_table=keys_of), **options)
    return out.half(), lse.float()


def test_flash_attn_is_called_as_it_documents(monkeypatch):
    case = make_case(1, RAGGED, block_size=256, dtype=torch.float16)
    calls = []

    def flash_attn_varlen_func(q, k, v, cu_q, cu_k, max_q, max_k, **options):
        calls.append((max_q, max_k, options))
        assert cu_k.tolist() == [0, 700, 703, 706, 706, 1219]
        assert cu_k.dtype == torch.int32
        out, lse = _gathered(case, options["block_table"], scale=0.1, sliding_window=9)
        # It leaves rows without a key at 0 with log-sum-exp +inf.
        return out, lse.masked_fill(lse.isinf(), math.inf).t(), None

    module = types.ModuleType("flash_attn")
    module.flash_attn_varlen_func = flash_attn_varlen_func
    monkeypatch.setitem(sys.modules, "flash_attn", module)
    out, lse = torch.full_like(case.q, math.nan), torch.full(case.q.shape[:2], math.nan)
    flash_attn.paged_prefill(
        *case.prefill,
        scale=0.1,
        sliding_window=9,
        softcap=None,
        num_splits=None,
        max_query_len=7,
        out=out,
        lse=lse,
    )
    want = _gathered(case, case.block_table, scale=0.1, sliding_window=9)
    assert torch.equal(out, want[0])
    assert torch.equal(lse, want[1])
    assert calls[0][:2] == (7, case.block_table.shape[1] * 256)
    assert calls[0][2]["window_size"] == (8, 0)
    assert calls[0][2]["causal"]
    assert calls[0][2]["softcap"] == 0.0


def test_a_library_decodes_by_a_prefill_of_one_token_a_request(monkeypatch):
    case = make_case(6, [(1, 70), (1, 0), (1, 300)], block_size=256, dtype=torch.float16)
    calls = []

    def flash_attn_varlen_func(q, k, v, cu_q, cu_k, max_q, max_k, **options):
        calls.append((cu_q.tolist(), max_q))
        out, lse = _gathered(case, options["block_table"])
        return out, lse.t(), None

    module = types.ModuleType("flash_attn")
    module.flash_attn_varlen_func = flash_attn_varlen_func
    monkeypatch.setitem(sys.modules, "flash_attn", module)
    options = {"scale": 0.125, "sliding_window": None, "softcap": None, "num_splits": 16}
    out, lse = torch.full_like(case.q, math.nan), torch.full(case.q.shape[:2], math.nan)
    flash_attn.prepare_decode(*case.decode, out=out, lse=lse, **options)(*case.decode, out, lse, None)
    assert calls == [([0, 1, 2, 3], 1)]
    want = _gathered(case, case.block_table)
    assert torch.equal(out, want[0])
    assert torch.equal(lse, want[1])


def test_flashinfer_is_planned_and_run_as_it_documents(monkeypatch):
    case = make_case(2, RAGGED, block_size=16, dtype=torch.float16)
    padded_q = torch.cat([case.q, torch.full_like(case.q[:2], math.nan)])

    class Wrapper:
        def __init__(self, workspace, layout):
            assert layout == "NHD"
            assert workspace.dtype == torch.uint8

        def plan(self, qo_indptr, indptr, indices, last_page_len, q_heads, kv_heads, head_dim, page_size, **options):
            assert qo_indptr.tolist() == case.cu_seqlens_q.tolist()
            assert indptr.tolist() == [0, 44, 45, 46, 46, 79]
            assert last_page_len.tolist()[:3] == [12, 3, 3]
            assert last_page_len.tolist()[4] == 1
            assert (q_heads, kv_heads, head_dim, page_size) == (4, 2, 64, 16)
            assert options["causal"]
            assert options["window_left"] == -1
            assert options["logits_soft_cap"] == 5.0
            table = torch.full_like(case.block_table, -1)
            for r in range(5):
                pages = indices[indptr[r] : indptr[r + 1]]
                table[r, : len(pages)] = pages
            self.result = _gathered(case, table, scale=options["sm_scale"], softcap=5.0)

        def run(self, q, cache, return_lse):
            assert q.shape[0] == 17
            out, lse = self.result
            # Rows without a key come back as it happens; its log-sum-exp is in base 2.
            return out.masked_fill(lse.isinf()[..., None], 7.0), lse.masked_fill(lse.isinf(), -5e4) / math.log(2.0)

    module = types.ModuleType("flashinfer")
    module.BatchPrefillWithPagedKVCacheWrapper = Wrapper
    monkeypatch.setitem(sys.modules, "flashinfer", module)
    out, lse = torch.full_like(padded_q, math.nan), torch.full(padded_q.shape[:2], math.nan)
    flashinfer.paged_prefill(
        padded_q,
        *case.prefill[1:],
        scale=0.2,
        sliding_window=None,
        softcap=5.0,
        num_splits=None,
        max_query_len=7,
        out=out,
        lse=lse,
    )
    want = _gathered(case, case.block_table, scale=0.2, softcap=5.0)
    assert torch.equal(out[:17], want[0])
    torch.testing.assert_close(lse[:17], want[1], rtol=1e-6, atol=1e-6)
    assert (out[17:] == 0).all()
    assert (lse[17:] == -math.inf).all()


def test_flashinfer_is_given_no_block_outside_the_cache(monkeypatch):
    case = make_case(5, [(2, 70)], dtype=torch.float16)
    case.block_table[0, :3] = torch.tensor([-1, 2**31 - 1, 10**6])
    given = []

    class Wrapper:
        def __init__(self, workspace, layout):
            pass

        def plan(self, qo_indptr, indptr, indices, *rest, **options):
            given.extend(indices.tolist())

    module = types.ModuleType("flashinfer")
    module.BatchPrefillWithPagedKVCacheWrapper = Wrapper
    monkeypatch.setitem(sys.modules, "flashinfer", module)
    flashinfer.planned(*case.prefill, scale=0.1, sliding_window=20, softcap=None)
    last = case.k_cache.shape[0] - 1
    assert given == [0, last, last, *case.block_table[0, 3:5].tolist()]


def test_a_backend_that_cannot_run_is_refused_by_the_public_functions():
    case = make_case(3, [(1, 9)])
    with pytest.raises(UnsupportedError, match="CUDA"):
        paged_prefill(*case.prefill, backend="triton")
    with pytest.raises(UnsupportedError, match="CUDA"):
        paged_decode(*case.decode, backend="triton")
