"""What a prepared decode gives its launches: arguments that are specialized alike, whatever is called."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from attention_cases import Case, make_case
from hypothesis import given
from hypothesis import strategies as st
from recorded_launch import Call, RecordedLaunch

pytest.importorskip("triton")

from tpoverlap.attention.triton import decode as module
from tpoverlap.attention.triton.configs import DecodeTiles, most_parts

RING = DecodeTiles(16, 64, 1, 3, ring_stages=3, few_ring_stages=6)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> dict[RecordedLaunch, list[Call]]:
    monkeypatch.setattr(module, "FastLaunch", RecordedLaunch)
    monkeypatch.setattr(module, "_plans", {})
    monkeypatch.setattr(RecordedLaunch, "calls", {}, raising=False)
    return RecordedLaunch.calls


def test_every_call_of_a_launch_is_specialized_alike(calls) -> None:
    """An int32 of the first call stays one: what is wider would be cut."""
    for rows in (1, 3):
        case = make_case(rows, [(1, 40 + row) for row in range(rows)])
        tables = [case.block_table, case.block_table.repeat(1, 2), case.block_table.t().contiguous().t()]
        if rows == 1:
            tables.append(case.block_table.as_strided(case.block_table.shape, (2**40, 1)))
        for window in (None, 1, 37, 2**31 - 1, 2**31, 2**63, 2**70):
            for softcap in (None, 5, 5.0):
                for table in tables:
                    for merge in (False, True):
                        out, lse = torch.empty_like(case.q), case.q.new_empty(case.q.shape[:2])
                        module.decode_rows(
                            *case.decode[:3],
                            table,
                            None,
                            case.seq_lens,
                            scale=0.125,
                            sliding_window=window,
                            softcap=softcap,
                            num_splits=4,
                            out=out,
                            lse=lse,
                            workspace=None,
                            merge_in_launch=merge,
                            first_row=0,
                            rows=rows,
                        )
    assert any(len(made) > 1 for made in calls.values())
    for made in calls.values():
        assert len({call.kinds for call in made}) == 1


def test_numbers_of_keys_stay_int32(calls) -> None:
    case = make_case(1, [(1, 40)])
    table = torch.zeros(1, 1, dtype=torch.int32).expand(1, 2**28)
    out = torch.empty_like(case.q)
    options = {"scale": 0.125, "sliding_window": None, "softcap": None, "num_splits": 4, "out": out, "lse": None}
    module.prepare_decode(*case.decode[:3], table, case.seq_lens, **options)(
        *case.decode[:3], table, case.seq_lens, out, None, None
    )
    assert [call.values["columns"] for made in calls.values() for call in made] == [2**26, 2**26]


@pytest.mark.parametrize(("blocks", "merged_in_launch"), [(4096, True), (4097, False)])
def test_long_rows_are_merged_by_a_second_launch(calls, blocks: int, merged_in_launch: bool) -> None:
    """4096 blocks of 16 keys, 2 heads of 64 in FP16: 32 MiB of keys and values."""
    case = make_case(1, [(1, 40)], q_heads=4, kv_heads=2, dtype=torch.float16)
    table = torch.zeros(1, blocks, dtype=torch.int32)
    out = torch.empty_like(case.q)
    options = {"scale": 0.125, "sliding_window": None, "softcap": None, "num_splits": 4, "out": out, "lse": None}
    decode = module.prepare_decode(*case.decode[:3], table, case.seq_lens, **options)
    for _ in range(2):
        decode(*case.decode[:3], table, case.seq_lens, out, None, None)
    assert [len(made) for made in calls.values()] == ([2] if merged_in_launch else [2, 2])


def test_a_decode_between_the_launches_of_another_has_other_partial_results(monkeypatch: pytest.MonkeyPatch) -> None:
    """As another thread's may, on the same stream: a launch lets go of Python's lock."""
    partials: list[int] = []
    between: list[Any] = []

    class Launch(RecordedLaunch):
        def __call__(self, programs: int, tensors: Sequence[torch.Tensor], values: tuple[Any, ...]) -> None:
            partials.append(tensors[self.names.index("partial")].data_ptr())
            if between:
                between.pop()()

    monkeypatch.setattr(module, "FastLaunch", Launch)
    monkeypatch.setattr(module, "_plans", {})
    case = make_case(1, [(1, 40)], q_heads=4, kv_heads=2, dtype=torch.float16)
    table = torch.zeros(1, 4097, dtype=torch.int32)
    out = torch.empty_like(case.q)
    options = {"scale": 0.125, "sliding_window": None, "softcap": None, "num_splits": 4, "out": out, "lse": None}
    decode = module.prepare_decode(*case.decode[:3], table, case.seq_lens, **options)
    between.append(lambda: decode(*case.decode[:3], table, case.seq_lens, out, None, None))
    decode(*case.decode[:3], table, case.seq_lens, out, None, None)
    outer, inner, inner_merge, outer_merge = partials
    assert outer == outer_merge
    assert inner == inner_merge
    assert inner != outer


def launch(case: Case, *, tiles: DecodeTiles, merge_in_launch: bool = False, **options: Any) -> None:
    options = {"sliding_window": None, "softcap": None, "num_splits": 16} | options
    module.decode_rows(
        *case.decode[:4],
        None,
        case.seq_lens,
        scale=0.125,
        out=torch.empty_like(case.q),
        lse=None,
        workspace=None,
        merge_in_launch=merge_in_launch,
        first_row=0,
        rows=len(case.q),
        tiles=tiles,
        **options,
    )


def stages_of(calls: dict[RecordedLaunch, list[Call]]) -> list[int | None]:
    """Of the decodes: None for the plain kernel."""
    decodes = [made for made in calls if "merge" not in made.kernel.__name__]
    return [made.constants.get("STAGES") for made in decodes for _ in calls[made]]


def test_few_programs_get_a_deeper_ring(calls) -> None:
    """A CPU counts as one multiprocessor: up to 3 programs are few."""
    shape = {"q_heads": 2, "kv_heads": 1, "dtype": torch.float16}
    launch(make_case(1, [(1, 40)], **shape), tiles=RING, num_splits=4)
    launch(make_case(1, [(1, 40)] * 2, **shape), tiles=RING, num_splits=4)
    assert stages_of(calls) == [6, 3]


@pytest.mark.parametrize(
    ("shape", "options"),
    [
        ({"q_heads": 9, "kv_heads": 1}, {}),
        ({"block_size": 24}, {}),
        ({"head_dim": 68}, {}),
        ({"layout": "strided"}, {}),
        ({}, {"sliding_window": 20}),
        ({}, {"softcap": 5.0}),
        ({}, {"merge_in_launch": True}),
        ({}, {"tiles": DecodeTiles(16, 64, 1, 3)}),
    ],
)
def test_what_the_ring_does_not_serve_goes_to_the_plain_kernel(calls, shape, options) -> None:
    launch(make_case(1, [(1, 40)], **{"dtype": torch.float16} | shape), **{"tiles": RING} | options)
    assert stages_of(calls) == [None]


@pytest.mark.parametrize("name", ["q", "k_cache", "v_cache"])
def test_rows_off_a_16_byte_boundary_go_to_the_plain_kernel(calls, name: str) -> None:
    case = make_case(1, [(1, 40)], dtype=torch.float16)
    aligned = getattr(case, name)
    storage = torch.empty(aligned.numel() + 1, dtype=aligned.dtype)
    moved = dataclasses.replace(case, **{name: storage[1:].view(aligned.shape).copy_(aligned)})
    for each in (case, moved):
        launch(each, tiles=RING)
    assert sorted(stages_of(calls), key=str) == [3, None]


@given(st.integers(1, 128), st.integers(0, 40_000), st.integers(0, 40_000), st.sampled_from([64, 128]))
def test_no_row_has_more_parts_than_the_grid(num_splits: int, keys: int, more: int, part_keys: int) -> None:
    """The cut as ``visible_range`` does it."""
    few = (num_splits + 1) // 2 if num_splits < 16 else 8
    part = max(min(-(-keys // few), 256), -(-keys // num_splits))
    part = -(-part // part_keys) * part_keys
    used = -(-keys // max(part, 1))
    assert used <= most_parts(num_splits, keys + more) <= num_splits


@pytest.mark.parametrize(
    ("keys", "window", "parts"), [(2048, None, 8), (2064, None, 9), (8192, None, 16), (8192, 1000, 8), (8192, 2200, 9)]
)
def test_splits_that_no_row_can_use_have_no_programs(calls, keys: int, window: int | None, parts: int) -> None:
    case = make_case(1, [(1, 40)] * 3, q_heads=4, kv_heads=2, dtype=torch.float16)
    table = torch.zeros(3, keys // 16, dtype=torch.int32)
    launch(dataclasses.replace(case, block_table=table), tiles=RING, sliding_window=window)
    programs = [c.programs for made, each in calls.items() if "merge" not in made.kernel.__name__ for c in each]
    assert programs == [3 * 2 * parts]
