"""Every condition of the Turing backend in a pair: the request that it serves, and the same with one thing changed."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from tpoverlap.attention import turing
from tpoverlap.attention.backend import PACKED_PREFILL, PrefillRequest

SERVED = PrefillRequest(
    capability=(7, 5), dtype=torch.float16, head_dim=256, q_heads=12, kv_heads=2, block_size=16, max_query_len=65
)


def reasons(forced: bool = False, **changes: object) -> tuple[str, ...]:
    return turing.rejection_reasons(dataclasses.replace(SERVED, **changes), forced=forced)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"block_size": 32},
        {"block_size": 64},
        {"cache_dtype": torch.float16},
        {"needs_lse": True},
        {"q_heads": 8, "kv_heads": 8},
        {"max_query_len": 100_000},
    ],
    ids=str,
)
def test_served(changes: dict[str, object]) -> None:
    assert reasons(**changes) == ()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"capability": None}, "needs a CUDA device"),
        ({"capability": (7, 0)}, "7.5 or newer, not 7.0"),
        ({"capability": (6, 1)}, "7.5 or newer, not 6.1"),
        ({"dtype": torch.bfloat16, "cache_dtype": torch.float16}, "query is float16, not bfloat16"),
        ({"dtype": torch.float32, "cache_dtype": torch.float16}, "query is float16, not float32"),
        ({"cache_dtype": torch.float8_e4m3fn}, "cache is float16, not float8_e4m3fn"),
        ({"cache_dtype": torch.bfloat16}, "cache is float16, not bfloat16"),
        ({"head_dim": 128}, "head_dim is 256, not 128"),
        ({"block_size": 8}, "16, 32 and 64, not 8"),
        ({"block_size": 48}, "16, 32 and 64, not 48"),
        ({"block_size": 128}, "16, 32 and 64, not 128"),
        ({"vector_rows": False}, "16-byte aligned"),
        ({"causal": False}, "causal only"),
        ({"sliding_window": 4096}, "no sliding window"),
        ({"softcap": 30.0}, "no softcap"),
        ({"alibi": True}, "no ALiBi"),
        ({"sinks": True}, "no attention sinks"),
        ({"batch_invariant": True}, "not batch invariant"),
    ],
    ids=lambda value: str(value),
)
def test_rejected_whether_preferred_or_forced(changes: dict[str, object], reason: str) -> None:
    assert reasons() == ()
    for forced in (False, True):
        (only,) = reasons(forced, **changes)
        assert reason in only


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"capability": (8, 0)}, "meant for compute capability 7.5, not 8.0"),
        ({"capability": (9, 0)}, "meant for compute capability 7.5, not 9.0"),
        ({"max_query_len": 64}, "no request brings 65 query tokens, 64 at most"),
    ],
    ids=str,
)
def test_preferences_do_not_bind_who_forces_it(changes: dict[str, object], reason: str) -> None:
    (only,) = reasons(**changes)
    assert reason in only
    assert reasons(forced=True, **changes) == ()


def test_every_failed_condition_is_named() -> None:
    assert len(reasons(capability=(8, 6), head_dim=64, sinks=True, max_query_len=1)) == 4


def test_the_least_query_length_is_the_callers_choice() -> None:
    short = dataclasses.replace(SERVED, max_query_len=1)
    assert turing.rejection_reasons(short, min_query_len=0) == ()
    assert turing.rejection_reasons(short, min_query_len=2)


def test_it_packs() -> None:
    assert turing.name == "turing"
    assert turing.capabilities == {PACKED_PREFILL}


def test_asking_compiles_nothing_and_touches_no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    from tpoverlap.attention.turing import launch

    for name in ("compile_cuda", "device_facts", "Kernel"):
        monkeypatch.setattr(launch, name, None)
    assert reasons() == ()
