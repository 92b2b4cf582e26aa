"""Starts a job's ranks from a script that was not itself started by torchrun."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from tpoverlap.errors import PeerLostError, TpOverlapError

T = TypeVar("T")


@dataclass(frozen=True)
class _Failure:
    """What a rank says instead of a result. is_echo: it only saw that another rank ended."""

    message: str
    is_echo: bool


def start_ranks(ranks: int, work: Callable[..., T], *arguments: Any) -> T:
    """Runs ``work(*arguments)`` on that many ranks of this host, started as torchrun does; returns rank 0's result.

    work: a function of a module's top level; what it takes and returns is pickled. TpOverlapError with the message of
    the rank that failed first, or with the rank and exit code of one that died.
    """
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks,
        run_id=str(uuid.uuid4()),
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        start_method="spawn",
    )
    try:
        results = elastic_launch(config, _result_or_failure)(work, arguments)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        raise TpOverlapError(f"rank {rank} of {ranks} ended with exit code {failure.exitcode}") from None
    failures = [value for value in results.values() if isinstance(value, _Failure)]
    if failures:
        raise TpOverlapError(min(failures, key=lambda failure: failure.is_echo).message)
    first: T = results[0]
    return first


def _result_or_failure(work: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    try:
        return work(*arguments)
    except TpOverlapError as error:
        return _Failure(str(error), isinstance(error, PeerLostError))
