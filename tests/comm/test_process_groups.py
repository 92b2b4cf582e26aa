"""The torch.distributed groups of coordinators: made by their members alone, used again, gone when they are spoilt."""

from __future__ import annotations

import importlib
import os
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from rank_harness import run_ranks

from tpoverlap.comm import GroupCoordinator
from tpoverlap.config import HostReduceConfig
from tpoverlap.errors import CollectiveAbortedError, CollectiveTimeoutError, PeerLostError


def _group(ranks: list[int], timeout_s: float = 20.0) -> GroupCoordinator:
    return GroupCoordinator(ranks, dist.get_rank(), "cpu", HostReduceConfig(timeout_s=timeout_s))


def _works(group: GroupCoordinator) -> None:
    for dtype in (torch.float32, torch.int64):  # through the channel and through the torch group
        assert group.all_reduce(torch.ones(2, dtype=dtype)).tolist() == [group.world_size] * 2


def _uneven(rank: int) -> None:
    groups = [_group(ranks) for ranks in ([0, 1], [0], [0, 2], [0, 1, 2], [1, 2]) if rank in ranks]
    for group in groups:
        _works(group)
        group.destroy()


def test_members_may_belong_to_different_numbers_of_groups() -> None:
    run_ranks(_uneven, 3)


def _used_again(rank: int) -> tuple[set[str], int]:
    names = set()
    for _ in range(20):
        pair = [_group([0, 1]), _group([0, 1])]
        names |= {g.cpu_group.group_name for g in pair}
        for group in pair:
            _works(group)
            group.destroy()
    given = GroupCoordinator([0, 1], rank, "cpu", process_group=dist.group.WORLD)
    given.destroy()
    dist.barrier()
    dist.destroy_process_group()
    return names, len(pair)


def test_sound_groups_are_used_again_and_a_given_one_is_left_alone() -> None:
    for names, at_once in run_ranks(_used_again, 2):
        assert len(names) == at_once


def _disagreement(rank: int) -> None:
    """Rank 0 leaves a group that it saw sound; rank 1 finds it failed and throws its torch group away."""
    group = _group([0, 1])
    _works(group)
    if rank == 0:
        group.destroy()
    else:
        with pytest.raises(PeerLostError, match="rank 0 has left"):
            group.all_reduce(torch.ones(2))
        group.destroy()
    group = _group([0, 1])
    _works(group)
    group.destroy()


def test_members_that_disagree_about_a_groups_soundness_make_a_new_one() -> None:
    run_ranks(_disagreement, 2)


def _absent(rank: int) -> None:
    if rank == 1:
        time.sleep(1.5)
        return
    with pytest.raises(CollectiveTimeoutError, match=r"ranks \[1\] did not come"):
        _group([0, 1, 2], timeout_s=0.5)


def test_a_member_that_does_not_come_is_named() -> None:
    run_ranks(_absent, 3)


def _held() -> tuple[int, int]:
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


def _resets(rank: int) -> None:
    timeout_s = 5.0
    group = _group([0, 1, 2], timeout_s)
    held = []
    for i in range(10):
        if rank == i % 3:
            group.abort("planted")
        elif i % 2:  # spoils the torch group
            dist.all_reduce(torch.ones(2), group=group.cpu_group, async_op=True)
        with pytest.raises(CollectiveAbortedError, match="planted"):
            group.all_reduce(torch.ones(2))
        started = time.monotonic()
        group.reset()
        assert time.monotonic() - started < timeout_s - 1, "the reset waited for the half-done collective"
        _works(group)
        held.append(_held())
        if i == 8:
            time.sleep(timeout_s + 1.5)  # what is half done ends by its timeout
    give_up = time.monotonic() + 5
    while any(now > then for now, then in zip(_held(), held[0], strict=True)):  # threads take a moment to end
        assert time.monotonic() < give_up, (held, _held())
        time.sleep(0.01)
    group.destroy()


def test_resets_leave_no_descriptor_and_no_thread_behind() -> None:
    run_ranks(_resets, 3)


def _gloo_threads() -> int:
    names = [Path(f"/proc/self/task/{thread}/comm").read_text() for thread in os.listdir("/proc/self/task")]
    return sum("gloo" in name for name in names)


def _end_with_the_default_group(rank: int) -> tuple[int, int]:
    group, other = _group([0, 1]), _group([0, 1])
    _works(group)
    other.destroy()
    group.destroy()
    importlib.import_module("torch._dynamo")  # it must not hold the default group
    while_in_use = _gloo_threads()
    dist.destroy_process_group()
    return while_in_use, _gloo_threads()


def test_no_thread_of_gloo_outlives_the_default_group() -> None:
    """One that let go of a tensor while the interpreter ends would abort the process."""
    for before, after in run_ranks(_end_with_the_default_group, 2):
        assert before > 0
        assert after == 0


def _second_life(rank: int, store: str) -> None:
    for life in range(2):
        if life:
            dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2)
        group = _group([0, 1])
        _works(group)
        if life == 0:
            dist.destroy_process_group()  # the coordinator's groups are gone with it
        group.destroy()


def test_a_new_default_group_starts_with_no_group_of_the_old(tmp_path: Path) -> None:
    run_ranks(_second_life, 2, str(tmp_path / "store"))
