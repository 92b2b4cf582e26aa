"""Resets whose ranks give up at any moment and come again: none is half done, and none is lost."""

from __future__ import annotations

import random
import threading
import time

import pytest

from tpoverlap.comm.failure import Failure, FailureKind, FailureRecord
from tpoverlap.comm.layout import Layout
from tpoverlap.comm.reset import ResetRendezvous
from tpoverlap.comm.segment import Segment
from tpoverlap.errors import CollectiveTimeoutError

CLEAN, POISONED = 1, 2


class _GivesUp(Exception):
    pass


class _Group:
    """Ranks as threads, each with a protocol word, a watcher that poisons all words while a failure is recorded, and
    resets that it now and then gives up."""

    def __init__(self, n: int, seed: int) -> None:
        layout = Layout(n, 4096)
        self.made = Segment.create(layout.size, "memfd")
        self.words = [CLEAN] * n
        self.silent = [False] * n
        self.wrong: list[str] = []
        self.layout = layout
        self.rngs = [random.Random(1000 * seed + q) for q in range(n)]
        self.given_up = 0
        self.lock = threading.RLock()  # the record's own keeps processes apart

    def watch(self, rank: int, record: FailureRecord) -> None:
        if record.present and not self.silent[rank]:
            self.words = [POISONED] * len(self.words)

    def run(self, rank: int, resets: int) -> int:
        segment = Segment.open(self.made.path, self.layout.size, "memfd")
        record, rng = FailureRecord(segment), self.rngs[rank]
        record._threads = self.lock
        rendezvous = ResetRendezvous(segment, self.layout, record, rank, 1.0)

        def check() -> None:
            if rng.random() < 0.15:
                raise _GivesUp
            if rng.random() < 0.2:
                time.sleep(rng.random() * 0.003)

        def restore() -> None:
            time.sleep(rng.random() * 0.002)
            self.words[rank] = CLEAN

        def fail() -> None:
            record.write(Failure(FailureKind.ABORTED, rank, rank, 0, "", "planted"))

        while rendezvous.count < resets:
            fail()
            while record.present:
                self.silent[rank] = True
                try:
                    rendezvous.join(restore, check)
                    # What a call would find here. A failure is recorded before it poisons.
                    words = list(self.words)
                    if not record.present and words != [CLEAN] * len(words):
                        self.wrong.append(f"rank {rank} after reset {rendezvous.count}: {words}")
                except (_GivesUp, CollectiveTimeoutError):
                    self.given_up += 1
                    fail()
                self.silent[rank] = False
                self.watch(rank, record)
                time.sleep(rng.random() * 0.001)
        count = rendezvous.count
        segment.close()
        return count


@pytest.mark.parametrize(("n", "seed"), [(2, 1), (2, 2), (3, 3), (4, 4)])
def test_a_reset_is_done_on_all_ranks_or_on_none_whoever_gives_up(n: int, seed: int) -> None:
    group = _Group(n, seed)
    counts = [0] * n

    def run(rank: int) -> None:
        counts[rank] = group.run(rank, 25)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(n)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    assert not group.wrong, group.wrong[0]
    assert group.given_up > 10
    assert min(counts) >= 25
