"""The fused kernels against torch operators. On CPU tensors under TRITON_INTERPRET=1, which test_fused.py sets; on a
GPU as they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tpoverlap.cuda.triton_available import triton_interpreted
from tpoverlap.model import fused

DEVICE = torch.device("cpu" if triton_interpreted() else "cuda")
# The interpreter cuts BF16 results off where GPUs round them.
DTYPES = [torch.float16, torch.float32] if triton_interpreted() else [torch.float16, torch.bfloat16, torch.float32]
EPS = 1e-6


@pytest.fixture(autouse=True)
def starts(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many programs each launch had."""
    programs: list[int] = []
    start = fused._Plan.start

    def counted(plan: fused._Plan, *given: Any) -> None:
        programs.append(plan.programs[0] * plan.programs[1])
        start(plan, *given)

    monkeypatch.setattr(fused._Plan, "start", counted)
    return programs


def draw(*shape: int, dtype: torch.dtype, seed: int, spread: float = 1.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator) * spread).to(DEVICE, dtype)


def check(got: torch.Tensor, operators: Callable[..., torch.Tensor], *given: torch.Tensor) -> None:
    """As close to the operators in FP64 as the dtype's roundings are, and nearly always the operators' own bits."""
    exact = operators(*(x.double() for x in given))
    same = operators(*given)
    eps = torch.finfo(got.dtype).eps
    assert got.shape == same.shape
    assert got.dtype == same.dtype
    assert got.is_contiguous()
    # A factor below the dtype's normal numbers is rounded to a multiple of the smallest of all.
    slack = torch.finfo(got.dtype).tiny * eps * max(1.0, *(float(x.abs().max()) for x in given))
    assert bool(((got.double() - exact).abs() <= 3 * eps * exact.abs() + slack).all())
    if got.dtype != torch.float32 and got.numel() > 100:
        assert (got == same).double().mean() > 0.97


def heads_of(tokens: int, before: int, heads: int, size: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Heads that lie behind others in a fused projection."""
    return draw(tokens, before + heads + 1, size, dtype=dtype, seed=seed)[:, before : before + heads]


def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return weight * F.rms_norm(x, x.shape[-1:], eps=EPS)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 5, 64, 130, 256, 5120])
def test_rms_norm_of_rows(size: int, dtype: torch.dtype, starts: list[int]) -> None:
    for tokens, seed in ((1, 1), (13, 2)):
        weight = draw(size, dtype=dtype, seed=seed)
        whole = draw(tokens, 2 * size + 3, dtype=dtype, seed=10 + seed, spread=3.0)
        for x in (whole[:, :size].contiguous(), whole[:, 3 : 3 + size], whole[:, ::2][:, :size].contiguous()):
            check(fused.rms_norm(x, weight, EPS), norm, x, weight)
    assert len(starts) == 6


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [16, 96, 128, 256])
def test_rms_norm_of_strided_heads(size: int, dtype: torch.dtype, starts: list[int]) -> None:
    for tokens, heads in ((1, 1), (3, 2), (17, 5)):
        x, weight = heads_of(tokens, 2, heads, size, dtype, tokens), draw(size, dtype=dtype, seed=heads)
        check(fused.rms_norm(x, weight, EPS), norm, x, weight)
        across = x.transpose(0, 1)
        check(fused.rms_norm(across, weight, EPS), norm, across, weight)
    assert len(starts) == 6


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [3, 64, 1000, 5120])
def test_add_rms_norm(size: int, dtype: torch.dtype, starts: list[int]) -> None:
    for tokens in (1, 14):
        x, update = draw(tokens, size, dtype=dtype, seed=tokens), draw(tokens, size + 1, dtype=dtype, seed=size)[:, 1:]
        weight = draw(size, dtype=dtype, seed=3)
        before = x.clone(), update.clone()
        total, normed = fused.add_rms_norm(x, update, weight, EPS)
        assert torch.equal(total, x + update)
        check(normed, norm, total, weight)
        assert torch.equal(x, before[0])
        assert torch.equal(update, before[1])
    assert len(starts) == 2


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", [1, 7, 1024, 1500])
def test_silu_mul(columns: int, dtype: torch.dtype, starts: list[int]) -> None:
    def operators(gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate) * up

    for tokens in (1, 5):
        whole = draw(tokens, 2 * columns + 5, dtype=dtype, seed=tokens + columns, spread=6.0)
        for x in (whole[:, : 2 * columns].contiguous(), whole[:, 5:]):
            check(fused.silu_mul(x), operators, x)
    assert len(starts) == 4


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "size"), [(1, 1), (3, 40), (6, 256)])
def test_sigmoid_mul(heads: int, size: int, dtype: torch.dtype, starts: list[int]) -> None:
    for tokens in (1, 9):
        gate = heads_of(tokens, 1, heads, size, dtype, tokens) * 6
        for x in (draw(tokens, heads, size, dtype=dtype, seed=5), heads_of(tokens, 0, heads, size, dtype, 6)):
            check(fused.sigmoid_mul(x, gate), lambda x, gate: x * gate.sigmoid(), x, gate)
    assert len(starts) == 4


@pytest.mark.parametrize("dtype", DTYPES)
def test_extreme_values_give_what_the_operators_give(dtype: torch.dtype) -> None:
    largest = torch.finfo(dtype).max
    values = [
        0.0,
        -0.0,
        1e-7,
        -1e-7,
        20.0,
        -20.0,
        88.0,
        -88.0,
        89.5,
        -89.5,
        104.0,
        -104.0,
        2e4,
        -2e4,
        largest,
        -largest,
    ]
    gate = torch.tensor([*values, float("inf"), float("-inf"), float("nan")], device=DEVICE).to(dtype)
    one = torch.ones_like(gate)
    got = fused.silu_mul(torch.cat([gate, one])[None])[0]
    tolerance = {"rtol": 3 * torch.finfo(dtype).eps, "atol": 3e-38 if dtype != torch.float16 else 1e-7}
    torch.testing.assert_close(got, F.silu(gate), equal_nan=True, **tolerance)
    got = fused.sigmoid_mul(one[None, None], gate[None, None])[0, 0]
    torch.testing.assert_close(got, gate.sigmoid(), equal_nan=True, **tolerance)
    for bad in (float("inf"), float("nan")):
        x = torch.tensor([[1.0, bad, 2.0], [1.0, 2.0, 3.0]], device=DEVICE).to(dtype)
        # By the definition: of an infinite square torch's own kernel makes NaN of the whole row, its operators zeros.
        wanted = (x.double() * (x.double().square().mean(-1, keepdim=True) + EPS).rsqrt()).to(dtype)
        torch.testing.assert_close(fused.rms_norm(x, one[:3], EPS), wanted, equal_nan=True, **tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_has_the_same_bits_in_any_batch(dtype: torch.dtype) -> None:
    x, update, weight = (draw(n, 200, dtype=dtype, seed=n) for n in (21, 22, 1))
    update, weight = update[:21], weight[0]
    total, normed = fused.add_rms_norm(x, update, weight, EPS)
    for row in (0, 7, 20):
        alone = fused.add_rms_norm(x[row : row + 1], update[row : row + 1], weight, EPS)
        assert torch.equal(alone[0], total[row : row + 1])
        assert torch.equal(alone[1], normed[row : row + 1])
        assert torch.equal(fused.rms_norm(total[row : row + 1], weight, EPS), alone[1])


def test_no_rows_launch_nothing(starts: list[int]) -> None:
    for shape in ((0, 64), (0, 3, 64), (4, 0, 64)):
        x = torch.zeros(shape, device=DEVICE)
        assert fused.rms_norm(x, torch.ones(64, device=DEVICE), EPS).shape == shape
    assert fused.silu_mul(torch.zeros(0, 64, device=DEVICE)).shape == (0, 32)
    assert set(starts) == {0}


def test_what_kernels_do_not_take_goes_to_the_operators(starts: list[int]) -> None:
    weight = draw(64, dtype=torch.float32, seed=1)
    x = draw(4, 64, dtype=torch.float32, seed=2)
    for given in (x[None, None], x.double(), draw(64, 4, dtype=torch.float32, seed=3).t(), x.clone().requires_grad_()):
        assert torch.equal(fused.rms_norm(given, weight.to(given.dtype), EPS), norm(given, weight.to(given.dtype)))
    assert torch.equal(fused.rms_norm(x, weight[:1], EPS), norm(x, weight[:1]))
    assert torch.equal(fused.rms_norm(x.half(), weight, EPS), norm(x.half(), weight))
    grown = x.clone().requires_grad_()
    (fused.silu_mul(grown).sum() + fused.sigmoid_mul(grown[None], grown[None]).sum()).backward()
    assert grown.grad is not None
    assert torch.equal(fused.add_rms_norm(x, x[:1], weight, EPS)[0], x + x[:1])
    assert len(starts) == 1  # the norm of that sum
    with pytest.raises(RuntimeError):
        fused.silu_mul(x)[0].reshape(3, 11)
    with pytest.raises(RuntimeError):
        fused.rms_norm(x, weight[:3], EPS)
