"""Worked cases: expected values that slow NumPy versions of the definitions gave (tests/data)."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

CASES = sorted((Path(__file__).parent / "data").glob("*.npz"))
Arrays = dict[str, torch.Tensor]


def _equal(got: torch.Tensor, expected: torch.Tensor) -> None:
    if got.dtype == torch.float8_e4m3fn:
        got = got.view(torch.uint8)
    torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True, check_dtype=False)


def _nvfp4(arrays: Arrays, meta: dict[str, Any]) -> Any:
    from tpoverlap.quant import nvfp4

    rows, half = arrays["codes"].shape
    return nvfp4.NVFP4Tensor(
        codes=arrays["codes"],
        scales=arrays["scales"].view(torch.float8_e4m3fn),
        global_scale=torch.tensor(meta["global_scale"], dtype=torch.float32, device=arrays["codes"].device),
        shape=(rows, 2 * half),
    )


def check_nvfp4(module: Any, arrays: Arrays, meta: dict[str, Any]) -> None:
    tensor = _nvfp4(arrays, meta)
    _equal(module.dequantize(tensor, torch.float32), arrays["expected_fp32"])
    _equal(module.dequantize(tensor, torch.float16), arrays["expected_fp16"])


def check_qpn2(module: Any, arrays: Arrays, meta: dict[str, Any]) -> None:
    packed = module.to_qpn2(_nvfp4(arrays, meta))
    _equal(packed.codes, arrays["expected_codes"])
    _equal(packed.scales, arrays["expected_scales"])
    back = module.from_qpn2(packed)
    _equal(back.codes, arrays["codes"])
    _equal(back.scales, arrays["scales"])


def check_split(module: Any, arrays: Arrays, meta: dict[str, Any]) -> None:
    for case in meta["cases"]:
        pieces = module.split_tokens(
            case["query_start_loc"], case["seq_lens"], cut=case["cut"], state_block=case["state_block"]
        )
        fields = ("token_range", "request_ids", "query_start_loc", "seq_lens")
        assert [{f: list(getattr(p, f)) for f in fields} for p in pieces] == case["expected"]


def check_attention(module: Any, arrays: Arrays, meta: dict[str, Any]) -> None:
    on_gpu = arrays["q"].is_cuda
    for dtype, tolerance in ((torch.float32, 2e-5), (torch.float16, 4e-3)) if on_gpu else ((torch.float32, 2e-5),):
        cache = (*(arrays[k].to(dtype) for k in ("q", "k_cache", "v_cache")), arrays["block_table"])
        results = [module.paged_prefill(*cache, arrays["cu_seqlens_q"], arrays["seq_lens"], return_lse=True)]
        if bool((arrays["cu_seqlens_q"].diff() == 1).all()):
            results.append(module.paged_decode(*cache, arrays["seq_lens"], return_lse=True))
        close = {"rtol": tolerance, "atol": tolerance, "check_dtype": False}
        for out, lse in results:
            torch.testing.assert_close(out, arrays["expected"], **close)
            torch.testing.assert_close(lse, arrays["expected_lse"], **close)


def check_qsa_metadata(module: Any, arrays: Arrays, meta: dict[str, Any]) -> None:
    sizes = ("num_tokens", "storage_block_size", "compress_ratio", "circular_buffer_size", "max_k_work")
    got = module.build_metadata(
        *(arrays[k] for k in ("query_start_loc", "seq_lens", "slot_mapping", "block_table")),
        **{k: meta[k] for k in sizes},
    )
    fields = ["token_to_req", "logical_positions", "visible_blocks", "slot_mapping"]
    for field in fields + (["k_work"] if meta["max_k_work"] else []):
        _equal(getattr(got, field), arrays[f"expected_{field}"])


def check_qsa_select(module: Any, arrays: Arrays, meta: dict[str, Any]) -> None:
    inputs = [arrays[k] for k in ("q", "key_cache", "block_table", "token_to_req", "logical_positions", "seq_lens")]
    for segments in (False, True, "auto"):
        got = module.select_tokens(
            *inputs, compress_ratio=meta["compress_ratio"], top_k=meta["top_k"], request_segments=segments
        )
        _equal(got, arrays["expected"])


def check_dsa(module: Any, arrays: Arrays, meta: dict[str, Any]) -> None:
    logits, ends, starts = arrays["logits"], arrays["row_ends"], arrays.get("row_starts")
    size, repeat = meta["block_size"], meta["row_repeat"]
    wide = logits.new_full((logits.shape[0], 2 * logits.shape[1]), 7.0)
    wide[:, ::2] = logits
    for x in (logits.clone(), wide[:, ::2]):
        _equal(module.block_scores(x, starts, ends, size, row_repeat=repeat), arrays["expected_scores"])
        candidates = module.select_candidate_blocks(x, starts, ends, meta["num_blocks"], size, row_repeat=repeat)
        _equal(candidates, arrays["expected_candidates"])
        module.apply_candidate_mask(x, starts, ends, arrays["expected_candidates"], size, row_repeat=repeat)
        _equal(x, arrays["expected_masked"])
    assert bool((wide[:, 1::2] == 7.0).all()), "columns between those of a strided view were written"


KINDS: dict[str, tuple[str, Callable[[Any, Arrays, dict[str, Any]], None]]] = {
    "nvfp4": ("tpoverlap.quant.nvfp4", check_nvfp4),
    "qpn2": ("tpoverlap.quant.nvfp4", check_qpn2),
    "split": ("tpoverlap.microbatch", check_split),
    "attention": ("tpoverlap.attention", check_attention),
    "qsa-metadata": ("tpoverlap.attention.qsa", check_qsa_metadata),
    "qsa-select": ("tpoverlap.attention.qsa", check_qsa_select),
    "dsa": ("tpoverlap.attention.dsa", check_dsa),
}


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("path", CASES, ids=lambda p: p.stem)
def test_worked_case(path: Path, device: str) -> None:
    with np.load(path) as f:
        meta = json.loads(str(f["meta"]))
        arrays = {k: torch.from_numpy(f[k]).to(device) for k in f.files if k != "meta"}
    module, check = KINDS[meta["kind"]]
    check(importlib.import_module(module), arrays, meta)
