"""The CPU on which a device's pieces take turns: near the GPU, and never that of another GPU or rank."""

from __future__ import annotations

import os
from pathlib import Path
from unittest.mock import patch

import pytest

from tpoverlap.microbatch import shared_cpu
from tpoverlap.microbatch.cpu_choice import choose_cpus, parse_cpu_list
from tpoverlap.microbatch.shared_cpu import SharedCpu, loop_s


def choose_cpu(allowed: set[int], address: str, rank: int, pci: Path, cpus: Path | None = None) -> int | None:
    chosen = choose_cpus(allowed, address, rank, 1, pci, cpus or pci / "no cpus")
    assert len(set(chosen)) == len(chosen)
    return chosen[0] if chosen else None


def add_cores(folder: Path, *cores: str) -> Path:
    for core in cores:
        for cpu in parse_cpu_list(core):
            topology = folder / f"cpu{cpu}" / "topology"
            topology.mkdir(parents=True)
            (topology / "thread_siblings_list").write_text(core + "\n")
    return folder


def add(pci: Path, address: str, *, vendor: str = "0x10de", kind: str = "0x030200", cpus: str | None = "0-7") -> str:
    folder = pci / address
    folder.mkdir(parents=True)
    (folder / "vendor").write_text(vendor + "\n")
    (folder / "class").write_text(kind + "\n")
    if cpus is not None:
        (folder / "local_cpulist").write_text(cpus + "\n")
    return address


@pytest.mark.parametrize(("text", "cpus"), [("0-3,8", {0, 1, 2, 3, 8}), ("5", {5}), ("", set()), ("all", set())])
def test_cpu_lists_are_read(text: str, cpus: set[int]) -> None:
    assert parse_cpu_list(text) == cpus


def test_gpus_of_a_box_take_cpus_of_their_own_near_them(tmp_path: Path) -> None:
    add(tmp_path, "0000:01:00.0", vendor="0x8086", kind="0x020000")
    gpus = [add(tmp_path, f"0000:{bus:02x}:00.0", cpus="0-7" if bus < 0x40 else "8-15") for bus in range(0x20, 0x60, 8)]
    chosen = [choose_cpu(set(range(16)), gpu, rank, tmp_path) for rank, gpu in enumerate(gpus)]
    assert all(cpu is not None and (cpu < 8) == (rank < 4) for rank, cpu in enumerate(chosen))
    assert len(set(chosen[:4])) == 4
    assert len(set(chosen[4:])) == 4


@pytest.mark.parametrize("gpus", range(1, 9))
@pytest.mark.parametrize("cpus", [1, 2, 3, 7, 8, 12, 24, 56, 128])
def test_no_two_gpus_share_a_cpu(tmp_path: Path, gpus: int, cpus: int) -> None:
    addresses = [add(tmp_path, f"0000:{bus:02x}:00.0", cpus=f"0-{cpus - 1}") for bus in range(gpus)]
    chosen = [choose_cpu(set(range(cpus)), address, rank, tmp_path) for rank, address in enumerate(addresses)]
    if cpus < gpus:
        assert chosen == [None] * gpus
    else:
        assert len(set(chosen)) == gpus
        assert None not in chosen


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_that_share_a_gpu_do_not_share_the_cpu(tmp_path: Path, ranks: int) -> None:
    gpu = add(tmp_path, "0000:20:00.0")
    assert len({choose_cpu(set(range(4)), gpu, rank, tmp_path) for rank in range(ranks)}) == ranks


def test_only_cpus_of_the_process_are_taken(tmp_path: Path) -> None:
    gpu = add(tmp_path, "0000:20:00.0", cpus="0-7")
    assert choose_cpu({6, 12}, gpu, 0, tmp_path) == 6
    assert choose_cpu({12, 13}, gpu, 0, tmp_path) in {12, 13}  # none is near
    assert choose_cpu({3}, "", 5, tmp_path / "missing") == 3


def test_gpus_are_spread_where_the_system_does_not_tell_what_is_near(tmp_path: Path) -> None:
    gpus = [add(tmp_path, f"0000:{bus}:00.0", cpus=None) for bus in (20, 30)]
    assert {choose_cpu({1, 2}, gpu, rank, tmp_path) for rank, gpu in enumerate(gpus)} == {1, 2}


@pytest.mark.parametrize("neighbours", [True, False])
def test_gpus_and_ranks_have_cores_of_their_own_and_leave_the_first_one(tmp_path: Path, neighbours: bool) -> None:
    """Two GPUs, eight cores of two CPUs, whose numbers follow each other or lie apart."""
    pairs = [(2 * i, 2 * i + 1) if neighbours else (i, i + 8) for i in range(8)]
    cpus = add_cores(tmp_path / "cpu", *(f"{a},{b}" for a, b in pairs))
    core_of = {cpu: pair for pair in pairs for cpu in pair}
    gpus = [add(tmp_path, f"0000:{bus}:00.0", cpus="0-15") for bus in (20, 30)]
    chosen = [choose_cpu(set(range(16)), gpu, rank, tmp_path, cpus) for rank, gpu in enumerate(gpus)]
    assert len({core_of[cpu] for cpu in chosen if cpu is not None} | {core_of[0]}) == 3
    shared = [choose_cpu(set(range(16)), gpus[0], rank, tmp_path, cpus) for rank in range(8)]
    assert len({core_of[cpu] for cpu in shared[:4] if cpu is not None}) == 4
    assert len(set(shared)) == 8


def test_fewer_cores_than_gpus_are_shared_by_cpu(tmp_path: Path) -> None:
    cpus = add_cores(tmp_path / "cpu", "0-1", "2-3")
    gpus = [add(tmp_path, f"0000:{bus}:00.0", cpus="0-3") for bus in (20, 30, 40)]
    chosen = [choose_cpu(set(range(4)), gpu, rank, tmp_path, cpus) for rank, gpu in enumerate(gpus)]
    assert len(set(chosen)) == 3


def test_siblings_that_the_process_may_not_use_do_not_count(tmp_path: Path) -> None:
    cpus = add_cores(tmp_path / "cpu", "0,4", "1,5", "2,6", "3,7")
    gpu = add(tmp_path, "0000:20:00.0", cpus="0-7")
    assert {choose_cpu({4, 5, 6, 7}, gpu, rank, tmp_path, cpus) for rank in range(4)} == {4, 5, 6, 7}


def test_no_gpu_ever_goes_to_a_cpu_of_another(tmp_path: Path) -> None:
    gpus = [add(tmp_path, f"0000:{bus}:00.0", cpus="0-7") for bus in (20, 30, 40)]
    of_gpu = [choose_cpus(set(range(8)), gpu, rank, 1, tmp_path, tmp_path / "none") for rank, gpu in enumerate(gpus)]
    assert sum(map(len, of_gpu)) == len(set().union(*of_gpu)) == 6


def test_ranks_with_a_gpu_each_choose_among_all_of_its_cpus(tmp_path: Path) -> None:
    near = ["0-31", "32-63"]
    gpus = [add(tmp_path, f"0000:{bus:02x}:00.0", cpus=near[bus >= 4]) for bus in range(8)]
    of_gpu = [choose_cpus(set(range(64)), gpu, rank, 8, tmp_path, tmp_path / "none") for rank, gpu in enumerate(gpus)]
    assert [len(chosen) for chosen in of_gpu] == [8] * 8
    assert len(set().union(*of_gpu)) == 64


@pytest.mark.parametrize("ranks", range(1, 9))
@pytest.mark.parametrize("cpus", [1, 2, 3, 5, 8, 16, 31])
def test_ranks_never_meet_on_a_cpu_while_there_are_enough(tmp_path: Path, cpus: int, ranks: int) -> None:
    """Whether or not the system tells that they share a GPU."""
    gpu = add(tmp_path, "0000:20:00.0", cpus=None)
    of_rank = [choose_cpus(set(range(cpus)), gpu, rank, ranks, tmp_path, tmp_path / "none") for rank in range(ranks)]
    assert {len(chosen) for chosen in of_rank} == {max(1, cpus // ranks)}
    if cpus >= ranks:
        assert sum(map(len, of_rank)) == len(set().union(*of_rank))


class Cpus:
    """CPUs of given seconds, and a thread that is moved between them."""

    def __init__(self, *seconds: float) -> None:
        self.seconds = list(seconds)
        self.gone: set[int] = set()
        self.moves: list[int] = []
        with patch.object(shared_cpu, "move_to", lambda cpus: self._move(*cpus)):
            self.shared = SharedCpu(range(len(seconds)), lambda: self.seconds[self.moves[-1]])

    def settle(self) -> int:
        self.moves.clear()
        self.shared.settle(self._move)
        return self.shared.cpu

    def _move(self, cpu: int) -> bool:
        if cpu not in self.gone:
            self.moves.append(cpu)
        return cpu not in self.gone


def test_the_first_cpu_is_taken_and_kept_while_it_is_as_fast_as_any() -> None:
    cpus = Cpus(1.2, 1.0, 1.0)
    assert cpus.settle() == 0
    for _ in range(3):
        assert cpus.settle() == 0
        assert cpus.moves == [0]  # the others are not asked


def test_a_slow_cpu_is_left_for_the_next_fast_one_and_not_returned_to() -> None:
    cpus = Cpus(1.0, 2.0, 1.1, 1.0)
    assert cpus.settle() == 0
    cpus.seconds[0] = 1.9
    assert cpus.settle() == 2
    assert cpus.moves == [0, 1, 2]
    cpus.seconds[0] = 1.0
    assert cpus.settle() == 2
    assert Cpus(2.0, 1.0).shared.cpu == 1


def test_no_more_than_a_few_are_compared() -> None:
    cpus = Cpus(*[1.0] * 100)
    assert cpus.moves == [*range(8), 0]


def test_a_cpu_that_is_gone_is_not_taken_for_another() -> None:
    cpus = Cpus(1.0, 1.0, 1.0)
    cpus.gone, cpus.seconds[0] = {1}, 2.0
    assert cpus.settle() == 2
    cpus.gone = {0, 1, 2}
    assert cpus.settle() == 2
    assert cpus.moves == []
    cpus.gone = {2}
    cpus.seconds[0] = 1.0
    assert cpus.settle() == 0


def test_where_moving_is_forbidden_threads_stay_where_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(thread: int, cpus: set[int]) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "sched_setaffinity", forbidden)
    assert SharedCpu([7, 3]).cpu == 7


def test_where_all_have_become_slow_the_first_of_the_fastest_serves() -> None:
    cpus = Cpus(1.0, 1.0, 1.0)
    cpus.settle()
    cpus.seconds = [4.0, 3.0, 3.1]
    assert cpus.settle() == 1
    assert cpus.settle() == 1
    assert cpus.moves == [1]
    assert Cpus(1.0).settle() == 0


def test_a_loop_takes_time() -> None:
    assert 1e-6 < loop_s() < 1e-2
