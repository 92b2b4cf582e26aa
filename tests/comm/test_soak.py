"""Random collectives on four ranks for a long time, every result checked on every rank.

``TPOVERLAP_SOAK_S`` says for how long (default 60 s); run pytest with ``-s`` to see its progress.
"""

from __future__ import annotations

import ctypes
import os
import random
import threading
import time
from collections import Counter
from collections.abc import Callable

import pytest
import torch
from rank_harness import run_ranks

from tpoverlap.comm import GroupCoordinator
from tpoverlap.config import HostReduceConfig
from tpoverlap.errors import CollectiveAbortedError, CollectiveMismatchError

DURATION_S = float(os.environ.get("TPOVERLAP_SOAK_S", "60"))
RANKS = 4
TIMEOUT_S = 15.0
MAX_BYTES = 4 << 20
REDUCED = (torch.float32, torch.float16, torch.bfloat16)
DTYPES = (*REDUCED, torch.int64, torch.uint8)
_ROUND = 25  # calls between two looks at the clock
_FDS_A_GROUP, _THREADS_A_GROUP = 8, 4  # of gloo on four ranks; a thread of ours may wait for what gloo has left


class Data:
    """What every rank gives to every call, known to all ranks: windows of one random pool a rank and dtype."""

    def __init__(self, seed: int) -> None:
        self.pools = {}
        for dtype in DTYPES:
            count = MAX_BYTES // dtype.itemsize + 10_000
            generator = torch.Generator().manual_seed(seed)
            if dtype.is_floating_point:
                pool = torch.randn(RANKS, count, generator=generator).mul_(8).to(dtype)
            else:
                pool = torch.randint(0, 63, (RANKS, count), generator=generator, dtype=dtype)
            self.pools[dtype] = pool

    def parts(self, rng: random.Random, dtype: torch.dtype, count: int) -> torch.Tensor:
        """[ranks, count]; odd offsets, so that rows are not aligned."""
        pool = self.pools[dtype]
        offset = rng.randrange(pool.shape[1] - count + 1)
        return pool[:, offset : offset + count]


def _sum(parts: torch.Tensor) -> torch.Tensor:
    if parts.dtype not in REDUCED:
        return parts.sum(0, dtype=parts.dtype)
    total = parts[0].float().clone()
    for part in parts[1:]:
        total += part.float()
    return total.to(parts.dtype)


def _count(rng: random.Random, dtype: torch.dtype, multiple: int = 1) -> int:
    """0 to some MB, small sizes as likely as large ones."""
    if rng.random() < 0.05:
        return 0
    num_bytes = int(2 ** rng.uniform(0, MAX_BYTES.bit_length() - 1))
    return num_bytes // dtype.itemsize // multiple * multiple


class Soak:
    """One rank's run. All ranks draw the same numbers, so that all know what each of them does."""

    def __init__(self, rank: int, seed: int) -> None:
        self.rank = rank
        self.rng = random.Random(seed)
        self.data = Data(seed)
        config = HostReduceConfig(timeout_s=TIMEOUT_S)
        self.group = GroupCoordinator(range(RANKS), rank, "cpu", config, unique_name="soak")
        self.counts: Counter[str] = Counter()
        self.resets: list[float] = []
        self.bytes = 0
        self.calls: list[Callable[[], None]] = [
            *[self.all_reduce] * 6,
            self.sum2,
            self.all_gather,
            self.reduce_scatter,
            self.broadcast,
            self.gatherv,
            self.tensor_dict,
            self.exchange,
        ]

    def one(self) -> None:
        if self.rng.random() < 0.15:  # somebody is late
            late, pause_s = self.rng.randrange(RANKS), self.rng.choice([0.0003, 0.001, 0.005, 0.03])
            if self.rank == late:
                time.sleep(pause_s)
        chance = self.rng.random()
        call = self.abort if chance < 0.01 else self.mismatch if chance < 0.013 else self.rng.choice(self.calls)
        if call in (self.abort, self.mismatch):
            # Nobody may still be in the call before, which would fail too. Once one rank has left a barrier, all do.
            self.group.barrier()
        call()
        self.counts[call.__name__] += 1

    def draw(self, dtypes: tuple[torch.dtype, ...] = DTYPES, multiple: int = 1) -> torch.Tensor:
        dtype = self.rng.choice(dtypes)
        parts = self.data.parts(self.rng, dtype, _count(self.rng, dtype, multiple))
        self.bytes += parts[0].nbytes
        return parts

    def all_reduce(self) -> None:
        parts, way = self.draw(), self.rng.randrange(3)
        mine = parts[self.rank]
        if way == 0:
            got = self.group.all_reduce(mine)
        elif way == 1:
            got = self.group.all_reduce(mine, out=torch.empty(2 * mine.numel(), dtype=mine.dtype)[::2])
        else:
            got = mine.clone()
            assert self.group.all_reduce(got, out=got) is got
        assert torch.equal(got, _sum(parts))

    def sum2(self) -> None:
        parts = self.draw(REDUCED)
        got = self.group.all_reduce_sum2(parts[self.rank], parts[self.rank])
        assert torch.equal(got, _sum(parts + parts))

    def all_gather(self) -> None:
        parts, dim = self.draw(multiple=6).unflatten(1, (2, -1)), self.rng.randrange(2)
        assert torch.equal(self.group.all_gather(parts[self.rank], dim), torch.cat(list(parts), dim))

    def reduce_scatter(self) -> None:
        parts, dim = self.draw(multiple=RANKS * RANKS).unflatten(1, (RANKS, -1)), self.rng.randrange(2)
        got = self.group.reduce_scatter(parts[self.rank], dim)
        assert torch.equal(got, _sum(parts).chunk(RANKS, dim)[self.rank])

    def broadcast(self) -> None:
        parts, source = self.draw(), self.rng.randrange(RANKS)
        assert torch.equal(self.group.broadcast(parts[self.rank].clone(), source), parts[source])

    def gatherv(self) -> None:
        parts = self.draw()
        sizes = [self.rng.randint(0, parts.shape[1]) for _ in range(RANKS)]
        got = self.group.all_gatherv(parts[self.rank, : sizes[self.rank]], 0, sizes)
        assert torch.equal(got, torch.cat([part[:n] for part, n in zip(parts, sizes, strict=True)]))
        destination = self.rng.randrange(RANKS)
        gathered = self.group.gather(parts[self.rank], destination)
        assert (gathered is None) == (self.rank != destination)
        assert gathered is None or torch.equal(gathered, parts.flatten())

    def tensor_dict(self) -> None:
        parts, source = self.draw(), self.rng.randrange(RANKS)
        sent = {"x": parts[source], "n": self.counts.total()} if self.rank == source else None
        got = self.group.broadcast_tensor_dict(sent, source)
        assert got is not None
        assert got["n"] == self.counts.total()
        assert torch.equal(got["x"], parts[source])

    def exchange(self) -> None:
        """Each rank sends to the next one; odd ranks receive first, as a send may wait for its receiver."""
        parts = self.draw()
        source = (self.rank - 1) % RANKS
        if self.rank % 2 == 0:
            self.group.send(parts[self.rank])
        got = self.group.recv(parts[source].shape, parts.dtype)
        if self.rank % 2:
            self.group.send(parts[self.rank])
        assert torch.equal(got, parts[source])

    def abort(self) -> None:
        """All ranks call on until one of them aborts from another thread; what has returned before that is right."""
        culprit, delay_s = self.rng.randrange(RANKS), self.rng.choice([0.0, 0.001, 0.01])
        parts = self.draw()
        expected, mine = _sum(parts), parts[self.rank].contiguous()
        timer = threading.Timer(delay_s, self.group.abort, ("soak",))
        if self.rank == culprit:
            timer.start()
        with pytest.raises(CollectiveAbortedError, match=rf"rank {culprit} aborted \(soak\)"):
            self._reduce_until_it_fails(mine, expected)
        if self.rank == culprit:
            timer.join()
        self.reset()

    def _reduce_until_it_fails(self, mine: torch.Tensor, expected: torch.Tensor) -> None:
        while True:
            assert torch.equal(self.group.all_reduce(mine), expected)

    def mismatch(self) -> None:
        odd = self.rng.randrange(RANKS)
        with pytest.raises(CollectiveMismatchError, match=f"rank {odd} calls"):
            self.group.all_reduce(torch.ones(8 if self.rank == odd else 9))
        self.reset()

    def reset(self) -> None:
        self.group.reset()
        self.resets.append(time.monotonic())

    def kept_groups(self) -> int:
        """At most so many torch groups that resets have replaced are kept, as gloo may still be at work in them."""
        return 1 + sum(self.resets[-1] - at <= TIMEOUT_S + 1 for at in self.resets)


def _held() -> tuple[int, int, int]:
    """Open descriptors, threads, resident MiB."""
    with open("/proc/self/status") as f:
        rss_kib = next(int(line.split()[1]) for line in f if line.startswith("VmRSS"))
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")), rss_kib // 1024


def _keep_no_free_memory() -> None:
    """Lets resident memory show leaks alone: glibc else keeps hundreds of MiB that threads of gloo have freed."""
    arena_max, mmap_threshold = -8, -3
    libc = ctypes.CDLL(None)
    assert libc.mallopt(arena_max, 1) == libc.mallopt(mmap_threshold, 131_072) == 1


def _soak(rank: int, seed: int, duration_s: float) -> tuple[dict[str, int], list[int]]:
    _keep_no_free_memory()
    soak = Soak(rank, seed)
    for call in soak.calls:
        call()
    base_fds, base_threads, _ = _held()
    started = time.monotonic()
    next_line_s, memory = 0.0, []
    while True:
        for _ in range(_ROUND):
            soak.one()
        elapsed_s = time.monotonic() - started
        # Rank 0's clock decides for all.
        if soak.group.broadcast_object(elapsed_s >= duration_s):
            break
        if elapsed_s >= next_line_s:
            fds, threads, rss_mib = _held()
            kept = soak.kept_groups()
            assert fds <= base_fds + _FDS_A_GROUP * kept, (fds, base_fds, kept)
            assert threads <= base_threads + _THREADS_A_GROUP * kept, (threads, base_threads, kept)
            memory.append(rss_mib)
            next_line_s += max(5.0, duration_s / 30)
            if rank == 0:
                print(
                    f"soak (seed {seed}): {elapsed_s:.0f} of {duration_s:.0f} s, {soak.counts.total()} calls, "
                    f"{soak.bytes / 2**20:.0f} MiB a rank, {soak.counts['abort']} aborts, "
                    f"{soak.counts['mismatch']} mismatches; "
                    f"{fds} descriptors, {threads} threads, {rss_mib} MiB resident",
                    flush=True,
                )
    soak.group.destroy()
    return dict(soak.counts), memory


@pytest.mark.timeout(DURATION_S + 120)
def test_every_result_of_a_long_random_run_is_right() -> None:
    seed = random.SystemRandom().randrange(1 << 30)
    print(f"seed {seed}")
    outcomes = run_ranks(_soak, RANKS, seed, DURATION_S, timeout_s=DURATION_S + 90)
    counts = outcomes[0][0]
    assert all(other == counts for other, _ in outcomes)
    print(f"{sum(counts.values())} calls: {counts}")
    # The segment's slots (16 MiB) and the plans become resident little by little; then nothing more.
    for _, memory in outcomes:
        assert max(memory) <= memory[0] + 64, memory
