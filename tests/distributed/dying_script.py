"""All-reduces in a loop until the last rank dies in the way that is asked for; run by torchrun."""

from __future__ import annotations

import os
import signal
import sys
import time

import torch
import torch.distributed as dist

from tpoverlap.comm import GroupCoordinator
from tpoverlap.config import HostReduceConfig


def main() -> None:
    how = sys.argv[1]
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    group = GroupCoordinator(
        range(world_size), int(os.environ["LOCAL_RANK"]), "cpu", HostReduceConfig(timeout_s=30), unique_name="tp"
    )
    try:
        for i in range(1_000_000):
            group.all_reduce(torch.ones(1000))
            if rank == world_size - 1 and i == 20:
                print(f"dies at {time.monotonic()}", flush=True)
                if how == "killed":
                    os.kill(os.getpid(), signal.SIGKILL)
                raise ValueError("planted")
    finally:
        if rank < world_size - 1:
            print(f"rank {rank} released at {time.monotonic()}", flush=True)


if __name__ == "__main__":
    main()
