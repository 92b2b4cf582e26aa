"""Runs interpreted_fused.py, under Triton's interpreter and on a GPU; and what a CPU without it computes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from triton_interpreter import run_tests

from tpoverlap.model import fused

CASES = Path(__file__).with_name("interpreted_fused.py")


@pytest.mark.timeout(220)
def test_kernels_under_the_interpreter() -> None:
    pytest.importorskip("triton")
    assert run_tests(CASES, timeout_s=200) == 48


@pytest.mark.gpu
def test_kernels_on_a_gpu() -> None:
    assert run_tests(CASES, interpret=False, timeout_s=200) == 71


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_cpu_tensors_have_the_operators_bits(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(4)
    x, update, gate = (torch.randn(5, 3, 10, generator=generator).to(dtype) for _ in range(3))
    weight = torch.randn(10, generator=generator).to(dtype)
    total, normed = fused.add_rms_norm(x, update, weight, 1e-6)
    assert torch.equal(total, x + update)
    assert torch.equal(normed, weight * F.rms_norm(x + update, (10,), eps=1e-6))
    assert torch.equal(fused.sigmoid_mul(x, gate), x * gate.sigmoid())
    assert torch.equal(fused.silu_mul(x[0]), F.silu(x[0, :, :5]) * x[0, :, 5:])


def test_a_compiled_model_traces_the_operators() -> None:
    def both(x: torch.Tensor) -> torch.Tensor:
        return fused.silu_mul(fused.add_rms_norm(x, x, x[0], 1e-6)[1])

    x = torch.randn(3, 8, generator=torch.Generator().manual_seed(1))
    compiled = torch.compile(both, backend="eager", fullgraph=True)
    assert torch.equal(compiled(x), both(x))
