"""What a prepared cache write gives its launches, and that no call is taken for one that was checked before it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from recorded_launch import Call, RecordedLaunch

pytest.importorskip("triton")

from tpoverlap.attention import allocate_kv_cache, write_kv
from tpoverlap.attention import kv_write as public
from tpoverlap.attention.triton import kv_write as module

HEADS, DIM, BLOCK_SIZE = 2, 16, 4
CPU = torch.device("cpu")


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[RecordedLaunch, list[Call]]]:
    monkeypatch.setattr(module, "FastLaunch", RecordedLaunch)
    monkeypatch.setattr(public, "triton_serves", lambda x: True)
    monkeypatch.setattr(public, "_prepared", {})
    monkeypatch.setattr(RecordedLaunch, "calls", {}, raising=False)
    module._launch.cache_clear()
    yield RecordedLaunch.calls
    module._launch.cache_clear()


def test_every_call_of_a_launch_is_specialized_alike(calls) -> None:
    """An int32 of the first call stays one: what is wider would be cut."""
    k_cache, v_cache = allocate_kv_cache(5, BLOCK_SIZE, HEADS, DIM, dtype=torch.float16, device=CPU)
    caches = [(k_cache, v_cache), (k_cache[:3], v_cache[:3])]
    caches += [(k_cache[:1].expand(blocks, -1, -1, -1),) * 2 for blocks in (1, 2**29 - 1, 2**29, 2**30)]
    caches.append((k_cache.transpose(1, 2).contiguous().transpose(1, 2), v_cache))
    made = 0
    for tokens in (1, 3, 70):
        fused = torch.zeros(tokens, 3 + 2 * HEADS, DIM, dtype=torch.float16)
        q, k, v = fused.split((3, HEADS, HEADS), dim=1)
        for keys, values in caches:
            for given in ((k, v), (k.contiguous(), v)):
                for slots in (torch.zeros(tokens, dtype=torch.int64), torch.zeros(2 * tokens, dtype=torch.int64)[::2]):
                    write_kv(*given, keys, values, slots)
                    for dtype in (torch.float16, torch.float32):
                        angles = torch.zeros(tokens, DIM // 2, dtype=dtype)
                        write_kv(*given, keys, values, slots, cos=angles, sin=angles)
                        write_kv(*given, keys, values, slots, q=q, cos=angles, sin=angles)
                    made += 5
    assert sum(len(some) for some in calls.values()) == made
    assert any(len(some) > 1 for some in calls.values())
    for some in calls.values():
        assert len({call.kinds for call in some}) == 1
    counts = {call.values["capacity"] for some in calls.values() for call in some}
    assert {2**31 - 4, 2**31} <= counts


def test_a_call_is_checked_although_one_like_it_was(calls) -> None:
    k_cache, v_cache = allocate_kv_cache(5, BLOCK_SIZE, HEADS, DIM, dtype=torch.float32, device=CPU)
    x, slots = torch.zeros(3, HEADS, DIM), torch.tensor([0, 1, 2])
    q, angles = torch.zeros(3, 6, DIM), torch.zeros(3, 4)
    right = {"k": x, "v": x, "k_cache": k_cache, "v_cache": v_cache, "slots": slots}
    rotary = {"q": q, "cos": angles, "sin": angles}
    wrong = [
        {"k": x.half()},
        {"v": x[:, :1]},
        {"v": x.to("meta")},
        {"k_cache": k_cache[:4]},
        {"v_cache": v_cache.half()},
        {"slots": slots.int()},
        {"slots": slots[:2]},
        {"q": q.half()},
        {"q": q[..., :8]},
        {"cos": angles[:2]},
        {"cos": angles.double()},
        {"cos": torch.zeros(3, 8)[:, ::2], "sin": torch.zeros(3, 8)[:, ::2]},
        {"sin": None},
        {"cos": None, "sin": None},
    ]
    for _ in range(2):
        write_kv(**right)
        write_kv(**right, **rotary)
        for change in wrong:
            with pytest.raises(ValueError):
                write_kv(**(right | rotary | change))
    assert sum(len(some) for some in calls.values()) == 4


def test_no_tokens_launch_nothing(calls) -> None:
    k_cache, v_cache = allocate_kv_cache(5, BLOCK_SIZE, HEADS, DIM, dtype=torch.float32, device=CPU)
    x = torch.zeros(0, HEADS, DIM)
    write_kv(x, x, k_cache, v_cache, torch.zeros(0, dtype=torch.int64))
    assert not calls
