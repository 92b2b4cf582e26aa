"""What a user sees when ranks die, stop, disagree or give up: which error, on whom, within which time."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from rank_harness import Ranks, run_ranks, say, start_ranks

from tpoverlap.comm import GroupCoordinator
from tpoverlap.comm.channel import Channel
from tpoverlap.config import HostReduceConfig
from tpoverlap.errors import (
    ChannelError,
    CollectiveAbortedError,
    CollectiveMismatchError,
    CollectiveTimeoutError,
    PeerLostError,
    TpOverlapError,
)


def _group(timeout_s: float = 20.0) -> GroupCoordinator:
    config = HostReduceConfig(timeout_s=timeout_s)
    return GroupCoordinator(range(dist.get_world_size()), dist.get_rank(), "cpu", config, unique_name="tested")


def _descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def _until_failure(rank: int, dtype: torch.dtype, num_elements: int, pause_s: float) -> tuple[str, str, float, int]:
    """All-reduces until an error comes; its type and text, when it came, and descriptors left open after destroy."""
    _group().destroy()  # its gloo group stays, for the next coordinator
    before = _descriptors()
    group = _group()
    x = torch.ones(num_elements, dtype=dtype)
    error: TpOverlapError | None = None
    for i in range(1_000_000):
        try:
            group.all_reduce(x)
        except TpOverlapError as e:
            error = e
            break
        if i == 3:
            say()
        time.sleep(pause_s)
    at = time.monotonic()
    assert error is not None
    with pytest.raises(type(error)):
        group.check()
    if isinstance(error, PeerLostError):
        with pytest.raises(PeerLostError, match="destroy it"):
            group.reset()
    group.destroy()
    return type(error).__name__, str(error), at, _descriptors() - before


def _kill(ranks: Ranks, victim: int) -> float:
    for rank in range(len(ranks.processes)):
        ranks.wait_for(rank)
    time.sleep(0.05)
    os.kill(ranks.pid(victim), signal.SIGKILL)
    return time.monotonic()


@pytest.mark.parametrize("victim", [0, 1, 2])
@pytest.mark.parametrize(
    ("dtype", "num_elements", "pause_s"),
    [(torch.float32, 3_000_000, 0.0), (torch.float32, 100, 0.0), (torch.bfloat16, 1000, 0.5), (torch.int64, 1000, 0.0)],
    ids=["inside", "small", "between", "fallback"],
)
def test_a_killed_rank_is_named_on_all_others(
    victim: int, dtype: torch.dtype, num_elements: int, pause_s: float
) -> None:
    ranks = start_ranks(_until_failure, 3, dtype, num_elements, pause_s)
    killed_at = _kill(ranks, victim)
    results = ranks.join()
    assert results[victim].exit_code == -signal.SIGKILL
    for rank, result in enumerate(results):
        if rank != victim:
            name, text, at, leaked = result.value
            assert name == "PeerLostError", text
            assert f"rank {victim} died" in text
            assert at - killed_at < 2
            assert leaked <= 0  # the gloo group closes its connections to the dead


def test_a_rank_that_leaves_is_named_on_those_who_still_wait() -> None:
    def_results = run_ranks(_leave, 3)
    assert [r for r in def_results if r] == ["PeerLostError"] * 2


def _leave(rank: int) -> str:
    group = _group()
    group.all_reduce(torch.ones(4))
    if rank == 1:
        group.destroy()
        time.sleep(1.0)  # alive, but no longer a member
        return ""
    with pytest.raises(PeerLostError, match="rank 1 has left") as e:
        group.all_reduce(torch.ones(4))
    group.destroy()
    return type(e.value).__name__


def _stopped(rank: int, timeout_s: float) -> tuple[float, str]:
    group = _group(timeout_s)
    x = torch.full((1000,), float(rank))
    group.all_reduce(x)
    say(rank)
    if rank == 1:
        time.sleep(0.5)  # the test stops this process meanwhile, and lets it go on when the others have given up
    started = time.monotonic()
    with pytest.raises(CollectiveTimeoutError) as e:
        group.all_reduce(x)
    waited = time.monotonic() - started
    group.reset()
    assert torch.equal(group.all_reduce(torch.ones(5, dtype=torch.int64)), torch.full((5,), 3))
    assert torch.equal(group.all_reduce(x), torch.full((1000,), 3.0))
    group.destroy()
    return waited, str(e.value)


def test_a_stopped_rank_is_a_timeout_and_reset_mends_it() -> None:
    ranks = start_ranks(_stopped, 3, 2.0)
    ranks.wait_for(1, 1)
    os.kill(ranks.pid(1), signal.SIGSTOP)
    time.sleep(2.4)
    os.kill(ranks.pid(1), signal.SIGCONT)
    results = ranks.join()
    assert [r.exit_code for r in results] == [0, 0, 0], [r.trace for r in results]
    for rank in (0, 2):
        waited, text = results[rank].value
        assert waited < 2.8
        assert "ranks [1] did not come within 2 s" in text
        assert "call 2 (all_reduce float32 4000 B, cpu)" in text


CALLS = {
    "size": (lambda g: g.all_reduce(torch.ones(8)), lambda g: g.all_reduce(torch.ones(9))),
    "pieces": (lambda g: g.all_reduce(torch.ones(8)), lambda g: g.all_reduce(torch.ones(3_000_000))),
    "dtype": (lambda g: g.all_reduce(torch.ones(8)), lambda g: g.all_reduce(torch.ones(8, dtype=torch.bfloat16))),
    "provider": (lambda g: g.all_reduce(torch.ones(8)), lambda g: g.all_reduce(torch.ones(8, dtype=torch.int32))),
    "operation": (lambda g: g.all_reduce(torch.ones(12)), lambda g: g.all_gather(torch.ones(12))),
    "scatter": (lambda g: g.all_gather(torch.ones(12)), lambda g: g.reduce_scatter(torch.ones(12))),
    "source": (lambda g: g.broadcast(torch.ones(8), 0), lambda g: g.broadcast(torch.ones(8), 1)),
    "both torch": (
        lambda g: g.all_reduce(torch.ones(8, dtype=torch.int32)),
        lambda g: g.all_reduce(torch.ones(8, dtype=torch.int64)),
    ),
}


def _mismatch(rank: int, odd: int) -> None:
    group = _group()
    for name, (usual, other) in CALLS.items():
        group.all_reduce(torch.ones(4))
        with pytest.raises(CollectiveMismatchError, match=r"rank \d calls .*, rank \d calls ") as e:
            (other if rank == odd else usual)(group)
        assert f"rank {odd} calls" in str(e.value), name
        with pytest.raises(CollectiveMismatchError):
            group.all_reduce(torch.ones(4))
        group.reset()
        assert torch.equal(group.all_reduce(torch.ones(4)), torch.full((4,), float(group.world_size)))
    group.destroy()


@pytest.mark.parametrize(("world_size", "odd"), [(2, 0), (2, 1), (3, 2)])
def test_different_calls_are_a_mismatch_on_all_ranks(world_size: int, odd: int) -> None:
    run_ranks(_mismatch, world_size, odd)


def _abort(rank: int, dtype: torch.dtype) -> float:
    group = _group()
    group.all_reduce(torch.ones(4, dtype=dtype))
    started = time.monotonic()
    if rank == 1:
        threading.Timer(0.4, group.abort, ("enough",)).start()
    if rank != 2:  # rank 2 does not come
        with pytest.raises(CollectiveAbortedError, match=r"rank 1 aborted \(enough\)"):
            group.all_reduce(torch.ones(100_000, dtype=dtype))
    else:
        time.sleep(0.8)
        with pytest.raises(CollectiveAbortedError, match="enough"):
            group.all_reduce(torch.ones(100_000, dtype=dtype))
    waited = time.monotonic() - started
    group.reset()
    for again in (torch.float32, torch.int32):
        assert group.all_reduce(torch.ones(4, dtype=again)).tolist() == [3, 3, 3, 3]
    group.destroy()
    return waited


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64], ids=["channel", "fallback"])
def test_abort_from_another_thread_ends_the_call_everywhere(dtype: torch.dtype) -> None:
    assert max(run_ranks(_abort, 3, dtype)) < 2


def _abort_inside_torch(rank: int) -> None:
    """Every rank has met in the channel; one then never enters the backend's collective."""
    group = _group()
    fallback = group._providers[-1]
    if rank == 1:
        fallback._await_host = lambda work: time.sleep(0.5)  # type: ignore[attr-defined]
        threading.Timer(0.2, group.abort, ("enough",)).start()
        original = dist.all_reduce
        dist.all_reduce = lambda *args, **kwargs: contextlib.nullcontext()
        with contextlib.suppress(AttributeError):
            group.all_reduce(torch.ones(3, dtype=torch.int64))
        dist.all_reduce = original
        del fallback._await_host  # type: ignore[attr-defined]
    else:
        with pytest.raises(CollectiveAbortedError, match="enough"):
            group.all_reduce(torch.ones(3, dtype=torch.int64))
    group.reset()
    assert group.all_reduce(torch.ones(3, dtype=torch.int64)).tolist() == [2, 2, 2]
    group.destroy()


def test_abort_releases_a_rank_inside_the_backends_collective() -> None:
    run_ranks(_abort_inside_torch, 2)


def _two_threads(rank: int) -> None:
    group = _group()
    release = threading.Event()
    outcomes: list[str] = []
    if rank == 0:
        thread = threading.Thread(target=lambda: outcomes.append(str(group.all_reduce(torch.ones(2)).tolist())))
        thread.start()
        while not group._channel._user:  # type: ignore[union-attr]
            time.sleep(0.001)
        with pytest.raises(ChannelError, match="two threads"):
            group.all_reduce(torch.ones(2))
        say()
        thread.join()
        assert outcomes == ["[2.0, 2.0]"]
    else:
        time.sleep(0.5)
        assert group.all_reduce(torch.ones(2)).tolist() == [2, 2]
    release.set()
    group.destroy()


def test_a_second_thread_is_refused_and_the_first_goes_on() -> None:
    run_ranks(_two_threads, 2)


def _destroyed_inside_a_call(rank: int) -> None:
    group = _group()
    if rank == 0:
        errors: list[str] = []

        def call() -> None:
            try:
                group.all_reduce(torch.ones(2))
            except TpOverlapError as e:
                errors.append(f"{type(e).__name__}: {e}")

        thread = threading.Thread(target=call)
        thread.start()
        while not group._channel._user:  # type: ignore[union-attr]
            time.sleep(0.001)
        time.sleep(0.05)
        group.destroy()
        thread.join()
        assert len(errors) == 1
        assert "CollectiveAbortedError" in errors[0]
        assert "rank 0 destroyed the group during its call" in errors[0]
    else:
        time.sleep(0.5)
        with pytest.raises(CollectiveAbortedError, match="rank 0 destroyed the group"):
            group.all_reduce(torch.ones(2))
        group.destroy()


def test_destroy_ends_a_call_of_another_thread() -> None:
    run_ranks(_destroyed_inside_a_call, 2)


def _abort_beside_destroy(rank: int) -> None:
    problems: list[BaseException] = []
    for i in range(40):
        group = _group()
        channel = group._channel
        assert channel is not None
        stop = threading.Event()

        def keep_aborting(channel: Channel = channel, stop: threading.Event = stop) -> None:
            try:
                while not stop.is_set():
                    channel.abort("again")
            except BaseException as e:
                problems.append(e)

        thread = threading.Thread(target=keep_aborting)
        thread.start()
        time.sleep(0.001 * (i % 4))
        group.destroy()
        stop.set()
        thread.join()
    assert not problems, problems[0]


def test_abort_beside_destroy_does_no_harm() -> None:
    run_ranks(_abort_beside_destroy, 2)


def _failing_watcher(rank: int) -> None:
    group = _group(1.0)
    channel = group._channel
    assert channel is not None
    if rank == 0:
        look = channel._look_for_failure

        def fail_once() -> None:
            channel._look_for_failure = look  # type: ignore[method-assign]
            raise ValueError("planted")

        channel._look_for_failure = fail_once  # type: ignore[method-assign]
    with pytest.raises(CollectiveAbortedError, match=r"the watcher of rank 0 failed: ValueError\('planted'\)"):
        _check_until_it_fails(group)
    group.reset()
    assert group.all_reduce(torch.ones(4)).tolist() == [2] * 4
    if rank == 0:
        with pytest.raises(CollectiveTimeoutError, match=r"ranks \[1\] did not come within 1 s"):
            group.all_reduce(torch.ones(4))
    dist.barrier()
    group.destroy()


def test_an_error_in_a_watcher_ends_the_calls_and_it_watches_on() -> None:
    run_ranks(_failing_watcher, 2)


def _late_backend(rank: int) -> None:
    """Rank 1 enters the backend's collective only when the group was aborted, reset and used again."""
    group = _group()
    old_group = group.cpu_group
    x = torch.full((3,), 1)
    if rank == 0:
        threading.Timer(0.3, group.abort, ("enough",)).start()
    else:
        group._torch._await_host = lambda work: None  # type: ignore[method-assign]
        group._torch.finish = lambda operation, x, launch: _check_until_it_fails(group)  # type: ignore[method-assign]
    with pytest.raises(CollectiveAbortedError, match="enough"):
        group.all_reduce(x, out=x)
    group.reset()
    assert group.all_reduce(torch.ones(3)).tolist() == [2, 2, 2]
    x.fill_(5)
    if rank == 1:
        old_group.allreduce([torch.full((3,), 70)]).wait()
    group.barrier()
    time.sleep(0.2)
    assert x.tolist() == [5, 5, 5]
    group.destroy()


def _check_until_it_fails(group: GroupCoordinator) -> None:
    while True:
        group.check()
        time.sleep(0.005)


def test_a_backend_that_ends_late_does_not_write_into_the_callers_tensor() -> None:
    run_ranks(_late_backend, 2)


def _incomplete_reset(rank: int) -> None:
    group = _group(1.0)
    if rank == 0:
        group.abort("planted")
    with pytest.raises(CollectiveAbortedError):
        group.all_reduce(torch.ones(2))
    if rank == 0:
        with pytest.raises(CollectiveTimeoutError, match=r"ranks \[1\] did not come"):
            group.reset()
        with pytest.raises(TpOverlapError, match="reset"):
            group.all_reduce(torch.ones(2))
    dist.barrier()
    group.reset()
    assert group.all_reduce(torch.ones(2)).tolist() == [2, 2]
    group.destroy()


def test_a_reset_that_a_rank_misses_is_a_timeout_and_can_be_repeated() -> None:
    run_ranks(_incomplete_reset, 2)


def _half_a_reset(rank: int) -> None:
    """Rank 1 stops where rank 0 has restored its part already."""
    group = _group(1.0)
    channel = group._channel
    assert channel is not None
    group.abort("planted")
    if rank == 1:
        channel._restore, restore = (lambda: time.sleep(1.5)), channel._restore  # type: ignore[method-assign]
        with contextlib.suppress(CollectiveTimeoutError):
            group.reset()
        channel._restore = restore  # type: ignore[method-assign]
    else:
        with pytest.raises(CollectiveTimeoutError, match=r"ranks \[1\] did not come"):
            group.reset()
    with pytest.raises(CollectiveAbortedError, match="planted"):
        group.all_reduce(torch.ones(2))
    dist.barrier()
    group.reset()
    assert group.all_reduce(torch.ones(2)).tolist() == [2, 2]
    group.destroy()


def test_no_call_begins_after_half_a_reset() -> None:
    run_ranks(_half_a_reset, 2)


def _until(condition: Callable[[], bool]) -> None:
    while not condition():
        time.sleep(0.002)


def _interrupt_this_thread_when(condition: Callable[[], bool]) -> list[float]:
    """Ctrl-C a moment after the condition holds; the list gets the time."""
    me, sent_at = threading.get_ident(), []

    def interrupt() -> None:
        _until(condition)
        time.sleep(0.1)
        sent_at.append(time.monotonic())
        signal.pthread_kill(me, signal.SIGINT)

    threading.Thread(target=interrupt).start()
    return sent_at


def _interrupted(rank: int, dtype: torch.dtype) -> None:
    group = _group()
    for i in range(3):
        group.all_reduce(torch.full((4,), i, dtype=dtype))
    dist.barrier()
    x = torch.ones(4, dtype=dtype)
    if rank == 0:
        sent_at = _interrupt_this_thread_when(lambda: group._channel._user)  # type: ignore[union-attr]
        with pytest.raises(KeyboardInterrupt):
            group.all_reduce(x)
        assert time.monotonic() - sent_at[0] < 2
    else:
        _until(lambda: group.failed)
    for _ in range(3):  # none of these may return what was meant for another call
        with pytest.raises(CollectiveAbortedError, match="KeyboardInterrupt during all_reduce"):
            group.all_reduce(x)
    group.reset()
    for i in range(3):
        assert group.all_reduce(x * i).tolist() == [2 * i] * 4
    group.destroy()


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64], ids=["channel", "fallback"])
def test_a_call_that_is_interrupted_ends_on_every_rank_and_no_sum_is_wrong(dtype: torch.dtype) -> None:
    run_ranks(_interrupted, 2, dtype)


def _interrupted_receive(rank: int) -> None:
    group = _group()
    if rank == 0:
        _interrupt_this_thread_when(lambda: any("gloo-wait" in t.name for t in threading.enumerate()))
        with pytest.raises(KeyboardInterrupt):
            group.recv((3,), torch.float32, 1)
        with pytest.raises(CollectiveAbortedError, match="KeyboardInterrupt during recv from rank 1"):
            group.recv((3,), torch.float32, 1)
    else:
        _until(lambda: group.failed)
        with pytest.raises(CollectiveAbortedError, match="KeyboardInterrupt during recv from rank 1"):
            group.send(torch.ones(3), 0)
    group.reset()
    if rank == 0:
        assert group.recv((3,), torch.float32, 1).tolist() == [2, 2, 2]
    else:
        group.send(torch.full((3,), 2.0), 0)
    group.destroy()


def test_an_interrupted_receive_ends_on_every_rank() -> None:
    run_ranks(_interrupted_receive, 2)


def _receive_without_sender(rank: int) -> None:
    group = _group(1.0)
    if rank == 0:
        started = time.monotonic()
        with pytest.raises(CollectiveTimeoutError, match="recv from rank 1"):
            group.recv((3,), torch.float32, 1)
        assert time.monotonic() - started < 3
    dist.barrier()
    with pytest.raises(CollectiveTimeoutError, match="recv from rank 1"):
        group.all_reduce(torch.ones(2))
    dist.barrier()
    group.reset()
    assert group.all_reduce(torch.ones(2, dtype=torch.int64)).tolist() == [2, 2]
    group.destroy()


def test_a_receive_without_a_sender_is_a_timeout_and_reset_mends_it() -> None:
    run_ranks(_receive_without_sender, 2)


def _cascade(rank: int) -> str:
    """Rank 1 is killed; rank 0 ends at once when it learns of it; rank 2 and 3 look only afterwards."""
    group = _group()
    group.all_reduce(torch.ones(4))
    say()
    if rank == 1:
        time.sleep(60)
    if rank == 0:
        with pytest.raises(PeerLostError, match="rank 1 died"):
            group.all_reduce(torch.ones(4))
        os._exit(9)
    time.sleep(1.5)
    with pytest.raises(PeerLostError) as e:
        group.all_reduce(torch.ones(4))
    group.destroy()
    return str(e.value)


def test_ranks_that_end_in_consequence_are_not_blamed() -> None:
    ranks = start_ranks(_cascade, 4)
    _kill(ranks, 1)
    results = ranks.join()
    assert [r.exit_code for r in results] == [9, -signal.SIGKILL, 0, 0]
    for result in results[2:]:
        assert "rank 1 died" in result.value


def _killed_in_reset(rank: int) -> float:
    group = _group()
    group.abort("planted")
    with pytest.raises(CollectiveAbortedError):
        group.all_reduce(torch.ones(4))
    say()
    if rank == 1:
        time.sleep(60)
    with pytest.raises(PeerLostError, match="rank 1 died"):
        group.reset()
    at = time.monotonic()
    for call in (lambda: group.all_reduce(torch.ones(4)), group.reset):
        with pytest.raises(PeerLostError, match="rank 1 died"):
            call()
    group.destroy()
    return at


def test_a_rank_killed_while_the_others_reset_is_named() -> None:
    ranks = start_ranks(_killed_in_reset, 3)
    killed_at = _kill(ranks, 1)
    results = ranks.join()
    for rank in (0, 2):
        assert results[rank].exit_code == 0, results[rank].trace
        assert results[rank].value - killed_at < 2


def _without_store(rank: int) -> None:
    group = _group()
    say()
    while True:
        try:
            dist.distributed_c10d._get_default_store().num_keys()
            time.sleep(0.05)
        except dist.DistError:
            break
    for _ in range(3):
        assert group.all_reduce(torch.ones(4)).tolist() == [2] * 4
        assert group.all_reduce(torch.ones(4, dtype=torch.int64)).tolist() == [2] * 4
    group.abort("planted")
    with pytest.raises(CollectiveAbortedError):
        group.all_reduce(torch.ones(4))
    with pytest.raises(ChannelError, match="store does not answer"):
        group.reset()
    with pytest.raises(TpOverlapError):
        group.all_reduce(torch.ones(4))
    group.destroy()


def test_without_its_store_a_group_works_on_and_cannot_be_reset() -> None:
    ranks = start_ranks(_without_store, 2)
    for rank in range(2):
        ranks.wait_for(rank)
    del ranks._store
    results = ranks.join()
    assert [r.exit_code for r in results] == [0, 0], [r.trace for r in results]


def _forked(rank: int) -> None:
    group = _group()
    off = GroupCoordinator([0, 1], rank, "cpu", HostReduceConfig(max_bytes=0, copy_engine_max_bytes=0))
    calls = [
        lambda: group.all_reduce(torch.ones(2)),
        lambda: group.all_reduce(torch.ones(2, dtype=torch.int64)),
        lambda: group.send(torch.ones(2), 1 - rank),
        lambda: group.recv((2,), torch.float32, 1 - rank),
        lambda: off.all_reduce(torch.ones(2)),
        group.reset,
    ]
    pid = os.fork()
    if pid == 0:
        refused = 0
        try:
            for call in calls:
                try:
                    call()
                except ChannelError as e:
                    refused += "fork" in str(e)
            group.destroy()
        finally:
            os._exit(0 if refused == len(calls) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert group.all_reduce(torch.ones(2)).tolist() == [2, 2]
    assert off.all_reduce(torch.ones(2)).tolist() == [2, 2]
    group.destroy()
    for call in calls[:4]:
        with pytest.raises(ChannelError, match="destroyed"):
            call()
    off.destroy()


def test_a_fork_may_not_use_the_group_and_does_not_harm_it() -> None:
    run_ranks(_forked, 2)


def _runs(rank: int) -> None:
    group = _group()
    for _ in range(2):
        group.begin_run()
        group.all_reduce(torch.ones(2))
        dist.barrier()
        if rank == 1:
            group.begin_run()
            group.abort("in the next run", raised=True)
        dist.barrier()
        if rank == 0:
            group.end_run()  # its own run was sound
            group.begin_run()
        with pytest.raises(CollectiveAbortedError, match="in the next run"):
            group.end_run()
        group.reset()
        group.end_run()
    group.begin_run()
    dist.barrier()
    if rank == 1:
        group.abort("in this run")
    dist.barrier()
    with pytest.raises(CollectiveAbortedError, match="in this run"):
        group.end_run()
    group.destroy()


def test_a_failure_in_a_peers_next_run_is_not_that_of_this_one() -> None:
    run_ranks(_runs, 2)
