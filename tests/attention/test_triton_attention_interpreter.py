"""Runs interpreted_attention.py in its own process: Triton decides on its interpreter when kernels are imported."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from triton_loops import skip_without_loops

HERE = Path(__file__).parent


def _interpreter(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=HERE, env=environment, timeout=280, check=False)


@pytest.mark.timeout(300)
def test_kernels_under_the_interpreter(tmp_path):
    skip_without_loops(tmp_path)
    options = ["-q", "-x", "-p", "no:cacheprovider", "--durations=8", "-W", "ignore::RuntimeWarning"]
    done = _interpreter("-m", "pytest", *options, "interpreted_attention.py")
    assert done.returncode == 0, done.stdout + done.stderr
    assert int(re.findall(r"(\d+) passed", done.stdout)[-1]) == 62, done.stdout
