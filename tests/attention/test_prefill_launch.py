"""What a prepared prefill gives its launches: arguments that are specialized alike, and work that shapes bound."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from attention_cases import make_case
from prefill_part_cases import prefill_in_parts
from recorded_launch import Call, RecordedLaunch

pytest.importorskip("triton")

from tpoverlap.attention.triton import prefill as module
from tpoverlap.attention.triton.configs import PrefillTiles
from tpoverlap.attention.triton.gluon_available import hopper_prefill_available

TILES = PrefillTiles(32, 32, 4, 1, part_keys=64)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> dict[RecordedLaunch, list[Call]]:
    monkeypatch.setattr(module, "FastLaunch", RecordedLaunch)
    monkeypatch.setattr(module, "_plans", {})
    monkeypatch.setattr(RecordedLaunch, "calls", {}, raising=False)
    return RecordedLaunch.calls


@pytest.mark.parametrize("stages", [0, 2])
def test_every_call_of_a_launch_is_specialized_alike(calls, stages: int) -> None:
    """An int32 of the first call stays one: what is wider would be cut."""
    tiles = dataclasses.replace(TILES, specialized_stages=stages)
    for tokens in (1, 70):
        case = make_case(tokens, [(tokens, 90)])
        tables = [case.block_table, case.block_table.repeat(1, 9), case.block_table.t().contiguous().t()]
        tables.append(case.block_table.as_strided(case.block_table.shape, (2**40, 1)))
        for window in (None, 1, 37, 2**31 - 1, 2**31, 2**63, 2**70):
            for softcap in (None, 5, 5.0):
                for table in tables:
                    here = dataclasses.replace(case, block_table=table)
                    prefill_in_parts(here, tiles, sliding_window=window, softcap=softcap)
    assert any(len(made) > 1 for made in calls.values())
    specialized = bool(stages) and hopper_prefill_available()
    assert any("STAGES" in launch.constants for launch in calls) == specialized
    for made in calls.values():
        assert len({call.kinds for call in made}) == 1


@pytest.mark.parametrize(("tokens", "columns"), [(1, 1), (70, 5), (3000, 2000), (3000, 16000)])
@pytest.mark.parametrize("window", [None, 1, 500])
def test_programs_and_partial_results_are_bounded_by_shapes(
    calls, tokens: int, columns: int, window: int | None
) -> None:
    case = make_case(1, [(tokens, 40)], q_heads=6, kv_heads=2)
    wide = dataclasses.replace(case, block_table=case.block_table[:, :1].expand(1, columns))
    limit = 64 << 20
    prefill_in_parts(wide, TILES, sliding_window=window, max_partial_bytes=limit)
    launches = [made for launch, made in calls.items() if "merge" not in launch.kernel.__name__]
    merges = [made for launch, made in calls.items() if "merge" in launch.kernel.__name__]
    slabs = launches[0]
    # All tiles once, one after the other: tokens x 3 heads in tiles of 32 rows, one more for the request and one after.
    ends = [slab.values["first_tile"] + slab.values["tiles"] for slab in slabs]
    assert [0, *ends[:-1]] == [slab.values["first_tile"] for slab in slabs]
    assert ends[-1] == tokens * 3 // 32 + 2
    for slab in slabs:
        named = slab.values
        parts, slots = named["max_parts"], named["slots"]
        assert slab.programs == slots * named["tiles"] * 2
        assert 1 <= slots <= parts
        assert slab.programs <= max(2 * 12, 2 * named["tiles"])
        assert parts * 64 >= min(columns * 16, window + 32 + 32 if window else columns * 16)
        assert parts == 1 or named["tiles"] == 1 or 4 * 2 * named["tiles"] * parts * 32 * 66 <= limit
    assert bool(merges) == (slabs[0].values["max_parts"] > 1)
    if merges:
        assert [merge.programs for merge in merges[0]] == [2 * 2 * slab.values["tiles"] for slab in slabs]


def test_no_tokens_launch_nothing_and_take_no_memory(calls, monkeypatch: pytest.MonkeyPatch) -> None:
    case = make_case(1, [(0, 400)])
    taken = []
    new_empty = torch.Tensor.new_empty
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda *a, **k: taken.append(a[1]) or new_empty(*a, **k))
    prefill_in_parts(case, TILES)
    assert not calls
    assert sum(taken) <= 4


@pytest.mark.parametrize("stages", [0, 2])
@pytest.mark.parametrize("window", [2**31 - 1, 2**70])
def test_numbers_of_keys_and_positions_stay_int32(calls, window: int, stages: int) -> None:
    case = make_case(1, [(3, 0)])
    wide = dataclasses.replace(case, block_table=torch.zeros(1, 1, dtype=torch.int32).expand(1, 2**28))
    tiles = dataclasses.replace(TILES, part_keys=2**29, specialized_stages=stages)
    prefill_in_parts(wide, tiles, sliding_window=window)
    assert len(calls) == 2
    for call, *_ in calls.values():
        named = call.values
        keys = named["columns"] * 16
        assert keys == 2**30
        # The first position of the three tokens, which have no keys: rows that see nothing start at key 0, not past it.
        assert -3 + 1 - named["window"] >= -(2**31)
        assert named["window"] >= keys
