"""The shared segment: which kind serves where, what is refused, what is left behind (nothing), what it costs."""

from __future__ import annotations

import ctypes
import dataclasses
import fcntl
import logging
import os
import resource
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rank_harness import RankResult, run_ranks, say, start_ranks

from tpoverlap.comm import GroupCoordinator, Reason, rendezvous
from tpoverlap.comm.channel import Channel
from tpoverlap.comm.host import HostIdentity, host_identity
from tpoverlap.comm.layout import HEADER, Layout
from tpoverlap.comm.rendezvous import StoreExchange, check_header
from tpoverlap.comm.segment import Segment
from tpoverlap.config import HostReduceConfig
from tpoverlap.errors import ChannelError, CollectiveTimeoutError

LAYOUT = Layout(2, 65536)
NONCE = bytes(range(16))
_CLONE_NEWPID, _PR_SET_DUMPABLE, _NOBODY = 0x20000000, 4, 65534


def _group(timeout_s: float = 20.0, **config: Any) -> GroupCoordinator:
    config = HostReduceConfig(timeout_s=timeout_s, **config)
    return GroupCoordinator(range(dist.get_world_size()), dist.get_rank(), "cpu", config)


def _exchange(timeout_s: float = 20.0) -> StoreExchange:
    assert dist.group.WORLD is not None
    store = dist.PrefixStore("tested", dist.group.WORLD.get_group_store())
    return StoreExchange(store, dist.get_rank(), dist.get_world_size(), timeout_s)


def _files_in_shm() -> list[str]:
    return [name for name in os.listdir("/dev/shm") if name.startswith("tpoverlap")]


def _works(group: GroupCoordinator) -> None:
    assert group.all_reduce(torch.ones(5)).tolist() == [float(group.world_size)] * 5


class Log(logging.Handler):
    """What the package has logged at warning level while this handler was installed."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []
        logging.getLogger("tpoverlap").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


# One segment


@pytest.mark.parametrize("kind", ["memfd", "named"])
def test_a_segment_is_private_fully_allocated_and_gone_when_closed(kind: Any, tmp_path: Path) -> None:
    before = set(os.listdir("/proc/self/fd"))
    made = Segment.create(3 << 20, kind, directory=str(tmp_path))
    opened = Segment.open(made.path, 3 << 20, kind)
    facts = os.fstat(made.fd)
    assert stat.S_IMODE(facts.st_mode) & 0o077 == 0 or kind == "memfd"  # a memfd has no name to open it by
    assert facts.st_blocks * 512 >= 3 << 20
    assert fcntl.fcntl(made.fd, fcntl.F_GETFD) & fcntl.FD_CLOEXEC
    if kind == "memfd":
        for size in (0, 4 << 20):
            with pytest.raises(OSError, match="not permitted"):
                os.ftruncate(opened.fd, size)
    made.words[100] = 0xABCD
    opened.tensor[7] = 9
    assert opened.words[100] == 0xABCD
    assert made.bytes[7] == 9
    made.unlink()
    made.unlink()
    assert list(tmp_path.iterdir()) == []
    opened.close()
    made.close()
    made.close()
    assert set(os.listdir("/proc/self/fd")) == before


def _foreign(directory: Path, name: str) -> tuple[Path, int, bytes]:
    """A file, the size expected of it, and the words that its refusal must contain."""
    path = directory / name
    header = bytearray(LAYOUT.header(NONCE))
    fields = list(HEADER.unpack(header))
    if name == "magic":
        fields[0] = b"GARBAGE!"
    elif name == "version":
        fields[1] += 1
    elif name == "world size":
        fields[2] = 3
    elif name == "cpu slot":
        fields[4] *= 2
    elif name == "nonce":
        fields[-1] = bytes(16)
    size = LAYOUT.size + (4096 if name == "size" else 0)
    path.write_bytes(HEADER.pack(*fields).ljust(size, b"\0"))
    return path, size, bytes(HEADER.pack(*fields))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("magic", "not a tpoverlap segment"),
        ("version", "has protocol version .* install the same tpoverlap"),
        ("world size", r"belongs to another group: world size 3 \(expected 2\)"),
        ("cpu slot", "belongs to another group: cpu slot"),
        ("nonce", "belongs to another group: nonce"),
    ],
)
def test_a_corrupted_or_foreign_header_is_refused_and_nothing_is_written(tmp_path: Path, name: str, words: str) -> None:
    path, size, _ = _foreign(tmp_path, name)
    before = path.read_bytes()
    segment = Segment.open(str(path), size, "named")
    with pytest.raises(ChannelError, match=words):
        check_header(segment, LAYOUT, NONCE)
    segment.close()
    assert path.read_bytes() == before


def test_the_right_header_is_accepted(tmp_path: Path) -> None:
    path, size, _ = _foreign(tmp_path, "right")
    segment = Segment.open(str(path), size, "named")
    check_header(segment, LAYOUT, NONCE)
    segment.close()


def test_a_segment_of_another_size_or_user_or_none_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, size, _ = _foreign(tmp_path, "size")
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(ChannelError, match=f"not this group's segment: {size} bytes .* expected {LAYOUT.size} bytes"):
        Segment.open(str(path), LAYOUT.size, "named")
    with pytest.raises(ChannelError, match="No such file"):
        Segment.open(str(tmp_path / "absent"), LAYOUT.size, "named")
    me = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: me + 1)
    with pytest.raises(ChannelError, match=f"of user {me}, expected .* of user {me + 1}"):
        Segment.open(str(path), size, "named")
    assert len(os.listdir("/proc/self/fd")) == before


# Which kind serves


def _kind(rank: int, prepare: Callable[[int], None], served_by: str) -> None:
    prepare(rank)
    group = _group()
    _works(group)
    assert group._channel is not None
    assert group._channel.segment.kind == served_by
    assert _files_in_shm() == []
    group.destroy()


def _refuse_memfd(rank: int) -> None:
    def refused(*args: object) -> int:
        raise PermissionError("memfd_create is not permitted")

    if rank == 0:
        os.memfd_create = refused  # type: ignore[assignment]


def _refuse_proc(rank: int) -> None:
    plain_open = os.open

    def guarded(path: Any, *args: Any, **kwargs: Any) -> int:
        if rank == 1 and str(path).startswith("/proc/"):
            raise PermissionError(13, "Permission denied")
        return plain_open(path, *args, **kwargs)

    os.open = guarded  # type: ignore[assignment]


def _nothing(rank: int) -> None:
    pass


@pytest.mark.parametrize(
    ("prepare", "served_by"), [(_nothing, "memfd"), (_refuse_memfd, "named"), (_refuse_proc, "named")]
)
def test_a_memory_file_is_preferred_and_a_named_one_serves_where_it_cannot(
    prepare: Callable[[int], None], served_by: str
) -> None:
    run_ranks(_kind, 3, prepare, served_by)


def _unreadable_proc(rank: int, port: int) -> None:
    """The system itself refuses /proc/<pid>/fd of a process that is not dumpable, as hardened containers have it."""
    if os.geteuid() == 0:
        os.setgid(_NOBODY)
        os.setuid(_NOBODY)
    ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    _kind(rank, _nothing, "named")


def test_processes_whose_proc_is_closed_to_their_peers_use_a_named_segment() -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    run_ranks(_unreadable_proc, 2, store.port, init=False)


def _no_kind(rank: int, culprit: int) -> list[str]:
    if rank == culprit:
        if rank == 0:
            resource.setrlimit(resource.RLIMIT_FSIZE, (65536, resource.RLIM_INFINITY))
        else:
            Segment.open = _refused_open  # type: ignore[method-assign,assignment]
    held = len(os.listdir("/proc/self/fd"))
    with pytest.raises(ChannelError) as e:
        Channel("tested", rank, _exchange(), LAYOUT, 20.0)
    assert len(os.listdir("/proc/self/fd")) == held
    log = Log()
    group = _group()
    for _ in range(3):
        _works(group)
    assert group.rejection_reasons(torch.ones(1)) == {"cpu": Reason.CHANNEL_FAILED, "torch": None}
    assert group.served == {"torch": 3}
    assert group._channel is None
    group.check()
    group.abort("nobody is there to hear it")
    group.reset()
    _works(group)
    group.destroy()
    assert _files_in_shm() == []
    return [str(e.value), *log.lines]


def _refused_open(path: str, size: int, kind: str) -> Segment:
    raise ChannelError(f"planted: cannot open {kind}")


@pytest.mark.parametrize(
    ("culprit", "words"),
    [
        (0, ["memfd, rank 0: the group's shared segment needs", "File too large", "copy_engine_max_bytes"]),
        (1, ["memfd, rank 1: planted: cannot open memfd", "named, rank 1: planted: cannot open named"]),
    ],
)
def test_where_no_kind_serves_every_rank_says_so_once_and_torch_serves(culprit: int, words: list[str]) -> None:
    outcomes = run_ranks(_no_kind, 3, culprit)
    assert len({error for error, *_ in outcomes}) == 1, "not alike on all ranks"
    for error, *lines in outcomes:
        assert len(lines) == 1, lines
        assert "torch.distributed serves" in lines[0]
        for word in words:
            assert word in error
            assert word in lines[0]


def _bad_offer(rank: int, planted: str) -> list[str]:
    """Rank 1 comes upon something else than what rank 0 has made."""
    opened = Segment.open
    if planted == "stale" and rank == 1:
        stale = Segment.create(LAYOUT.size, "memfd")
        stale.bytes[: HEADER.size] = LAYOUT.header(NONCE)

        def open_stale(path: str, size: int, kind: Any) -> Segment:
            return opened(stale.path, size, kind)

        Segment.open = open_stale  # type: ignore[method-assign,assignment]
    if planted == "corrupted" and rank == 0:
        header = Layout.header
        Layout.header = lambda self, nonce: b"\0" * 8 + header(self, nonce)[8:]  # type: ignore[method-assign]
    with pytest.raises(ChannelError) as e:
        Channel("tested", rank, _exchange(), LAYOUT, 20.0)
    log = Log()
    group = _group()
    _works(group)
    assert group.served == {"torch": 1}
    group.destroy()
    assert len(log.lines) == 1
    return [str(e.value)]


@pytest.mark.parametrize(
    ("planted", "words"), [("stale", "belongs to another group: nonce"), ("corrupted", "not a tpoverlap segment")]
)
def test_a_stale_or_corrupted_segment_is_never_used(planted: str, words: str) -> None:
    errors = run_ranks(_bad_offer, 2, planted)
    assert errors[0] == errors[1]
    assert "memfd, rank 1" in errors[0][0]
    assert words in errors[0][0]


# Little space, other namespaces (the system's own, where it lets us make them)


def _inside(namespaces: str, setup: str, function: Callable[[], None]) -> None:
    """Runs ``function`` of this file in a child process in namespaces of its own, which ``setup`` (sh) prepares."""
    user = [] if os.geteuid() == 0 else ["--map-root-user"]
    unshare = ["unshare", *user, *namespaces.split(), "sh", "-ec"]
    if subprocess.run([*unshare, setup], capture_output=True).returncode != 0:
        pytest.skip("this machine does not let us make namespaces; the tests above simulate what they show")
    here = Path(__file__).parent
    code = f"import sys; sys.path[:0] = [{str(here)!r}, {str(here.parent)!r}]; import {Path(__file__).stem} as t\n"
    code += f"if __name__ == '__main__': t.{function.__name__}()"
    run = subprocess.run(
        [*unshare, f'{setup}; exec "$0" -c "$1"', sys.executable, code], capture_output=True, text=True
    )
    assert run.returncode == 0, run.stdout + run.stderr


_FULL_SHM = "mount -t tmpfs -o size=64m tmpfs /dev/shm; head -c 60M /dev/zero > /dev/shm/others"


def _full_shm_ranks(rank: int, memfd: bool) -> list[str]:
    """4 MiB are free in /dev/shm and 8.3 MiB are needed."""
    if not memfd:
        _refuse_memfd(rank)
    log = Log()
    group = _group()
    _works(group)
    assert group.served == {"cpu" if memfd else "torch": 1}
    assert group.rejection_reasons(torch.ones(1))["cpu"] == (None if memfd else Reason.CHANNEL_FAILED)
    group.destroy()
    assert _files_in_shm() == []
    return log.lines


def full_shm() -> None:
    with pytest.raises(ChannelError, match=r"needs 128\.0 MiB, /dev/shm has 4\.0 MiB free: enlarge it .*--shm-size"):
        Segment.create(128 << 20, "named")
    assert os.statvfs("/dev/shm").f_blocks * os.statvfs("/dev/shm").f_frsize == 64 << 20
    assert run_ranks(_full_shm_ranks, 2, True) == [[], []]
    for lines in run_ranks(_full_shm_ranks, 2, False):
        assert len(lines) == 1
        assert "/dev/shm has 4.0 MiB free" in lines[0]
    assert os.listdir("/dev/shm") == ["others"]


def test_a_full_dev_shm_does_not_matter_to_a_memory_file_and_is_named_otherwise() -> None:
    _inside("--mount", _FULL_SHM, full_shm)


def _no_proc_ranks(rank: int) -> None:
    assert not os.path.exists("/proc/self")
    assert host_identity().boot_id.startswith("hostname:")
    _kind(rank, _nothing, "named")


def no_proc() -> None:
    run_ranks(_no_proc_ranks, 2)


def test_a_group_works_without_proc() -> None:
    _inside("--mount", "mount -t tmpfs tmpfs /proc", no_proc)


def _two_pid_namespaces(rank: int, port: int) -> None:
    if rank == 1:
        assert ctypes.CDLL(None, use_errno=True).unshare(_CLONE_NEWPID) == 0
        pid = os.fork()
        if pid:
            assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
            return
    failed = True
    try:
        store = dist.TCPStore("127.0.0.1", port, is_master=False)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
        _falls_to_torch(Reason.CHANNEL_FAILED, "different pid namespaces")
        failed = False
    finally:
        if rank == 1:
            os._exit(failed)
    dist.destroy_process_group()


def pid_namespaces() -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    run_ranks(_two_pid_namespaces, 2, store.port, init=False)


def test_ranks_of_different_pid_namespaces_fall_to_torch() -> None:
    _inside("--mount", "true", pid_namespaces)


def _falls_to_torch(reason: Reason, words: str) -> None:
    log = Log()
    group = _group()
    _works(group)
    assert group.served == {"torch": 1}
    assert group.rejection_reasons(torch.ones(1)) == {"cpu": reason, "torch": None}
    assert len(log.lines) == 1
    assert words in log.lines[0]
    group.destroy()


_ELSEWHERE = {
    "boot": ({"boot_id": "elsewhere"}, Reason.RANKS_ON_DIFFERENT_HOSTS, r"ranks [1] are on another host"),
    "network": ({"network_namespace": "net:[1]"}, Reason.RANKS_ON_DIFFERENT_HOSTS, "ranks [1] are on another host"),
    "pids": ({"pid_namespace": "pid:[1]"}, Reason.CHANNEL_FAILED, "different pid namespaces"),
}


def _elsewhere(rank: int, where: str) -> None:
    fields, reason, words = _ELSEWHERE[where]
    mine = dataclasses.replace(host_identity(), **fields) if rank == 1 else host_identity()
    with pytest.raises(ChannelError) as e:
        Channel("tested", rank, _exchange(), Layout(3, 65536), 20.0, host=mine)
    assert words in str(e.value)
    assert e.value.reason == reason
    rendezvous.host_identity = lambda: mine  # type: ignore[attr-defined]
    _falls_to_torch(reason, words)


@pytest.mark.parametrize("where", list(_ELSEWHERE))
def test_ranks_that_cannot_share_memory_say_so_alike_and_torch_serves(where: str) -> None:
    run_ranks(_elsewhere, 3, where)


@pytest.mark.parametrize(
    ("other", "same"),
    [
        (HostIdentity("a", "n", "p", 1), True),
        (HostIdentity("a", "n", "q", 2), True),
        (HostIdentity("b", "n", "p", 1), False),
        (HostIdentity("a", "m", "p", 1), False),
    ],
)
def test_one_host_means_one_boot_and_one_network(other: HostIdentity, same: bool) -> None:
    assert HostIdentity("a", "n", "p", 1).same_host(other) is same


# Ranks that do not come, or die, while the segment is being opened


def _dies_while_opening(rank: int, moment: str) -> None:
    _refuse_memfd(rank)  # only a named segment could leave something
    gather = StoreExchange.all_gather

    def gather_or_die(self: StoreExchange, key: str, *args: Any) -> list[Any]:
        if key == moment and rank == 0:
            say("about to die")
            os.kill(os.getpid(), signal.SIGKILL)
        return gather(self, key, *args)

    StoreExchange.all_gather = gather_or_die  # type: ignore[method-assign,assignment]
    held = len(os.listdir("/proc/self/fd"))
    with pytest.raises(CollectiveTimeoutError, match=r"ranks \[0\] did not come"):
        Channel("tested", rank, _exchange(1.0), LAYOUT, 1.0)
    assert len(os.listdir("/proc/self/fd")) <= held  # gloo closes its connection to the dead
    assert _files_in_shm() == []


@pytest.mark.parametrize("moment", ["opened/named", "channel"])
def test_a_rank_killed_while_the_segment_opens_leaves_nothing(moment: str) -> None:
    ranks = start_ranks(_dies_while_opening, 2, moment)
    ranks.wait_for(0, "about to die")
    results: list[RankResult] = ranks.join()
    assert results[0].exit_code == -signal.SIGKILL
    assert results[1].exit_code == 0, results[1].trace


def _absent_while_opening(rank: int, absent: int) -> None:
    _refuse_memfd(rank)
    if rank == absent:
        gather = StoreExchange.all_gather
        host = gather(_exchange(), "host", host_identity().to_dict())
        assert len(host) == 2
        time.sleep(1.5)
        return
    held = len(os.listdir("/proc/self/fd"))
    with pytest.raises(CollectiveTimeoutError, match=rf"ranks \[{absent}\] did not come"):
        Channel("tested", rank, _exchange(0.5), LAYOUT, 0.5)
    assert len(os.listdir("/proc/self/fd")) == held
    assert _files_in_shm() == []


@pytest.mark.parametrize("absent", [0, 1])
def test_a_rank_that_does_not_come_to_open_is_named_and_nothing_is_left(absent: int) -> None:
    run_ranks(_absent_while_opening, 2, absent)


# Several groups, many groups


def _two_groups_in_two_threads(rank: int) -> None:
    groups = [_group(), _group()]
    problems: list[BaseException] = []

    def use(k: int) -> None:
        try:
            for i in range(200):
                n = (i * 37 + k * 11) % 5000 + 1
                x = torch.full((n,), float(rank + 1 + 10 * k))
                assert torch.equal(groups[k].all_reduce(x), torch.full((n,), 3.0 + 20 * k))
        except BaseException as e:
            problems.append(e)

    threads = [threading.Thread(target=use, args=(k,)) for k in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not problems, problems
    groups[0].barrier()
    groups[1].barrier()
    groups[0].abort("only this one")
    with pytest.raises(RuntimeError, match="only this one"):
        groups[0].all_reduce(torch.ones(1))
    _works(groups[1])
    groups[0].reset()
    for group in groups:
        _works(group)
        group.destroy()


def test_two_groups_at_once_do_not_touch_each_other() -> None:
    run_ranks(_two_groups_in_two_threads, 2)


def _threads() -> int:
    """A joined thread takes a moment to end in the kernel."""
    return min((time.sleep(0.01), len(os.listdir("/proc/self/task")))[1] for _ in range(10))


def _rss_kib() -> int:
    with open("/proc/self/status") as f:
        return next(int(line.split()[1]) for line in f if line.startswith("VmRSS"))


def _cycles(rank: int, count: int) -> list[tuple[int, int, int]]:
    held = []
    for i in range(count):
        group = _group(max_bytes=65536, copy_engine_max_bytes=0)
        x = torch.full((1000,), float(i))
        assert torch.equal(group.all_reduce(x), x * 2)
        group.destroy()
        if i % (count // 5) == count // 5 - 1:
            held.append((len(os.listdir("/proc/self/fd")), _threads(), _rss_kib()))
    assert _files_in_shm() == []
    return held


def test_a_thousand_groups_leave_no_descriptor_no_thread_and_no_memory() -> None:
    for held in run_ranks(_cycles, 2, 1000, timeout_s=100):
        assert len({(fds, threads) for fds, threads, _ in held}) == 1, held
        assert held[-1][2] - held[0][2] < 2048, held  # KiB; one leaked mapping a cycle would be 200 MiB
