"""Scripts under torchrun: an engine that takes our coordinator for its own, and ranks that die."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


def _torchrun(script: str, *arguments: str, num_ranks: int = 2) -> subprocess.CompletedProcess[str]:
    """torchrun looks after its ranks every 5 s only, so that they end by themselves before it ends them."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--monitor-interval", "5"]
    command += ["--nproc-per-node", str(num_ranks), str(HERE / script), *arguments]
    before = set(os.listdir("/dev/shm"))
    run = subprocess.run(
        command, capture_output=True, text=True, timeout=100, env=os.environ | {"OMP_NUM_THREADS": "1"}, cwd=HERE
    )
    left = {name for name in set(os.listdir("/dev/shm")) - before if name.startswith("tpoverlap")}
    assert not left, left
    return run


def _digests(coordinator: str) -> list[str]:
    run = _torchrun("engine_script.py", coordinator)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "Error" not in run.stderr, run.stderr
    found = sorted(re.findall(r"rank \d digest [0-9a-f]{16}", run.stdout))
    assert len(found) == 2, run.stdout
    return found


def test_an_engine_runs_with_our_coordinator_in_place_of_its_own() -> None:
    assert _digests("tpoverlap.comm:GroupCoordinator") == _digests("torch_coordinator:GroupCoordinator")


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("killed", "PeerLostError: group 'tp': rank 1 died"),
        ("raises", r"PeerLostError: group 'tp': rank 1 has left \(it destroyed the group or exited\)"),
    ],
)
def test_a_rank_that_dies_ends_the_job_and_is_named(how: str, words: str) -> None:
    run = _torchrun("dying_script.py", how)
    assert run.returncode == 1, run.stdout + run.stderr
    assert re.search(words, run.stderr), run.stderr
    assert ("ValueError: planted" in run.stderr) == (how == "raises")
    died = re.search(r"dies at ([\d.]+)", run.stdout)
    released = re.search(r"rank 0 released at ([\d.]+)", run.stdout)
    assert died is not None
    assert released is not None
    assert float(released[1]) - float(died[1]) < 2
