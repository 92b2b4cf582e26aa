"""Faults in one piece on one rank, at random places, and what each rank must then see."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch

from tpoverlap.comm import GroupCoordinator
from tpoverlap.config import OverlapConfig
from tpoverlap.errors import CollectiveAbortedError, CollectiveMismatchError, TpOverlapError
from tpoverlap.microbatch import Batch, MicroBatchExecutor

LAYERS = 4
Fault = Callable[[torch.Tensor], torch.Tensor]


class PlantedError(Exception):
    pass


class Faulty:
    """Row by row, an all-reduce a layer. ``fault`` is given what collective ``at``, counted over all pieces, would
    send, and returns what it does send."""

    def __init__(self, group: GroupCoordinator, at: int | None = None, fault: Fault | None = None) -> None:
        self.group = group
        self.at = at
        self.fault = fault
        self.calls = 0

    def __call__(self, batch: Batch) -> torch.Tensor:
        x = batch.inputs_embeds
        assert x is not None
        for _ in range(LAYERS):
            sent = x * 0.5
            if self.fault is not None and self.calls == self.at:
                sent = self.fault(sent)
            self.calls += 1
            x = torch.tanh(x + self.group.all_reduce(sent))
        return x


def _raise(x: torch.Tensor) -> torch.Tensor:
    raise PlantedError("planted")


def _exhaust_memory(x: torch.Tensor) -> torch.Tensor:
    return torch.empty(1 << 50, dtype=torch.uint8, device=x.device)


def _illegal_shape(x: torch.Tensor) -> torch.Tensor:
    return x + x[:, :-1]


def _send_less(x: torch.Tensor) -> torch.Tensor:
    return x[:1]


# The exception of the rank that makes the fault itself, and words of it.
OWN_FAULTS: dict[str, tuple[Fault, type[Exception], str]] = {
    "exception": (_raise, PlantedError, "planted"),
    "memory": (_exhaust_memory, RuntimeError, "memory"),
    "shape": (_illegal_shape, RuntimeError, "must match the size"),
}


def _until_error(run: Callable[[], object]) -> TpOverlapError:
    """A device may still be at work when a run returns: then a later one tells."""
    for _ in range(1000):
        try:
            run()
        except TpOverlapError as e:
            return e
    raise AssertionError("no error came")


def random_faults(group: GroupCoordinator, batch: Batch, cases: int) -> dict[str, int]:
    """Every rank sees each fault, and the batch after it is right. Returns how often each kind came."""
    expected = Faulty(group)(batch)
    executors = {
        n: MicroBatchExecutor(group, OverlapConfig(min_tokens=1, num_pieces=n, cut_multiple=1)) for n in (2, 3)
    }
    kinds = [*OWN_FAULTS, "mismatch", "abort"]
    seen = dict.fromkeys(kinds, 0)
    for case in range(cases):
        rng = random.Random(case)
        executor = executors[num_pieces := rng.choice([2, 3])]
        culprit, at, kind = rng.randrange(group.world_size), rng.randrange(num_pieces * LAYERS), rng.choice(kinds)
        seen[kind] += 1
        mine = group.rank_in_group == culprit
        where = f"case {case}: {kind} at collective {at} of {num_pieces} pieces on rank {culprit}"
        if kind in OWN_FAULTS:
            fault, error_type, words = OWN_FAULTS[kind]
            if mine:
                with pytest.raises(error_type, match=words):
                    executor.run(Faulty(group, at, fault), batch)
            else:
                error = _until_error(lambda: executor.run(Faulty(group), batch))  # noqa: B023
                assert isinstance(error, CollectiveAbortedError), (where, error)
                assert f"on rank {culprit}" in str(error), (where, error)
        else:

            def abort(x: torch.Tensor, case: int = case) -> torch.Tensor:
                group.abort(f"the {case}th time")
                return x

            fault = abort if kind == "abort" else _send_less
            models = iter([Faulty(group, at, fault)] if mine else [])
            error = _until_error(lambda: executor.run(next(models, Faulty(group)), batch))  # noqa: B023
            if kind == "mismatch":
                assert isinstance(error, CollectiveMismatchError), (where, error)
            else:
                assert isinstance(error, CollectiveAbortedError), (where, error)
                assert f"the {case}th time" in str(error), (where, error)
        assert torch.equal(executor.run(Faulty(group), batch), expected), where
    for executor in executors.values():
        executor.close()
    return seen
