"""Runs interpreted_token_mixer.py, under Triton's interpreter and on a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
from triton_interpreter import run_tests, skip_without_loops

CASES = Path(__file__).with_name("interpreted_token_mixer.py")


@pytest.mark.timeout(220)
def test_kernels_under_the_interpreter(tmp_path: Path) -> None:
    skip_without_loops(tmp_path)
    assert run_tests(CASES, timeout_s=200) == 6


@pytest.mark.gpu
def test_kernels_on_a_gpu() -> None:
    assert run_tests(CASES, interpret=False, timeout_s=200) == 12
