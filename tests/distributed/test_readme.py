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
    logs = tmp_path / "logs"
    # To files, one a rank: on a shared stdout their lines can run into each other.
    launcher = ["-m", "torch.distributed.run", "--standalone", "--redirects", "3", "--log-dir", str(logs)]
    run = subprocess.run(
        [sys.executable, *launcher, "--nproc-per-node", "2", str(script)],
        capture_output=True,
        text=True,
        timeout=100,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
    )
    told = "".join(path.read_text() for path in sorted(logs.rglob("std*.log")))
    assert run.returncode == 0, run.stdout + run.stderr + told
    printed = [path.read_text() for path in logs.rglob("stdout.log")]
    assert len(printed) == 2, told
    for of_rank in printed:
        assert "{'cpu': None, 'torch': None}" in of_rank, told
        ((_, communication),) = re.findall(r"^([\d.e-]+) ([\d.e-]+)$", of_rank, re.M)
        assert float(communication) > 0
