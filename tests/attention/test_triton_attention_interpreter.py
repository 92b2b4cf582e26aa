"""Runs interpreted_attention.py in its own process: Triton decides on its interpreter when kernels are imported."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
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


def _interpreter(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=HERE, env=environment, timeout=280, check=False)


@pytest.mark.timeout(300)
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
def test_kernels_under_the_interpreter(tmp_path):
    probe = tmp_path / "probe.py"
    probe.write_text(PROBE)
    if _interpreter(str(probe)).returncode:
        pytest.skip("this Triton's interpreter does not run loops of data-dependent length (3.6 with NumPy 2.4)")
    options = ["-q", "-x", "-p", "no:cacheprovider", "--durations=8", "-W", "ignore::RuntimeWarning"]
    done = _interpreter("-m", "pytest", *options, "interpreted_attention.py")
    assert done.returncode == 0, done.stdout + done.stderr
    assert int(re.findall(r"(\d+) passed", done.stdout)[-1]) == 58, done.stdout
