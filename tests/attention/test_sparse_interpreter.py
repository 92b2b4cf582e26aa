"""The Triton kernels of DSA and QSA under Triton's interpreter.

The interpreter is chosen when Triton is first imported, so the checks run in a process of their own: without
TRITON_INTERPRET this file holds one test, which runs the file again with it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from dsa_cases import check_case, random_case
from topk_cases import check_topk

pytest.importorskip("triton")

if os.environ.get("TRITON_INTERPRET") != "1":

    def test_kernels_in_the_interpreter():
        run = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", __file__],
            env=os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
            cwd=Path(__file__).parents[2],
            capture_output=True,
            text=True,
            timeout=110,
        )
        assert run.returncode == 0, run.stdout + run.stderr
        assert " passed" in run.stdout

else:

    @pytest.mark.parametrize("values", ["normal", "ties", "equal", "special", "descending"])
    @pytest.mark.parametrize(
        ("width", "k", "order", "skip_neg_inf"),
        [(40, 1, "score", False), (1500, 20, "score", True), (2600, 5, "index", False), (130, 100, "index", True)],
    )
    def test_topk(values, width, k, order, skip_neg_inf):
        check_topk(width + k, "cpu", rows=2, width=width, k=k, values=values, order=order, skip_neg_inf=skip_neg_inf)

    @pytest.mark.parametrize("values", ["normal", "ties", "special"])
    @pytest.mark.parametrize(
        ("rows", "width", "block_size", "row_repeat", "with_starts", "strided"),
        [
            (3, 73, 3, 1, True, True),
            (4, 97, 8, 4, True, False),
            (2, 2500, 16, 1, False, False),
            (3, 40, 1, 2, True, True),
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
