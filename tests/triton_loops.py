"""Whether Triton's interpreter runs the kernels here: 3.6 with NumPy 2.4 cannot end a loop whose length was loaded."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROBE = """
import torch, triton

@triton.jit
def loop(n, out):
    for i in range(0, triton.language.load(n)):
        triton.language.store(out + i, i)

out = torch.zeros(3, dtype=torch.int32)
loop[(1,)](torch.tensor([3], dtype=torch.int32), out)
assert out.tolist() == [0, 1, 2]
"""


def skip_without_loops(folder: Path) -> None:
    """Skips a test that needs them. folder: for the probe, since Triton reads a kernel's source from its file."""
    pytest.importorskip("triton")
    probe = folder / "probe.py"
    probe.write_text(PROBE)
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    if subprocess.run(
        [sys.executable, probe], capture_output=True, env=environment, timeout=100, check=False
    ).returncode:
        pytest.skip("this Triton's interpreter does not run loops of loaded length (3.6 with NumPy 2.4)")
