"""Imports run downward only, and importing does nothing but import."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
# What each part may import, besides itself, config and errors.
MAY_IMPORT = {
    "errors": set(),
    "config": set(),
    "cuda": set(),
    "comm": {"cuda"},
    "attention": {"cuda"},
    "quant": {"cuda"},
    "microbatch": {"comm", "cuda"},
    "model": {"microbatch", "comm", "cuda", "attention", "quant"},
    "trace": {"microbatch", "comm", "cuda"},
    "integrations": {"model", "trace", "microbatch", "comm", "cuda", "attention", "quant"},
}
MODULES = sorted((ROOT / "tpoverlap").rglob("*.py"))


def _module(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def _imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield node.module or ""
            if node.module == "tpoverlap":
                yield from (f"tpoverlap.{alias.name}" for alias in node.names)


@pytest.mark.parametrize("path", MODULES, ids=_module)
def test_imports_run_downward(path: Path) -> None:
    parts = _module(path).split(".")
    if len(parts) == 1:
        return
    own = parts[1]
    allowed = MAY_IMPORT[own] | {own, "config", "errors"}
    upward = [name for name in _imports(path) if name.startswith("tpoverlap.") and name.split(".")[1] not in allowed]
    upward += [name for name in _imports(path) if name.split(".")[0] == "launch"]
    assert not upward, f"{own} may import {sorted(allowed)}"


def test_importing_a_part_creates_no_context_and_loads_no_heavy_library() -> None:
    # Modules of device code need Triton or the driver; the parts import them when they are first used.
    names = [_module(p) for p in MODULES if p.name == "__init__.py" or p.parent.name == "tpoverlap"]
    code = (
        "import importlib, sys, threading\n"
        "import torch\n"
        "before = set(sys.modules)\n"
        f"for name in {names!r}: importlib.import_module(name)\n"
        "assert not torch.cuda.is_initialized()\n"
        "heavy = {'triton', 'cuda.bindings.driver', 'transformers', 'matplotlib'}\n"
        "loaded = heavy & set(sys.modules) - before\n"
        "assert not loaded, loaded\n"
        "assert threading.active_count() == 1, threading.enumerate()\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, timeout=100)
