"""The Triton kernels on CPU, under Triton's interpreter: bit for bit the torch path, for every tile."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from nvfp4_reference import random_weight

from tpoverlap.errors import UnsupportedError
from tpoverlap.quant.nvfp4 import dequantize

ROOT = Path(__file__).parents[2]


@pytest.mark.timeout(300)
def test_kernels_match_torch_under_the_interpreter() -> None:
    """In a process of its own: Triton reads TRITON_INTERPRET when it is imported."""
    environment = dict(os.environ, TRITON_INTERPRET="1", PYTHONPATH=f"{ROOT}{os.pathsep}{Path(__file__).parent}")
    command = [sys.executable, str(Path(__file__).parent / "interpreter_cases.py")]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.split() == ["interpreter", "cases", "passed:", "69"]


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="asks for what happens without the interpreter")
def test_triton_on_cpu_tensors_is_refused_without_the_interpreter() -> None:
    with pytest.raises(UnsupportedError, match="CUDA tensor"):
        dequantize(random_weight(2, 32, seed=1), torch.float16, backend="triton")
