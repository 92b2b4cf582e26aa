"""Runs interpreted_prefill_parts.py."""

from __future__ import annotations

from pathlib import Path

import pytest
from triton_interpreter import run_tests, skip_without_loops


@pytest.mark.timeout(300)
def test_parts_under_the_interpreter(tmp_path):
    skip_without_loops(tmp_path)
    assert run_tests(Path(__file__).with_name("interpreted_prefill_parts.py"), "-W", "ignore::RuntimeWarning") == 14
