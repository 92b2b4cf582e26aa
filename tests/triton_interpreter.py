"""Tests under Triton's interpreter: in a process of their own, since Triton decides on it when kernels are imported."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

PROBE = """
import torch, triton

@triton.jit
def loop(n, out):
    for i in range(0, triton.language.load(n)):
        triton.language.store(out + i, i)

out = torch.zeros(3, dtype=torch.int32)
loop[(1,)](torch.tensor([3], dtype=torch.int32), out)
assert out.tolist() == [0, 1, 2]
"""


def run_tests(path: Path, *options: str, interpret: bool = True, timeout_s: float = 280) -> int:
    """Runs a file of tests with the interpreter, or without; returns how many passed. AssertionError if one did not."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-o", "addopts=", *options]
    done = subprocess.run(
        [*command, str(path)],
        capture_output=True,
        text=True,
        cwd=path.parent,
        env=os.environ | {"TRITON_INTERPRET": str(int(interpret)), "OMP_NUM_THREADS": "1"},
        timeout=timeout_s,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return int(re.findall(r"(\d+) passed", done.stdout)[-1])


def skip_without_loops(folder: Path) -> None:
    """Skips a test that needs loops of loaded length. folder: for the probe; Triton reads a kernel's source file."""
    pytest.importorskip("triton")
    probe = folder / "probe.py"
    probe.write_text(PROBE)
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    if subprocess.run(
        [sys.executable, probe], capture_output=True, env=environment, timeout=100, check=False
    ).returncode:
        pytest.skip("this Triton's interpreter does not run loops of loaded length (3.6 with NumPy 2.4)")
