"""What a prepared Turing prefill gives its kernels: for any tensors of its signature the argument made for them."""

from __future__ import annotations

import ctypes
import dataclasses
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from attention_cases import Case, make_case

from tpoverlap.attention import turing
from tpoverlap.attention.turing import launch
from tpoverlap.errors import UnsupportedError

REQUESTS = [(70, 90), (3, 400)]


class Recorder:
    """Kernels that keep what they are given, field by field; the last tensors' addresses are still valid then."""

    slots = 72

    def __init__(self) -> None:
        self.launches: list[tuple[tuple[int, int, int], dict[str, Any]]] = []

    def launch(self, grid: tuple[int, int, int], arguments: ctypes.Structure) -> None:
        fields = {field: getattr(arguments, field) for field, *_ in launch.Arguments._fields_}
        self.launches.append((grid, fields))


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> tuple[Recorder, Recorder]:
    made = Recorder(), Recorder()
    monkeypatch.setattr(launch, "_kernels", lambda ordinal: made)
    return made


def make(seed: int, requests: list[tuple[int, int]] = REQUESTS, **options: Any) -> Case:
    return make_case(seed, requests, q_heads=6, kv_heads=2, head_dim=256, dtype=torch.float16, **options)


def prepare(case: Case, out: torch.Tensor, lse: torch.Tensor | None, splits: int, scale: float = 0.1) -> launch.Prefill:
    options = {"scale": scale, "sliding_window": None, "softcap": None, "num_splits": splits, "max_query_len": 70}
    return turing.prepare_prefill(*case.prefill, **options, out=out, lse=lse)  # type: ignore[arg-type]


@pytest.mark.parametrize("with_lse", [False, True])
@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("scale", [0.1, -0.1, 0.0])
def test_later_tensors_get_the_argument_made_for_them(kernels, splits: int, scale: float, with_lse: bool) -> None:
    start = None
    for seed in (1, 2, 3):
        case = make(seed)
        out, lse = torch.empty_like(case.q), torch.empty(case.q.shape[:2]) if with_lse else None
        start = start or prepare(case, out, lse, splits, scale)
        assert start.template
        start(*case.prefill, out, lse)
        (grid, fields), rows = kernels[0].launches.pop(), case.q.shape[0] * 6
        partial = torch.empty(splits * rows * 257)
        made = launch.make_arguments(*case.prefill, out, lse, partial, splits=splits, scale=scale)
        wanted = {field: getattr(made, field) for field in fields}
        between = wanted.pop("partial_lse") - wanted.pop("partial_out")
        at_out, at_lse = fields.pop("partial_out"), fields.pop("partial_lse")
        assert fields == wanted
        assert grid == (*launch.launch_grid(case.q, case.k_cache, case.block_table), splits)
        if splits == 1:
            assert at_out is at_lse is None
            assert not kernels[1].launches
        else:
            assert at_lse - at_out == between
            merge_grid, merged = kernels[1].launches.pop()
            assert merge_grid == (math.ceil(rows / launch.MERGE_ROWS), 1, 1)
            assert merged == fields | {"partial_out": at_out, "partial_lse": at_lse}


def test_tensors_that_the_kernel_cannot_address_are_copied(kernels) -> None:
    case = make(1)
    out = torch.full_like(case.q, 7.0)
    start = prepare(case, out, None, 1)
    shape = case.q.shape
    odd = torch.empty(case.q.numel() + 1, dtype=torch.float16)[1:].view(shape)
    shifted = torch.empty(case.q.numel() + 2, dtype=torch.float16)[2:].view(shape)
    for q, target in ((odd, out), (case.q, shifted), (odd, shifted)):
        start(q, *case.prefill[1:], target, None)
        _, fields = kernels[0].launches.pop()
        assert (fields["q"] == q.data_ptr()) == (q is case.q)
        assert (fields["out"] == target.data_ptr()) == (target is out)
        assert fields["q"] % 4 == fields["out"] % 16 == 0
    across = torch.empty(shape[1], shape[0], shape[2] + 1, dtype=torch.float16).transpose(0, 1)[..., 1:]
    table = case.block_table.t().contiguous().t()
    lengths = case.seq_lens.repeat_interleave(2)[::2]
    for change in ({"q": across}, {"block_table": table}, {"seq_lens": lengths}):
        strided = dataclasses.replace(case, **change)
        start = prepare(strided, out, None, 1)
        assert not start.template
        start(*strided.prefill, out, None)
        _, fields = kernels[0].launches.pop()
        assert (fields["q"], fields["block_table"], fields["seq_lens"]) != (
            case.q.data_ptr(),
            case.block_table.data_ptr(),
            case.seq_lens.data_ptr(),
        )
        assert fields["q_token"] % 4 == 0
        assert fields["table_row"] == case.block_table.shape[1]


def test_caches_that_cannot_be_loaded_by_16_bytes_are_refused(kernels) -> None:
    case = make(1)
    out = torch.empty_like(case.q)
    start = prepare(case, out, None, 1)
    shape = case.k_cache.shape
    moved = torch.empty(case.k_cache.numel() + 4, dtype=torch.float16)[4:].view(shape)
    for name in ("k_cache", "v_cache"):
        wrong = dataclasses.replace(case, **{name: moved})
        with pytest.raises(UnsupportedError, match=f"head in {name} contiguous and 16-byte aligned"):
            start(*wrong.prefill, out, None)
        with pytest.raises(UnsupportedError, match="16-byte aligned"):
            prepare(wrong, out, None, 1)
    assert not kernels[0].launches


def test_no_rows_launch_nothing_and_too_many_splits_are_refused(kernels) -> None:
    case = make(1, [(0, 40)])
    prepare(case, torch.empty_like(case.q), None, 2)(*case.prefill, torch.empty_like(case.q), None)
    assert not kernels[0].launches
    with pytest.raises(ValueError, match=r"0 \(automatic\) to 64, got 65"):
        prepare(case, torch.empty_like(case.q), None, 65)


def test_splits_are_chosen_once_and_by_the_device(kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    case = make(1, [(300, 3000)])
    out = torch.empty_like(case.q)
    for slots in (4, 72):
        made = Recorder(), SimpleNamespace(launch=lambda *_: None)
        made[0].slots = slots
        monkeypatch.setattr(launch, "_kernels", lambda ordinal, made=made: made)
        start = prepare(case, out, None, 0)
        ctas = math.ceil(300 * 3 / launch.BLOCK_ROWS) * 2
        assert start.splits == turing.choose_num_splits(ctas, slots, case.block_table.shape[1] * 16 // 32)
        start(*case.prefill, out, None)
        assert made[0].launches[0][0][2] == start.splits
