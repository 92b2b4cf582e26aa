"""Runs interpreted_token_mixer.py: in a process of its own under Triton's interpreter, and on a GPU."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from triton_loops import skip_without_loops

HERE = Path(__file__).parent


def _run(**environment: str) -> int:
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-o", "addopts="]
    done = subprocess.run(
        [*command, "interpreted_token_mixer.py"],
        capture_output=True,
        text=True,
        cwd=HERE,
        env=os.environ | environment,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return int(re.findall(r"(\d+) passed", done.stdout)[-1])


@pytest.mark.timeout(220)
def test_kernels_under_the_interpreter(tmp_path: Path) -> None:
    skip_without_loops(tmp_path)
    assert _run(TRITON_INTERPRET="1", OMP_NUM_THREADS="1") == 6


@pytest.mark.gpu
def test_kernels_on_a_gpu() -> None:
    assert _run(TRITON_INTERPRET="0") == 12
