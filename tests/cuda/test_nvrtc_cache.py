"""The compile cache: what an entry depends on, who may have written it, and ranks that need it at the same time."""

from __future__ import annotations

import multiprocessing
import os
import stat
import time
from pathlib import Path

import pytest

from tpoverlap.cuda import nvrtc
from tpoverlap.errors import ConfigError, UnsupportedError

SOURCE = 'extern "C" __global__ void fill(float* x, float value) { x[threadIdx.x] = value; }\n'
FACTS = {"source": SOURCE, "name": "fill.cu", "arch": "sm_75", "options": ("-DN=1",), "compiler": (13, 0)}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(nvrtc.CACHE_DIR_VARIABLE, str(tmp_path / "cache"))
    return tmp_path / "cache" / "nvrtc"


@pytest.fixture
def compilations(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Architectures that were really compiled for, in order; NVRTC itself is replaced."""
    done: list[str] = []

    def compile_(source: str, name: str, arch: str, options: object) -> bytes:
        done.append(arch)
        return f"{arch} {len(done)}".encode()

    monkeypatch.setattr(nvrtc, "_compile", compile_)
    monkeypatch.setattr(nvrtc, "nvrtc_version", lambda: (13, 0))
    return done


def entries(folder: Path) -> list[Path]:
    return [path for path in folder.iterdir() if path.suffix != ".lock"]


def get(**changes: object) -> bytes:
    facts = {key: value for key, value in (FACTS | changes).items() if key != "compiler"}
    return nvrtc.compile_cuda(facts.pop("source"), **facts)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "change",
    [
        {"source": SOURCE + " "},
        {"arch": "compute_75"},
        {"options": ("-DN=2",)},
        {"options": ("-DN", "=1")},
        {"options": ()},
        {"name": "other.cu"},
        {"compiler": (13, 1)},
    ],
    ids=str,
)
def test_key_depends_on_everything_that_decides_the_bytes(change: dict[str, object]) -> None:
    key = nvrtc.cache_key(**FACTS)  # type: ignore[arg-type]
    assert key == nvrtc.cache_key(**dict(FACTS))  # type: ignore[arg-type]
    assert key != nvrtc.cache_key(**(FACTS | change))  # type: ignore[arg-type]


def test_second_call_reads_what_the_first_compiled(folder: Path, compilations: list[str]) -> None:
    first = get()
    assert get() == first
    assert compilations == ["sm_75"]
    get(arch="compute_75")
    assert compilations == ["sm_75", "compute_75"]
    assert len(entries(folder)) == 2


def test_a_compiler_update_compiles_anew(
    folder: Path, compilations: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    get()
    monkeypatch.setattr(nvrtc, "nvrtc_version", lambda: (13, 1))
    get()
    assert len(compilations) == 2


@pytest.mark.parametrize("damage", ["empty", "truncated", "flipped", "foreign", "public", "symlink", "folder"])
@pytest.mark.filterwarnings("ignore:the kernel cache:RuntimeWarning")
def test_a_broken_entry_is_rebuilt(folder: Path, compilations: list[str], damage: str, tmp_path: Path) -> None:
    first = get()
    (entry,) = entries(folder)
    data = entry.read_bytes()
    if damage == "empty":
        entry.write_bytes(b"")
    elif damage == "truncated":
        entry.write_bytes(data[:-1])
    elif damage == "flipped":
        entry.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    elif damage == "foreign":
        entry.write_bytes(b"#!/bin/sh\n" + data)
    elif damage == "public":
        entry.chmod(0o666)
    elif damage == "symlink":
        target = tmp_path / "elsewhere"
        entry.rename(target)
        entry.symlink_to(target)
    else:
        entry.unlink()
        entry.mkdir()
    second = get()
    assert len(compilations) == 2
    assert second != first
    if damage != "folder":  # A folder in the entry's place cannot be replaced by a rename.
        assert get() == second
        assert len(compilations) == 2
        assert stat.S_IMODE(entry.stat().st_mode) == 0o600


def test_entries_and_folders_are_private_whatever_the_umask(folder: Path, compilations: list[str]) -> None:
    before = os.umask(0)
    try:
        get()
    finally:
        os.umask(before)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert all(stat.S_IMODE(path.stat().st_mode) == 0o600 for path in folder.iterdir())


@pytest.mark.parametrize("level", ["folder", "parent"])
@pytest.mark.parametrize("mode", [0o770, 0o707, 0o777])
def test_a_folder_that_others_can_write_is_refused(
    folder: Path, compilations: list[str], level: str, mode: int
) -> None:
    get()
    (folder if level == "folder" else folder.parent).chmod(mode)
    with pytest.raises(ConfigError, match="writable by nobody else"):
        get()
    (folder if level == "folder" else folder.parent).chmod(0o755)
    get()
    assert len(compilations) == 1


def test_a_folder_of_another_user_is_refused(
    folder: Path, compilations: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    get()
    owner = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    with pytest.raises(ConfigError, match=f"owner {owner}"):
        get()


def test_a_link_in_the_folders_place_is_refused(folder: Path, compilations: list[str], tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    folder.parent.mkdir(mode=0o700)
    folder.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match=nvrtc.CACHE_DIR_VARIABLE):
        get()


def test_an_unusable_default_folder_is_warned_about_and_does_without(
    compilations: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "tpoverlap").write_text("a file where the folder should be")
    monkeypatch.delenv(nvrtc.CACHE_DIR_VARIABLE, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.warns(RuntimeWarning, match="compiled anew"):
        get()
    get()
    assert len(compilations) == 2


def test_where_the_folder_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv(nvrtc.CACHE_DIR_VARIABLE, raising=False)
    assert nvrtc.cache_folder() == Path("/home/someone/.cache/tpoverlap/nvrtc")
    monkeypatch.setenv("XDG_CACHE_HOME", "/var/cache/someone")
    assert nvrtc.cache_folder() == Path("/var/cache/someone/tpoverlap/nvrtc")
    monkeypatch.setenv(nvrtc.CACHE_DIR_VARIABLE, "/data/kernels")
    assert nvrtc.cache_folder() == Path("/data/kernels/nvrtc")


def test_a_stopped_holder_of_the_lock_delays_but_does_not_block(
    folder: Path, compilations: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nvrtc, "_LOCK_WAIT_S", 0.2)
    get(arch="compute_75")
    key = nvrtc.cache_key(**FACTS)  # type: ignore[arg-type]
    descriptor = nvrtc._open_folder()
    try:
        with nvrtc._locked(descriptor, key):
            begin = time.monotonic()
            get()
            assert 0.15 < time.monotonic() - begin < 5
    finally:
        os.close(descriptor)
    assert compilations == ["compute_75", "sm_75"]


def _rank(log: str, start: object) -> None:
    def compile_(source: str, name: str, arch: str, options: object) -> bytes:
        with open(log, "a") as file:
            file.write(f"{os.getpid()}\n")
        time.sleep(0.3)
        return b"image" * 10_000

    nvrtc._compile = compile_  # type: ignore[assignment]
    nvrtc.nvrtc_version = lambda: (13, 0)  # type: ignore[assignment]
    start.wait()  # type: ignore[attr-defined]
    assert get() == b"image" * 10_000


def test_eight_ranks_at_once_compile_once(folder: Path, tmp_path: Path) -> None:
    fork = multiprocessing.get_context("fork")
    barrier = fork.Barrier(8)
    ranks = [fork.Process(target=_rank, args=(str(tmp_path / "log"), barrier)) for _ in range(8)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(60)
    assert [rank.exitcode for rank in ranks] == [0] * 8
    assert len((tmp_path / "log").read_text().split()) == 1
    assert len(entries(folder)) == 1


@pytest.fixture
def compiler(folder: Path) -> None:
    try:
        nvrtc.nvrtc_version()
    except UnsupportedError as error:
        pytest.skip(str(error))


@pytest.mark.usefixtures("compiler")
class TestCompiler:
    def test_machine_code_and_ptx(self) -> None:
        assert get(arch="sm_75").startswith(b"\x7fELF")
        assert b".entry fill" in get(arch="compute_75")

    def test_a_wrong_source_shows_the_log_and_leaves_no_entry(self, folder: Path) -> None:
        with pytest.raises(nvrtc.KernelCompileError, match=r"broken\.cu for sm_75[\s\S]*undefined"):
            get(source="__global__ void f() { undefined(); }", name="broken.cu")
        assert entries(folder) == []

    def test_an_unknown_architecture_names_the_known_ones(self) -> None:
        with pytest.raises(UnsupportedError, match=r"sm_35; it knows \[.*75"):
            get(arch="sm_35")
        with pytest.raises(ValueError, match="compute_NN"):
            get(arch="turing")
