"""What a job finds on its machine: packages, devices, threads."""

from __future__ import annotations

import importlib.util
import os

import torch
from job_world import World

from tpoverlap.errors import ConfigError, UnsupportedError


def require_packages(*packages: str) -> None:
    """Errors: UnsupportedError naming the packages that are not installed, and how to get them. Imports none."""
    missing = [package for package in packages if importlib.util.find_spec(package) is None]
    if missing:
        raise UnsupportedError(f"not installed: {', '.join(missing)}. Install what this needs: pip install '.[demo]'")


def choose_device(asked: str, world: World) -> torch.device:
    """``auto``: one GPU a rank where this host has as many, else the CPU.

    Errors: ConfigError for ``cuda`` where there are fewer GPUs than ranks.
    """
    gpus = torch.cuda.device_count()
    if asked == "cuda" and gpus < world.local_size:
        raise ConfigError(
            f"--device cuda needs a GPU for each of the {world.local_size} ranks on this host, which has {gpus}: "
            "start fewer ranks, or give --device cpu"
        )
    if asked == "cpu" or gpus < world.local_size:
        return torch.device("cpu")
    torch.cuda.set_device(world.local_rank)
    return torch.device("cuda", world.local_rank)


def set_threads(asked: int | None, world: World) -> None:
    """Gives torch ``asked`` threads; None: the user's OMP_NUM_THREADS, or else this rank's share of the cores.

    torchrun sets OMP_NUM_THREADS=1 where the user has not, so under torchrun a 1 counts as not set.
    """
    from_user = os.environ.get("OMP_NUM_THREADS")
    if from_user == "1" and "TORCHELASTIC_RUN_ID" in os.environ:
        from_user = None
    if asked is None and from_user is not None:
        return
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    torch.set_num_threads(asked or max(1, cores // world.local_size))
