"""What the model's launches are given: arguments that are specialized alike, whatever is called, and programs for all
rows. Tensors without memory stand for those of any size."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType

import pytest
import torch
from recorded_launch import Call, RecordedLaunch

pytest.importorskip("triton")

from tpoverlap.model import fused, token_mixer_triton

Calls = dict[RecordedLaunch, list[Call]]
HALF = torch.float16


def cached(module: ModuleType) -> list[str]:
    return [name for name, value in vars(module).items() if hasattr(value, "cache_clear")]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[Calls]:
    monkeypatch.setattr(fused, "triton_serves", lambda x: True)
    monkeypatch.setattr(RecordedLaunch, "calls", {}, raising=False)
    modules = (fused, token_mixer_triton)
    for module in modules:
        monkeypatch.setattr(module, "FastLaunch", RecordedLaunch)
        for name in cached(module):
            getattr(module, name).cache_clear()
    yield RecordedLaunch.calls
    for module in modules:
        for name in cached(module):
            getattr(module, name).cache_clear()


def check_alike(calls: Calls, launches: int) -> None:
    """As many calls as there were, some of a launch that served before, each call of a launch like its first."""
    assert sum(len(some) for some in calls.values()) == launches
    assert any(len(some) > 1 for some in calls.values())
    for some in calls.values():
        assert len({call.kinds for call in some}) == 1


def of_any_stride(stride: int, *shape: int) -> torch.Tensor:
    """Rows ``stride`` apart."""
    inner = torch.empty(shape[1:], dtype=HALF, device="meta")
    return torch.empty(1, dtype=HALF, device="meta").as_strided(shape, (stride, *inner.stride()))


def test_norms(calls: Calls) -> None:
    made = 0
    for size in (1, 16, 300):
        weight = torch.empty(size, dtype=HALF, device="meta")
        for rows in (1, 2, 17, 2**31 - 1):
            for stride in (size, 1, 512, 2**31 - 16, 2**31, 2**40):
                x, update = of_any_stride(stride, rows, size), of_any_stride(3 * size, rows, size)
                for eps in (1e-6, 1, 0, 1.0):
                    fused.rms_norm(x, weight, eps)
                    for pair in ((x, update), (update, x), (x, x)):
                        fused.add_rms_norm(*pair, weight, eps)
                    made += 4
        for heads in (1, 3):
            for tokens in (1, 5, 2**29):
                for stride in (heads * size, 1024, 2**33):
                    fused.rms_norm(of_any_stride(stride, tokens, heads, size), weight, 1e-6)
                    made += 1
    check_alike(calls, made)


@pytest.mark.parametrize("size", [1, 100, 256, 5120, 16_384])
def test_the_programs_of_a_norm_take_all_rows(calls: Calls, size: int) -> None:
    for rows in (1, 7, 8, 9, 1000, 2**31 - 1):
        calls.clear()
        fused.rms_norm(of_any_stride(size, rows, size), torch.empty(size, dtype=HALF, device="meta"), 1e-6)
        [(launch, [call])] = calls.items()
        each = launch.constants["ROWS"]
        assert launch.constants["BLOCK"] >= size
        assert (call.programs - 1) * each < rows <= call.programs * each
        assert call.programs <= 2**31 - 1
        assert call.values["rows"] == rows


def test_activations_and_gates(calls: Calls) -> None:
    made = 0
    for columns in (1, 16, 1500):
        for tokens in (1, 3, 2**31 - 1):
            for stride in (2 * columns, 4096, 2**31, 2**40):
                fused.silu_mul(of_any_stride(stride, tokens, 2 * columns))
                made += 1
    for heads, size in ((1, 1), (3, 40)):
        for tokens in (1, 7, 2**31 - 1):
            for stride in (heads * size, 4096, 2**33):
                one, other = (of_any_stride(s, tokens, heads, size) for s in (stride, 2 * heads * size))
                for pair in ((one, other), (other, one)):
                    fused.sigmoid_mul(*pair)
                made += 2
    check_alike(calls, made)


@pytest.mark.parametrize("shape", [(2**31, 4), (2**30, 2, 4), (5, 16_385), (2, 3, 4, 5), (4, 0)], ids=str)
def test_norms_that_no_grid_or_program_holds_are_left_to_the_operators(calls: Calls, shape: tuple[int, ...]) -> None:
    x = torch.empty(shape, dtype=HALF, device="meta")
    assert fused.rms_norm(x, torch.empty(shape[-1], dtype=HALF, device="meta"), 1e-6).shape == shape
    assert not calls


@pytest.mark.parametrize(("tokens", "columns"), [(2**31, 2), (1, 1024 * 65_535 + 1)])
def test_tokens_that_no_grid_holds_are_left_to_the_operators(calls: Calls, tokens: int, columns: int) -> None:
    assert fused.silu_mul(torch.empty(tokens, 2 * columns, dtype=HALF, device="meta")).shape == (tokens, columns)
    x = torch.empty(tokens, 1, columns, dtype=HALF, device="meta")
    assert fused.sigmoid_mul(x, x).shape == x.shape
    assert not calls


def test_the_token_mixer(calls: Calls) -> None:
    made = 0
    dim, states = 32, torch.empty(4, 2, 32, 32, device="meta")
    slots = (torch.empty(3, dtype=torch.int64, device="meta"),) * 2 + (torch.empty(3, dtype=bool, device="meta"),)
    weight, decay = torch.empty(dim, dtype=HALF, device="meta"), torch.empty(2, device="meta")
    for tokens in (1, 64, 65, 1000):
        for stride in (12 * dim, 16 * dim, 2**31):
            gate, q, k, v = of_any_stride(stride, tokens, 12, dim).split((4, 4, 2, 2), dim=1)
            for eps in (1e-6, 1):
                for request in (0, 1, 2):
                    out = torch.empty(q.shape, dtype=HALF, device="meta")
                    given = (gate, q, k, v, weight, weight, eps, decay, states, slots, request, out)
                    token_mixer_triton.mix_prefill(*given)
                    made += 3
    check_alike(calls, made)
    blocks = {call.programs for launch, some in calls.items() for call in some if "add" in launch.kernel.__name__}
    assert blocks == {2, 2 * 2, 2 * 16}
