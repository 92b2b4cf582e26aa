"""Groups on simulated GPUs: what ranks lack, several groups on a device, numbers near their wrap, 2 to 8 ranks."""

from __future__ import annotations

import logging
import os
import random
import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rank_harness import run_ranks
from simulated_gpu import SimulatedGpu
from sums import expected_sum, inputs

from tpoverlap.comm import Call, GroupCoordinator, Reason, kernel_mode
from tpoverlap.comm.captured import CapturedCopyEngineProvider
from tpoverlap.comm.copy_engine import CopyEngineProvider
from tpoverlap.config import HostReduceConfig
from tpoverlap.cuda import stream_memory_ops
from tpoverlap.cuda.driver import driver
from tpoverlap.cuda.nvrtc import KernelCompileError
from tpoverlap.errors import CollectiveTimeoutError

SLOT = 64 << 10


def _works(gpu: SimulatedGpu, group: GroupCoordinator, seed: int = 0, size: int = 5000) -> None:
    parts = inputs(seed, group.world_size, (size,), torch.float32)
    with gpu.computing():
        result = group.all_reduce(parts[group.rank_in_group] * 1.0)
    torch.cuda.synchronize()
    group.check()
    assert torch.equal(result, expected_sum(parts)), (seed, size)


# What one rank lacks, no rank has


@contextmanager
def _without_nvrtc(gpu: SimulatedGpu) -> Iterator[None]:
    with _without_module("nvrtc"):
        yield


@contextmanager
def _without_cuda_python(gpu: SimulatedGpu) -> Iterator[None]:
    with _without_module("driver"):
        yield


@contextmanager
def _without_module(name: str) -> Iterator[None]:
    name = f"cuda.bindings.{name}"
    there = sys.modules[name]
    sys.modules[name] = None  # type: ignore[assignment]
    yield
    sys.modules[name] = there


@contextmanager
def _without_stream_memory_ops(gpu: SimulatedGpu) -> Iterator[None]:
    stream_memory_ops.stream_memory_ops_work.cache_clear()
    gpu.fails = lambda name: name == "cuStreamWriteValue32"
    yield
    gpu.fails = lambda name: False
    stream_memory_ops.stream_memory_ops_work.cache_clear()


@contextmanager
def _without_locked_memory(gpu: SimulatedGpu) -> Iterator[None]:
    gpu.fails = lambda name: name == "cuMemHostRegister"
    yield
    gpu.fails = lambda name: False


@contextmanager
def _without_a_kernel(gpu: SimulatedGpu) -> Iterator[None]:
    kernel_mode._kernel = _refuses  # type: ignore[assignment]
    yield
    kernel_mode._kernel = _compiles  # type: ignore[assignment]


def _refuses(dtype: str, ordinal: int) -> Any:
    raise KernelCompileError("planted")


def _compiles(dtype: str, ordinal: int) -> Any:
    return SimpleNamespace()


ALL = ("kernel", "copy_engine", "captured_copy_engine")
LACKING: dict[str, tuple[Callable[[SimulatedGpu], Any], tuple[str, ...], Reason, str]] = {
    "NVRTC": (_without_nvrtc, ALL[:1], Reason.NO_NVRTC, "no kernel mode: no_nvrtc"),
    "cuda-python": (_without_cuda_python, ALL, Reason.NO_CUDA_PYTHON, "no captured_copy_engine mode: no_cuda_python"),
    "stream memory operations": (
        _without_stream_memory_ops,
        ALL[1:],
        Reason.NO_STREAM_MEM_OPS,
        "no copy_engine mode: no_stream_mem_ops",
    ),
    "locked memory": (_without_locked_memory, ALL, Reason.CHANNEL_FAILED, "rank 1: cannot pin .* MiB .*ulimit -l"),
    "a kernel": (_without_a_kernel, ALL[:1], Reason.CHANNEL_FAILED, "no kernel mode: planted"),
}


class _Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.lines: list[str] = []
        logger = logging.getLogger("tpoverlap")
        logger.addHandler(self)
        logger.setLevel(logging.INFO)

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def _lacking(rank: int) -> dict[str, tuple[dict[str, Reason | None], list[str]]]:
    gpu = SimulatedGpu(rank, pause_s=0)
    gpu.has_nvrtc()
    driver()
    kernel_mode._kernel = _compiles  # type: ignore[assignment]
    kernel_mode.torch = SimpleNamespace(  # type: ignore[assignment]
        **{name: getattr(torch, name) for name in ("tensor", "inference_mode", "int32", "cuda")},
        zeros=lambda *size, dtype, device: torch.zeros(*size, dtype=dtype),
    )
    log = _Lines()
    found = {}
    gpu.group(max_bytes=1024).destroy()
    for name, (without, *_) in LACKING.items():
        log.lines.clear()
        if rank == 1:
            with without(gpu):
                group = gpu.group(max_bytes=1024)
        else:
            group = gpu.group(max_bytes=1024)
        found[name] = group.rejection_reasons(torch.ones(5)), list(log.lines)
        _works(gpu, group)
        group.destroy()
        # A probe that failed half-way keeps its page for good.
        assert len(gpu._pinned) == (rank == 1 and "stream memory operations" in found)
    return found


def test_what_one_rank_lacks_drops_out_of_the_chain_on_all_and_is_said_once() -> None:
    ranks = run_ranks(_lacking, 2)
    for name, (_, gone, reason, words) in LACKING.items():
        for reasons, lines in (found[name] for found in ranks):
            assert list(reasons) == [*ALL, "cpu", "torch"], name
            assert {p for p, r in reasons.items() if r is reason} == set(gone), name
            assert sum(re.search(words, line) is not None for line in lines) == 1, (name, lines)
            pinned = sum("has pinned the group's" in line for line in lines)
            assert pinned == (gone != ALL), name


def _peer_access(rank: int, case: str) -> dict[str, Reason | None]:
    gpu = SimulatedGpu(rank, pause_s=0)
    cuda: Any = torch.cuda
    cuda.device_count, cuda.current_device = lambda: 2, lambda: rank
    cuda.get_device_properties = lambda i: SimpleNamespace(uuid=i if isinstance(i, int) else rank)
    cuda._get_device_index = lambda device, optional=False: rank
    # On one rank alone something may stand in the way; all choose alike.
    cuda.can_device_access_peer = lambda own, other: (own, other) == (rank, 1 - rank) and (case, rank) != ("none", 1)
    if rank == 1:
        os.environ["NCCL_P2P_DISABLE"] = "1" if case == "disabled" else "0"
    group = gpu.group(peer_access="ignore" if case == "ignored" else "auto")
    reasons = group.rejection_reasons(torch.ones(5))
    _works(gpu, group)
    group.destroy()
    return reasons


@pytest.mark.parametrize("case", ["used", "none", "disabled", "ignored"])
def test_copy_engines_step_aside_where_all_gpus_reach_each_other(case: str) -> None:
    for reasons in run_ranks(_peer_access, 2, case):
        assert reasons["copy_engine"] is (Reason.PEER_ACCESS_AVAILABLE if case == "used" else None)


def _reasons(rank: int) -> None:
    gpu = SimulatedGpu(rank, pause_s=0)
    group = gpu.group(copy_engine_max_bytes=SLOT)
    chain = {p.name: p for p in group._providers}
    eager = Call("all_reduce", torch.float16, 1 << 20, "cuda")
    captured = eager._replace(capturing=True)
    for call, expected in [
        (eager, {"copy_engine": None, "captured_copy_engine": Reason.NOT_CAPTURING}),
        (captured, {"copy_engine": Reason.NOT_CAPTURABLE, "captured_copy_engine": None}),
        (eager._replace(dtype=torch.int32), dict.fromkeys(ALL[1:], Reason.DTYPE_UNSUPPORTED)),
        (eager._replace(dtype=torch.int32, operation="all_gather"), {"copy_engine": None}),
        (eager._replace(device_type="cpu"), dict.fromkeys(ALL[1:], Reason.DEVICE_UNSUPPORTED) | {"cpu": None}),
        (eager._replace(operation="broadcast"), dict.fromkeys(ALL[1:], Reason.OPERATION_UNSUPPORTED)),
        (captured._replace(operation="reduce_scatter"), {"captured_copy_engine": Reason.OPERATION_UNSUPPORTED}),
        (eager, {"cpu": Reason.DEVICE_UNSUPPORTED, "torch": None}),
    ]:
        assert {name: chain[name].rejection_reason(call) for name in expected} == expected, call
    group.destroy()


def test_every_reason_has_its_condition() -> None:
    run_ranks(_reasons, 2)


# Several groups


def _two_orders(rank: int) -> None:
    """The ranks call two groups in different orders, on one stream: each waits for the other's second call."""
    gpu = SimulatedGpu(rank)
    groups = [gpu.group(timeout_s=0.5), gpu.group(timeout_s=0.5)]
    for k in range(2):
        started = time.monotonic()
        with gpu.computing():
            for group in groups[:: 1 if rank == 0 else -1]:
                group.all_reduce(torch.ones(5000))
        torch.cuda.synchronize()
        assert time.monotonic() - started < 2.5
        dist.barrier()
        failed = [group for group in groups if group.failed]
        assert failed
        for group in failed:
            with pytest.raises(CollectiveTimeoutError, match=r"did not get on within 0.5 s"):
                group.check()
            group.reset()
        for group in groups:
            _works(gpu, group, k)
    for group in groups:
        group.destroy()


def test_groups_called_in_different_orders_are_a_timeout_and_reset_mends_it() -> None:
    run_ranks(_two_orders, 2)


def _sub_groups(rank: int) -> None:
    gpu = SimulatedGpu(rank)
    everyone = gpu.group(copy_engine_max_bytes=SLOT)
    config = HostReduceConfig(max_bytes=0, copy_engine_max_bytes=SLOT, peer_access="ignore", timeout_s=20.0)
    ranks = [[0, 2], [1, 3]][rank % 2]
    pair = GroupCoordinator(ranks, 0, "cuda:0", config, dist.new_group(ranks, use_local_synchronization=True))
    assert pair.rank_in_group == rank // 2
    streams = [gpu.default, gpu.new_stream()]
    rng = random.Random(1)
    for k in range(12):
        gpu.current = rng.choice(streams)
        _works(gpu, [pair, everyone][k % 2], k, rng.choice([1, 5000, 40_000]))
    dist.barrier()
    if rank == 1:
        pair.abort("one pair only")
    if rank % 2:
        pair.reset()
    _works(gpu, pair)
    _works(gpu, everyone)
    pair.destroy()
    everyone.destroy()


def test_sub_groups_with_a_process_group_of_their_own_share_a_device_with_the_whole() -> None:
    run_ranks(_sub_groups, 4)


# Numbers and ranks


def _near_the_wrap(rank: int, first_number: int) -> None:
    gpu = SimulatedGpu(rank, pause_s=50e-6)
    n = dist.get_world_size()
    group = gpu.group(copy_engine_max_bytes=SLOT)
    engine = next(p for p in group._providers if isinstance(p, CopyEngineProvider))
    engine.region._first_number = first_number
    for again in range(3):
        dist.barrier()
        group.abort("the reset sets the first number")
        group.reset()
        rng = random.Random(again)
        parts = [inputs(k, n, (rng.choice([1, 999, 60_000]),), torch.float16) for k in range(12)]
        with gpu.computing():
            results = [group.all_reduce(part[rank] * 1.0) for part in parts]
        torch.cuda.synchronize()
        group.check()
        for k, result in enumerate(results):
            assert torch.equal(result, expected_sum(parts[k])), k
    group.destroy()


@pytest.mark.parametrize(("n", "first_number"), [(2, 2**32 - 1), (2, 2**32 - 6), (2, 2**31 - 9), (3, 2**32 - 5)])
def test_numbers_may_wrap(n: int, first_number: int) -> None:
    run_ranks(_near_the_wrap, n, first_number)


def _all_modes(rank: int) -> None:
    gpu = SimulatedGpu(rank, pause_s=50e-6)
    n = dist.get_world_size()
    group = gpu.group(copy_engine_max_bytes=SLOT)
    captured = next(p for p in group._providers if isinstance(p, CapturedCopyEngineProvider))
    for k, dtype in enumerate([torch.float32, torch.float16, torch.bfloat16]):
        for size in (0, 1, n, 1001, 40_003):
            parts = inputs(10 * size + k, n, (size,), dtype)
            whole = size // n * n
            with gpu.computing():
                x = parts[rank] * 1.0
                from_graph, rows = torch.empty_like(x), torch.empty((n, size), dtype=dtype)
                captured.all_reduce(x, from_graph)
                eager, gathered = group.all_reduce(x), group.all_gather(x, 0)
                captured.all_gather(x, rows)
                scattered = group.reduce_scatter(x[:whole], 0)
                x.zero_()
            torch.cuda.synchronize()
            group.check()
            total = expected_sum(parts)
            assert torch.equal(eager, total), (dtype, size)
            assert torch.equal(from_graph, total), (dtype, size)
            assert torch.equal(gathered, torch.cat(parts))
            assert torch.equal(rows, torch.stack(parts))
            assert torch.equal(scattered, total[:whole].view(n, -1)[rank] if whole else total[:0]), (dtype, size)
    group.destroy()


@pytest.mark.parametrize("n", [2, 5, 8])
def test_all_modes_agree_for_two_to_eight_ranks(n: int) -> None:
    run_ranks(_all_modes, n, timeout_s=100)
