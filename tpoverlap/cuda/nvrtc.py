"""CUDA C++ to machine code or PTX by NVRTC, at first use, through a cache on disk.

An entry is named by the hash of everything that decides its bytes: source, options, architecture, compiler version. The
folder is ``$TPOVERLAP_CACHE_DIR/nvrtc``, by default ``$XDG_CACHE_HOME/tpoverlap/nvrtc``. What is loaded from there
runs with the user's rights, so folder and entry must belong to the user and be writable by nobody else. Ranks that need
one entry at the same time wait for the first one's compilation; entries appear by an atomic rename and carry a
checksum, and an entry that fails it is compiled anew.
"""

from __future__ import annotations

import errno
import fcntl
import functools
import hashlib
import os
import stat
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import ModuleType
from typing import Any

from tpoverlap.cuda.driver import import_bindings
from tpoverlap.errors import ConfigError, TpOverlapError, UnsupportedError

CACHE_DIR_VARIABLE = "TPOVERLAP_CACHE_DIR"
_MAGIC = b"tpoverlap nvrtc 1\n"
_DIGEST_BYTES = hashlib.sha256().digest_size
# A rank whose peer was stopped while it held the lock compiles by itself after this time.
_LOCK_WAIT_S = 120.0
_LOCK_POLL_S = 0.02


class KernelCompileError(TpOverlapError):
    """NVRTC refused a source; the message holds its log."""


def compile_cuda(source: str, *, name: str, arch: str, options: Sequence[str] = ()) -> bytes:
    """Compile CUDA C++, or return what an earlier call compiled from the same.

    name: what diagnostics call the source. arch: ``"sm_75"`` gives a cubin, ``"compute_75"`` PTX. Needs no GPU and
    creates no context. Raises KernelCompileError with NVRTC's log; UnsupportedError where NVRTC is missing or does not
    know the architecture; ConfigError if ``$TPOVERLAP_CACHE_DIR`` is not usable. A default folder that is not usable
    is warned about once and costs a compilation in every process.
    """
    compiler = nvrtc_version()
    key = cache_key(source, name=name, arch=arch, options=options, compiler=compiler)
    try:
        folder = _open_folder()
    except ConfigError as error:
        if os.environ.get(CACHE_DIR_VARIABLE):
            raise
        _warn_once(f"{error}. Kernels are compiled anew in every process.")
        return _compile(source, name, arch, options)
    try:
        image = _read_entry(folder, key)
        if image is None:
            with _locked(folder, key):
                image = _read_entry(folder, key)
                if image is None:
                    image = _compile(source, name, arch, options)
                    _write_entry(folder, key, image)
        return image
    finally:
        os.close(folder)


def cache_key(source: str, *, name: str, arch: str, options: Sequence[str], compiler: tuple[int, int]) -> str:
    """Name of the entry: SHA-256, in hex, of everything that decides the compiled bytes."""
    digest = hashlib.sha256(_MAGIC)
    for part in (f"{compiler[0]}.{compiler[1]}", arch, name, *options, "", source):
        data = part.encode()
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()


def cache_folder() -> Path:
    """Where entries are kept; it need not exist yet."""
    chosen = os.environ.get(CACHE_DIR_VARIABLE)
    if chosen:
        return Path(chosen) / "nvrtc"
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "tpoverlap" / "nvrtc"


@functools.cache
def nvrtc_version() -> tuple[int, int]:
    """(major, minor) of the NVRTC library. Raises UnsupportedError if there is none."""
    major, minor = _call("nvrtcVersion")
    return int(major), int(minor)


def _call(function: str, *args: Any) -> Any:
    bindings = _bindings()
    try:
        result, *values = getattr(bindings, function)(*args)
    except RuntimeError as error:
        raise UnsupportedError(f"NVRTC is not usable: {error}. Install it: pip install nvidia-cuda-nvrtc") from error
    if result != bindings.nvrtcResult.NVRTC_SUCCESS:
        _, text = bindings.nvrtcGetErrorString(result)
        raise KernelCompileError(f"{function} failed: {text.decode()} ({int(result)})")
    return values[0] if len(values) == 1 else tuple(values)


@functools.cache
def _bindings() -> ModuleType:
    return import_bindings("nvrtc")


def _compile(source: str, name: str, arch: str, options: Sequence[str]) -> bytes:
    kind, _, number = arch.partition("_")
    if kind not in ("sm", "compute") or not number.isdigit():
        raise ValueError(f"arch must be sm_NN (machine code) or compute_NN (PTX), got {arch!r}")
    known = [int(n) for n in _call("nvrtcGetSupportedArchs")]
    if int(number) not in known:
        raise UnsupportedError(
            f"NVRTC {'.'.join(map(str, nvrtc_version()))} cannot compile for {arch}; it knows {known}. "
            "Install a version of nvidia-cuda-nvrtc that does"
        )
    program = _call("nvrtcCreateProgram", source.encode(), name.encode(), 0, [], [])
    try:
        arguments = [f"--gpu-architecture={arch}".encode(), *(option.encode() for option in options)]
        try:
            _call("nvrtcCompileProgram", program, len(arguments), arguments)
        except KernelCompileError as error:
            log = bytes(_call("nvrtcGetProgramLogSize", program))
            _call("nvrtcGetProgramLog", program, log)
            raise KernelCompileError(f"{name} for {arch}: {error}\n{log.rstrip(bytes(1)).decode()}") from None
        getter = "nvrtcGetCUBIN" if kind == "sm" else "nvrtcGetPTX"
        image = bytes(_call(f"{getter}Size", program))
        _call(getter, program, image)
        return image
    finally:
        _bindings().nvrtcDestroyProgram(program)


def _open_folder() -> int:
    """File descriptor of the cache folder, made if it is missing; ConfigError unless code in it can be trusted."""
    path = cache_folder()
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        parent = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            _check_private(parent, path.parent)
            with suppress(FileExistsError):
                os.mkdir(path.name, mode=0o700, dir_fd=parent)
            folder = os.open(path.name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=parent)
        finally:
            os.close(parent)
    except OSError as error:
        raise ConfigError(
            f"the kernel cache {path} is not usable ({error.strerror}): set {CACHE_DIR_VARIABLE} to your own folder"
        ) from error
    try:
        _check_private(folder, path)
    except ConfigError:
        os.close(folder)
        raise
    return folder


def _check_private(descriptor: int, path: Path) -> None:
    facts = os.fstat(descriptor)
    if facts.st_uid != os.geteuid() or facts.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise ConfigError(
            f"the kernel cache {path} has owner {facts.st_uid} and mode {stat.S_IMODE(facts.st_mode):o}. Code comes "
            f"from it: it must belong to user {os.geteuid()} and be writable by nobody else. chmod go-w it, or set "
            f"{CACHE_DIR_VARIABLE} to a folder of your own"
        )


def _read_entry(folder: int, key: str) -> bytes | None:
    """The image, or None if it is missing, broken or not the user's own."""
    try:
        descriptor = os.open(key, os.O_RDONLY | os.O_NOFOLLOW, dir_fd=folder)
    except OSError:
        return None
    try:
        facts = os.fstat(descriptor)
        private = facts.st_uid == os.geteuid() and not facts.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
        if not private or not stat.S_ISREG(facts.st_mode):
            return None
        with open(descriptor, "rb", closefd=False) as file:
            data = file.read()
    finally:
        os.close(descriptor)
    head = len(_MAGIC) + _DIGEST_BYTES
    image = data[head:]
    return image if data[:head] == _MAGIC + hashlib.sha256(image).digest() else None


def _write_entry(folder: int, key: str, image: bytes) -> None:
    """Replace the entry atomically. A full or read-only disk costs the next process a compilation, no more."""
    temporary = f"{key}.{os.getpid()}.{time.monotonic_ns()}.tmp"
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600, dir_fd=folder)
        try:
            with open(descriptor, "wb") as file:
                file.write(_MAGIC + hashlib.sha256(image).digest() + image)
            os.rename(temporary, key, src_dir_fd=folder, dst_dir_fd=folder)
        except BaseException:
            os.unlink(temporary, dir_fd=folder)
            raise
    except OSError as error:
        _warn_once(f"the kernel cache {cache_folder()} cannot be written ({error.strerror})")


@contextmanager
def _locked(folder: int, key: str) -> Iterator[None]:
    """Hold the entry's lock. It only saves work: without it, on file systems that have none, results are the same."""
    try:
        descriptor = os.open(f"{key}.lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600, dir_fd=folder)
    except OSError:
        yield
        return
    try:
        deadline = time.monotonic() + _LOCK_WAIT_S
        while time.monotonic() < deadline:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError as error:
                if error.errno != errno.EWOULDBLOCK:
                    break
                time.sleep(_LOCK_POLL_S)
        yield
    finally:
        os.close(descriptor)


@functools.cache
def _warn_once(message: str) -> None:
    warnings.warn(message, RuntimeWarning, stacklevel=4)
