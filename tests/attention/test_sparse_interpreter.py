"""The Triton kernels of DSA and QSA under Triton's interpreter.

The interpreter is chosen when Triton is first imported, so the checks run in a process of their own: without
TRITON_INTERPRET this file holds one test, which runs the file again with it.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from dsa_cases import check_case, random_case
from qsa_cases import check_metadata, exact_scores, loop_select, score_words, select_case
from qsa_layer import run_layer
from strided_views import spaced
from test_cases import CASES
from test_cases import test_worked_case as check_worked_case
from topk_cases import check_topk
from triton_interpreter import run_tests, skip_without_loops

from tpoverlap.attention import qsa

pytest.importorskip("triton")

if os.environ.get("TRITON_INTERPRET") != "1":

    @pytest.mark.timeout(300)
    def test_kernels_in_the_interpreter(tmp_path):
        skip_without_loops(tmp_path)
        assert run_tests(Path(__file__)) > 0

else:

    @pytest.mark.parametrize(
        ("values", "width", "k", "order", "skip_neg_inf"),
        [
            ("special", 40, 1, "score", False),
            ("special", 1500, 20, "score", True),
            ("normal", 2600, 20, "index", False),
            ("ties", 2600, 5, "index", False),
            ("equal", 2600, 5, "index", False),
            ("descending", 2600, 20, "index", False),
            ("special", 130, 100, "index", True),
        ],
    )
    def test_topk(values, width, k, order, skip_neg_inf):
        check_topk(width + k, "cpu", rows=2, width=width, k=k, values=values, order=order, skip_neg_inf=skip_neg_inf)

    @pytest.mark.parametrize(
        ("values", "rows", "width", "block_size", "row_repeat", "with_starts", "strided"),
        [
            ("special", 3, 73, 3, 1, True, True),
            ("ties", 4, 97, 8, 4, True, False),
            ("normal", 1, 2500, 16, 1, False, False),
        ],
    )
    def test_dsa(values, rows, width, block_size, row_repeat, with_starts, strided):
        case = random_case(
            rows * width,
            rows=rows,
            width=width,
            block_size=block_size,
            num_blocks=7,
            row_repeat=row_repeat,
            with_starts=with_starts,
            values=values,
        )
        check_case(case, "cpu", strided=strided, bounds_dtype=torch.int64 if strided else torch.int32)

    @pytest.mark.parametrize(
        "path",
        [p for p in CASES if p.stem.startswith("qsa-") or p.stem == "dsa-end-past-width"],
        ids=lambda path: path.stem,
    )
    def test_worked_cases(path):
        check_worked_case(path, "cpu")

    @pytest.mark.parametrize("seed", range(8))
    def test_qsa_metadata(seed):
        ring = 8 if seed % 3 == 0 else 0
        check_metadata(seed, "cpu", ratio=1 + seed, storage_block_size=4, ring=ring, extra_work=seed % 4 - 1)

    @pytest.mark.parametrize(
        ("heads", "segment", "keys"),
        [(4, 1, torch.float16), (4, 2, torch.float8_e4m3fn), (4, 4, torch.float16), (3, 1, torch.float8_e4m3fn)],
    )
    def test_qsa_scores(heads, segment, keys):
        case = select_case(7, [5, 1, 0, 3], [301, 40, 9, 3], heads=heads, holes=True, padding=2)
        args = list(case.args("cpu"))
        args[1] = args[1].to(keys)
        visible = torch.tensor(case.visible, dtype=torch.int32)
        out = torch.full((11, args[2].shape[1] * 8), 5.0)
        if segment == 1:
            qsa.score_paged(*args[:4], visible, out=out)
        else:
            qsa.score_request_segments(*args[:4], visible, max_segment=segment, out=out)
        for row, want in zip(out.tolist(), exact_scores(case), strict=True):
            assert row == want + [5.0] * (len(row) - len(want))

    def test_runs_longer_than_the_window_are_cut_alike():
        case = select_case(8, [70, 3], [72, 5])
        args = case.args("cpu")[:4]
        visible = torch.tensor(case.visible, dtype=torch.int32)
        paged = qsa.score_paged(*args, visible)
        segments = qsa.score_request_segments(*args, visible, max_segment=4)
        assert score_words(segments, case.visible) == score_words(paged, case.visible)

    @pytest.mark.parametrize(
        ("ratio", "top_k", "segments"), [(4, 6, "auto"), (3, 17, False), (1, 30, "auto"), (4, 6, False)]
    )
    def test_qsa_selection(ratio, top_k, segments):
        case = select_case(9, [3, 2, 1], [150, 40, 77], ratio=ratio, holes=ratio == 3, padding=1)
        q, keys, *indices = case.args("cpu")
        want = loop_select(case, top_k)
        out = torch.empty(len(want[0]), len(want), dtype=torch.int32).t()
        qsa.select_tokens(
            q,
            keys,
            *map(spaced, indices),
            compress_ratio=ratio,
            top_k=top_k,
            request_segments=segments,
            workspace_bytes=40_000,
            out=out,
        )
        assert out.tolist() == want

    @pytest.mark.parametrize("segments", [False, True])
    def test_padding_rows_may_name_no_request(segments):
        case = select_case(9, [3, 2], [150, 40], padding=3, padding_request=-1)
        first = torch.tensor([5, 6, 0, 1, 2, 3, 4, 7])
        q, keys, table, request, position, lens = case.args("cpu")
        got = qsa.select_tokens(
            q[first],
            keys,
            table,
            request[first],
            position[first],
            lens,
            compress_ratio=4,
            top_k=6,
            request_segments=segments,
        )
        want = loop_select(case, 6)
        assert got.tolist() == [want[i] for i in first.tolist()]

    @pytest.mark.parametrize(("cache_positions", "cache_dtype"), [(True, "auto"), (False, "fp8")])
    def test_qsa_layer(cache_positions, cache_dtype):
        run_layer(5, "cpu", cache_positions=cache_positions, cache_dtype=cache_dtype, steps=5)
