"""The floor of the decode benchmark reads every key and value, in the interpreter."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

ROOT = Path(__file__).parents[2]
PROGRAM = """
import torch
from attention_problems import Problem, Shape
from attention_read import PlainRead

gen = torch.Generator().manual_seed({seed})
requests, keys, heads, dim, copies = 3, 256, 2, 64, 2
columns = keys // 16
storage = torch.randn(copies * requests * columns, 2, 16, heads, dim, generator=gen, dtype=torch.float16)
tables = torch.randperm(len(storage), generator=gen).to(torch.int32).view(copies, requests, columns)
lengths = torch.full((requests,), keys, dtype=torch.int32)
q = torch.randn(requests, 4, dim, generator=gen, dtype=torch.float16)
shape = Shape(requests, 1, keys, 4, heads, dim)
problem = Problem(shape, q, storage[:, 0], storage[:, 1], list(tables), torch.arange(requests + 1), lengths)
read = PlainRead(problem)
read.check()
for call in read.calls():
    call()
storage[tables[0, 1, 3], 1, 5, 1, 7] += 100.0
sums = read._sums.clone()
read.calls()[0]()
assert (sums != read._sums).any()
try:
    PlainRead(Problem(Shape(1, 1, 100, 4, heads, dim), *list(vars(problem).values())[1:]))
except ValueError as error:
    assert "100" in str(error)
else:
    raise AssertionError("100 keys were taken")
"""


@pytest.mark.parametrize("seed", [0, 1])
def test_every_block_is_read(seed: int) -> None:
    env = {"PYTHONPATH": f"{ROOT}:{ROOT / 'launch'}", "TRITON_INTERPRET": "1", "PATH": "/usr/bin:/bin"}
    command = [sys.executable, "-c", PROGRAM.format(seed=seed)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
