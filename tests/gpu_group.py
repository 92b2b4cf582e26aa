"""A group of GPU ranks for tests."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist

from tpoverlap.comm import GroupCoordinator
from tpoverlap.config import HostReduceConfig


def make_group(world_size: int | None = None, **config: object) -> GroupCoordinator:
    """A group of GPU ranks; ranks share the GPUs there are."""
    os.environ["NCCL_P2P_DISABLE"] = "1"
    rank = dist.get_rank()
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    options = {"timeout_s": 30.0, **config}
    return GroupCoordinator(range(world_size or dist.get_world_size()), rank, device, HostReduceConfig(**options))  # type: ignore[arg-type]
