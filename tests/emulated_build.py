"""Compiles kernels for the CPU from their own source: see emulated_gpu.h."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import tempfile
from pathlib import Path

COMPILER = shutil.which("g++") or shutil.which("clang++")


def build(entry: Path, name: str, source: str, *flags: str) -> ctypes.CDLL:
    """The emulation of a source text.

    entry: the C++ file that includes the text, by `name`, and defines functions that launch its kernels. Headers are
    found beside it and in this folder.
    """
    with tempfile.TemporaryDirectory(prefix="tpoverlap-emulation-") as folder:
        return ctypes.CDLL(str(build_in(Path(folder), entry, name, source, *flags)))


def build_in(folder: Path, entry: Path, name: str, source: str, *flags: str) -> Path:
    """The same in an empty folder, as a file for other processes to load."""
    assert COMPILER
    (folder / name).write_text(source)
    built = folder / "emulation.so"
    # Coroutines leave their stacks by longjmp, which fortified C libraries refuse.
    options = ["-std=c++17", "-shared", "-fPIC", "-U_FORTIFY_SOURCE", "-Wno-unknown-pragmas", *flags]
    includes = [f"-I{place}" for place in (folder, entry.parent, Path(__file__).parent)]
    subprocess.run([COMPILER, *options, *includes, str(entry), "-o", str(built)], check=True, timeout=100)
    return built
