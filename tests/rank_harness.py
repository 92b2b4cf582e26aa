"""Runs a function on several ranks in processes of their own; fails loudly when one hangs or leaves something behind.

Ranks are forked from a server that has torch loaded, so that four of them start in well under a second. The store
lives in the test's process: a rank may die without taking it along.
"""

from __future__ import annotations

import contextlib
import datetime
import faulthandler
import multiprocessing
import os
import pickle
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["torch", "torch.distributed", "numpy", "tpoverlap.comm", "tpoverlap.microbatch"])


@dataclass
class RankResult:
    """What became of a rank: its value, or its exception's type, text and traceback, or neither when it was killed."""

    value: Any = None
    error: str = ""
    message: str = ""
    trace: str = ""
    exit_code: int | None = None


class RankFailure(AssertionError):
    pass


def run_ranks(
    fn: Callable[..., Any], world_size: int, *args: Any, timeout_s: float = 60.0, init: bool = True
) -> list[Any]:
    """Calls ``fn(rank, *args)`` on every rank and returns the values; RankFailure with all tracebacks otherwise."""
    results = start_ranks(fn, world_size, *args, timeout_s=timeout_s, init=init).join()
    failed = [f"rank {q}: {r.trace or f'exit code {r.exit_code}'}" for q, r in enumerate(results) if r.exit_code != 0]
    if failed:
        raise RankFailure("\n".join(failed))
    return [r.value for r in results]


def start_ranks(
    fn: Callable[..., Any], world_size: int, *args: Any, timeout_s: float = 60.0, init: bool = True
) -> Ranks:
    """Starts ``fn(rank, *args)`` on every rank, with a gloo default group unless ``init`` is False."""
    return Ranks(fn, world_size, args, timeout_s, init)


class Ranks:
    """Ranks at work. :meth:`join` collects what became of them; it raises when one had to be killed for hanging."""

    def __init__(
        self, fn: Callable[..., Any], world_size: int, args: tuple[Any, ...], timeout_s: float, init: bool
    ) -> None:
        self._before = _shared_files()
        self._timeout_s = timeout_s
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.pipes: list[Connection] = []
        self.processes = []
        for rank in range(world_size):
            ours, theirs = _context.Pipe()
            process = _context.Process(
                target=_rank_main,
                args=(fn, rank, world_size, args, self._store.port, theirs, timeout_s, init),
                daemon=True,
            )
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)

    def pid(self, rank: int) -> int:
        pid = self.processes[rank].pid
        assert pid is not None
        return pid

    def wait_for(self, rank: int, message: Any = "ready") -> float:
        """Until that rank has called ``say(message)``; returns the time.monotonic() at which it was seen."""
        if not self.pipes[rank].poll(self._timeout_s):
            raise RankFailure(f"rank {rank} did not say {message!r}")
        said = pickle.loads(self.pipes[rank].recv_bytes())
        assert said == ("said", message), said
        return time.monotonic()

    def join(self) -> list[RankResult]:
        deadline = time.monotonic() + self._timeout_s + 5
        results = []
        hung = []
        for rank, (process, pipe) in enumerate(zip(self.processes, self.pipes, strict=True)):
            result = RankResult()
            with contextlib.suppress(EOFError, ConnectionResetError):
                while pipe.poll(max(0.0, deadline - time.monotonic())):
                    kind, payload = pickle.loads(pipe.recv_bytes())
                    if kind == "result":
                        result = payload
                        break
            process.join(max(0.1, deadline - time.monotonic()))
            if process.is_alive():
                hung.append(rank)
                process.kill()
                process.join()
            result.exit_code = process.exitcode
            results.append(result)
            pipe.close()
        if hung:
            raise RankFailure(f"ranks {hung} hung for {self._timeout_s:g} s; their stacks are on stderr")
        left = _shared_files() - self._before
        assert not left, f"left in /dev/shm: {sorted(left)}"
        return results


_say: Callable[[Any], None] | None = None


def say(message: Any = "ready") -> None:
    """From a rank: tells the test that it has come to a point (see :meth:`Ranks.wait_for`)."""
    assert _say is not None
    _say(message)


def _rank_main(
    fn: Callable[..., Any],
    rank: int,
    world_size: int,
    args: tuple[Any, ...],
    port: int,
    pipe: Connection,
    timeout_s: float,
    init: bool,
) -> None:
    global _say
    # A shell's background job inherits that interrupts are ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    faulthandler.enable()
    faulthandler.dump_traceback_later(timeout_s, exit=True, file=sys.stderr)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world_size), "LOCAL_RANK": str(rank)}
    torch.set_num_threads(1)
    _say = lambda message: pipe.send_bytes(pickle.dumps(("said", message)))  # noqa: E731
    result = RankResult()
    try:
        if init:
            store = dist.TCPStore("127.0.0.1", port, is_master=False)
            dist.init_process_group(
                "gloo", store=store, rank=rank, world_size=world_size, timeout=datetime.timedelta(seconds=timeout_s)
            )
        result.value = fn(rank, *args)
    except BaseException as e:
        result.error, result.message, result.trace = type(e).__name__, str(e), traceback.format_exc()
    pipe.send_bytes(pickle.dumps(("result", result)))
    faulthandler.cancel_dump_traceback_later()
    if result.error:
        raise SystemExit(1)


def _shared_files() -> set[str]:
    return {name for name in os.listdir("/dev/shm") if name.startswith("tpoverlap")}
