"""Failures while GPUs wait: streams are released, errors name the cause, contexts stay usable, reset works."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from gpu_group import make_group
from rank_harness import run_ranks, say, start_ranks

from tpoverlap.comm import GroupCoordinator
from tpoverlap.errors import (
    CollectiveAbortedError,
    CollectiveMismatchError,
    CollectiveTimeoutError,
    PeerLostError,
    TpOverlapError,
)

pytestmark = pytest.mark.gpu
SIZES = {"kernel": 1000, "copy_engine": 2_000_000}


def _captured(group: GroupCoordinator, x: torch.Tensor) -> Callable[[], None]:
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        group.all_reduce(x)
    return graph.replay


def _until_error(group: GroupCoordinator, launch: Callable[[], object], launches: int) -> TpOverlapError:
    """Queues launches behind a peer that never comes, then asks the group until it tells."""
    try:
        for _ in range(launches):
            launch()
        give_up = time.monotonic() + 40
        while time.monotonic() < give_up:
            group.check()
            time.sleep(0.005)
    except TpOverlapError as e:
        return e
    raise AssertionError("no error came")


def _still_works() -> None:
    torch.cuda.synchronize()
    a = torch.randn(512, 512, device="cuda", dtype=torch.float64)
    assert torch.allclose(a @ torch.eye(512, device="cuda", dtype=torch.float64), a)


def _killed(rank: int, mode: str, captured: bool, launches: int) -> tuple[str, str, float, float]:
    group = make_group()
    x = torch.ones(SIZES[mode], device="cuda")
    group.all_reduce(x)
    launch = _captured(group, x) if captured else lambda: group.all_reduce(x)
    launch()
    torch.cuda.synchronize()
    say()
    if rank == 1:
        time.sleep(60)
    error = _until_error(group, launch, launches)
    at = time.monotonic()
    _still_works()
    drained = time.monotonic()
    with pytest.raises(PeerLostError):
        group.reset()
    group.destroy()
    return type(error).__name__, str(error), at, drained


@pytest.mark.parametrize("captured", [False, True], ids=["eager", "captured"])
@pytest.mark.parametrize("mode", SIZES)
def test_a_killed_peer_releases_the_streams(mode: str, captured: bool) -> None:
    ranks = start_ranks(_killed, 2, mode, captured, 300, timeout_s=100)
    for rank in range(2):
        ranks.wait_for(rank)
    time.sleep(0.5)
    os.kill(ranks.pid(1), signal.SIGKILL)
    killed_at = time.monotonic()
    result = ranks.join()[0]
    assert result.exit_code == 0, result.trace
    name, text, at, drained = result.value
    assert name == "PeerLostError"
    assert "rank 1 died" in text
    assert at - killed_at < 2
    assert drained - killed_at < 2


def _many_launches(rank: int) -> tuple[float, float]:
    group = make_group()
    x = torch.ones(1000, device="cuda")
    group.all_reduce(x)
    torch.cuda.synchronize()
    say()
    if rank == 1:
        time.sleep(60)
    errors: list[TpOverlapError] = []
    noise = torch.ones(100, device="cuda")
    try:
        group.all_reduce(x)
        for _ in range(20_000):
            noise.add_(1)
        torch.cuda.synchronize()
        group.check()
    except TpOverlapError as e:
        errors.append(e)
    at = time.monotonic()
    assert isinstance(errors[0], PeerLostError)
    assert noise[0].item() == 20_001
    _still_works()
    group.destroy()
    return at, time.monotonic()


def test_twenty_thousand_launches_behind_a_dead_peer_drain() -> None:
    ranks = start_ranks(_many_launches, 2, timeout_s=100)
    for rank in range(2):
        ranks.wait_for(rank)
    time.sleep(1.0)
    os.kill(ranks.pid(1), signal.SIGKILL)
    killed_at = time.monotonic()
    result = ranks.join()[0]
    assert result.exit_code == 0, result.trace
    assert result.value[0] - killed_at < 2


def _mended(rank: int, what: str) -> list[float]:
    times = []
    for mode, count in SIZES.items():
        for captured in (False, True):
            group = make_group(timeout_s=2.0 if what == "timeout" else 30.0)
            x = torch.ones(count, device="cuda")
            launch = _captured(group, x) if captured else lambda g=group, x=x: g.all_reduce(x)
            launch()
            torch.cuda.synchronize()
            dist.barrier()
            started = time.monotonic()
            if rank == 0:
                if what == "abort":
                    threading.Timer(0.5, group.abort, ("enough",)).start()
                error = _until_error(group, launch, 5)
            else:
                # Comes only when the other has given up.
                time.sleep({"abort": 1.0, "timeout": 3.0}[what])
                with pytest.raises(TpOverlapError) as caught:
                    group.check()
                error = caught.value
            assert isinstance(error, {"abort": CollectiveAbortedError, "timeout": CollectiveTimeoutError}[what]), error
            times.append(time.monotonic() - started)
            _still_works()
            group.reset()
            for size in (1000, 2_000_000):
                for _ in range(3):
                    y = torch.full((size,), float(rank + 1), device="cuda")
                    assert torch.equal(group.all_reduce(y), torch.full_like(y, 3.0)), (mode, captured, size)
            launch()
            torch.cuda.synchronize()
            group.check()
            group.destroy()
    return times


@pytest.mark.parametrize("what", ["abort", "timeout"])
def test_abort_and_timeout_drain_and_reset_mends(what: str) -> None:
    times = run_ranks(_mended, 2, what, timeout_s=100)
    assert max(times[0]) < {"abort": 2.5, "timeout": 4.0}[what]


def _mismatch(rank: int) -> None:
    group = make_group()
    for a, b in [(1000, 1001), (2_000_000, 1_999_999), (1000, 2_000_000)]:
        x = torch.ones(a if rank else b, device="cuda")
        error = _until_error(group, lambda x=x: group.all_reduce(x), 3)
        assert isinstance(error, CollectiveMismatchError), error
        assert str(error).count("calls all_reduce") == 2
        _still_works()
        group.reset()
        y = torch.ones(2_000_000, device="cuda")
        assert torch.equal(group.all_reduce(y), y * 2)
        assert torch.equal(group.all_reduce(y[:10]), y[:10] * 2)
    group.destroy()


def test_different_sizes_are_a_mismatch_on_both_ranks() -> None:
    run_ranks(_mismatch, 2, timeout_s=100)
