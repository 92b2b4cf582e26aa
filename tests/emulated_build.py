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
    assert COMPILER
    with tempfile.TemporaryDirectory(prefix="tpoverlap-emulation-") as folder:
        (Path(folder) / name).write_text(source)
        built = Path(folder) / "emulation.so"
        # Coroutines leave their stacks by longjmp, which fortified C libraries refuse.
        options = ["-std=c++17", "-shared", "-fPIC", "-U_FORTIFY_SOURCE", "-Wno-unknown-pragmas", *flags]
        includes = [f"-I{place}" for place in (folder, entry.parent, Path(__file__).parent)]
        subprocess.run([COMPILER, *options, *includes, str(entry), "-o", str(built)], check=True, timeout=100)
        return ctypes.CDLL(str(built))
