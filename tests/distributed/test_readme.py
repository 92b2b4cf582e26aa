"""README.md's example runs as it stands."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_the_example_runs_under_torchrun(tmp_path: Path) -> None:
    (example,) = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(encoding="utf-8"), re.M | re.S)
    script = tmp_path / "example.py"
    script.write_text(example)
    run = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)],
        capture_output=True,
        text=True,
        timeout=100,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert run.stdout.count("{'cpu': None, 'torch': None}") == 2, run.stdout
    times = re.findall(r"^([\d.e-]+) ([\d.e-]+)$", run.stdout, re.M)
    assert len(times) == 2, run.stdout
    assert all(float(communication) > 0 for _, communication in times)
