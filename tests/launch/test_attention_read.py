"""The floor of the decode benchmark reads every key and value, under Triton's interpreter."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch
from triton_interpreter import run_tests

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "launch"))

pytest.importorskip("triton")

from attention_problems import Problem, Shape
from attention_read import PlainRead

if os.environ.get("TRITON_INTERPRET") != "1":

    @pytest.mark.timeout(200)
    def test_reads_in_the_interpreter() -> None:
        assert run_tests(Path(__file__), timeout_s=180) == 3

else:

    @pytest.mark.parametrize("seed", [0, 1])
    def test_every_block_is_read(seed: int) -> None:
        gen = torch.Generator().manual_seed(seed)
        requests, keys, heads, dim, copies = 3, 256, 2, 64, 2
        columns = keys // 16
        storage = torch.randn(copies * requests * columns, 2, 16, heads, dim, generator=gen, dtype=torch.float16)
        tables = torch.randperm(len(storage), generator=gen).to(torch.int32).view(copies, requests, columns)
        lengths = torch.full((requests,), keys, dtype=torch.int32)
        q = torch.randn(requests, 4, dim, generator=gen, dtype=torch.float16)
        starts = torch.arange(requests + 1, dtype=torch.int32)
        shape = Shape(requests, 1, keys, 4, heads, dim)
        problem = Problem(shape, q, storage[:, 0], storage[:, 1], list(tables), starts, lengths)
        read = PlainRead(problem)
        read.check()
        for call in read.calls():
            call()
        read.check()
        before = read._sums.clone()
        storage[tables[0, 1, 3], 1, 5, 1, 7] += 100.0
        read.check()
        assert (before != read._sums).sum() == 1
        read._sums[1, 0, 1] += 1.0
        # What the kernel has not written is found.
        read._read = lambda table: None  # type: ignore[method-assign]
        with pytest.raises(RuntimeError, match="left out keys"):
            read.check()


def test_keys_that_are_no_whole_programs_are_refused() -> None:
    tensors = [torch.zeros(1, 16, 1, 64)] * 2
    problem = Problem(Shape(1, 1, 100, 1, 1, 64), torch.zeros(1, 1, 64), *tensors, [], torch.zeros(2), torch.zeros(1))
    with pytest.raises(ValueError, match="100"):
        PlainRead(problem)
