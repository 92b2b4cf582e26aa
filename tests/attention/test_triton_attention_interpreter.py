"""Runs interpreted_attention.py."""

from __future__ import annotations

from pathlib import Path

import pytest
from triton_interpreter import run_tests, skip_without_loops


@pytest.mark.timeout(300)
def test_kernels_under_the_interpreter(tmp_path):
    skip_without_loops(tmp_path)
    assert run_tests(Path(__file__).with_name("interpreted_attention.py"), "-W", "ignore::RuntimeWarning") == 66
