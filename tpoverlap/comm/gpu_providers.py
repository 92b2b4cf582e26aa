"""The chain of GPU providers of a group: which exist on all of its ranks, opened in their order."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import torch

from tpoverlap.comm.channel import Channel
from tpoverlap.comm.layout import MAX_PIECES, MAX_WORLD_SIZE, PAGE, Layout, page_aligned
from tpoverlap.comm.provider import Provider, Reason
from tpoverlap.comm.rendezvous import StoreExchange
from tpoverlap.config import HostReduceConfig
from tpoverlap.errors import ChannelError

if TYPE_CHECKING:
    from tpoverlap.comm.captured import CapturedCopyEngineProvider
    from tpoverlap.comm.copy_engine import CopyEngineProvider
    from tpoverlap.comm.gpu import GpuSegment
    from tpoverlap.comm.kernel_mode import KernelProvider

logger = logging.getLogger("tpoverlap")

GPU_PROVIDERS = ("kernel", "copy_engine", "captured_copy_engine")


def gpu_layout(world_size: int, cpu_slot_bytes: int, config: HostReduceConfig) -> Layout:
    """The segment of a group of GPU ranks."""
    captured = page_aligned(-(-config.copy_engine_max_bytes // MAX_PIECES)) * MAX_PIECES
    return Layout(
        world_size,
        min(cpu_slot_bytes, page_aligned(256 * PAGE)),
        page_aligned(config.max_bytes),
        page_aligned(config.copy_engine_max_bytes),
        captured,
    )


def open_gpu_providers(
    channel: Channel, exchange: StoreExchange, device: torch.device, config: HostReduceConfig
) -> tuple[list[Provider], dict[str, Reason]]:
    """The providers that every rank can have, and why the others are absent. Collective over the group's store."""
    # Imported here: these modules need cuda-python, which a group of CPU ranks does not.
    from tpoverlap.comm.gpu import agree, missing_parts, open_on_device, peer_access

    missing = missing_parts(device)
    if channel.layout.world_size > MAX_WORLD_SIZE:
        missing |= dict.fromkeys(GPU_PROVIDERS, Reason.WORLD_SIZE_UNSUPPORTED)
    if config.max_bytes == 0:
        missing["kernel"] = Reason.DISABLED
    if config.copy_engine_max_bytes == 0:
        missing |= dict.fromkeys(GPU_PROVIDERS[1:], Reason.DISABLED)
    absent = agree(exchange, missing)
    for name, reason in absent.items():
        if reason is not Reason.DISABLED:
            logger.warning("group %s: no %s mode: %s", channel.name, name, reason)
    reachable = peer_access(exchange, device, config)
    if set(absent) == set(GPU_PROVIDERS):
        return [], absent
    try:
        segment = open_on_device(channel, exchange, device)
    except ChannelError as e:
        logger.warning("group %s: no GPU transport through host memory: %s", channel.name, e)
        return [], dict.fromkeys(GPU_PROVIDERS, Reason(e.reason))
    logger.info(
        "group %s: rank %d has pinned the group's %.1f MiB", channel.name, channel.rank, channel.segment.size / 2**20
    )
    providers: list[Provider] = []
    for name in GPU_PROVIDERS:
        if name not in absent:
            provider = _open(name, segment, config, reachable)
            opened = exchange.all_gather(f"opened {name}", str(provider) if isinstance(provider, RuntimeError) else "")
            if any(opened):
                logger.warning("group %s: no %s mode: %s", channel.name, name, "; ".join(filter(None, opened)))
                absent[name] = Reason.CHANNEL_FAILED
            else:
                assert not isinstance(provider, RuntimeError)
                providers.append(provider)
                channel.regions.append(provider.region)
    # Every rank's words must be at their start before any rank's device writes one.
    exchange.barrier("regions")
    return providers, absent


def _open(
    name: str, segment: GpuSegment, config: HostReduceConfig, reachable: bool
) -> KernelProvider | CopyEngineProvider | CapturedCopyEngineProvider | RuntimeError:
    """The provider, or the error of ours or of torch that stands in its way, for all ranks to hear of."""
    from tpoverlap.comm.captured import CapturedCopyEngineProvider
    from tpoverlap.comm.copy_engine import CopyEngineProvider
    from tpoverlap.comm.kernel_mode import KernelProvider

    try:
        if name == "kernel":
            return KernelProvider(segment, config.max_bytes)
        if name == "copy_engine":
            return CopyEngineProvider(segment, reachable, config.copy_engine_pieces)
        return CapturedCopyEngineProvider(segment, reachable)
    except RuntimeError as e:
        return e
