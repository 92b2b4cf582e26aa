"""Operations whose 32-bit counters pass their wrap: every value is checked on every rank, with resets in between."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from rank_harness import run_ranks

from tpoverlap.comm.channel import Channel
from tpoverlap.comm.cpu import CpuProvider
from tpoverlap.comm.layout import CPU_CONSUMED, CPU_PUBLISHED, Layout
from tpoverlap.comm.rendezvous import StoreExchange
from tpoverlap.comm.words import MASK
from tpoverlap.errors import CollectiveAbortedError

SLOT_BYTES = 65_536
# One shot; exactly one slot, which is two shots on three ranks; several slots with a rest.
SIZES = (0, 7, 1000, SLOT_BYTES // 4, 3 * SLOT_BYTES // 4 + 100)


def _channel(rank: int, first_number: int) -> Channel:
    assert dist.group.WORLD is not None
    world_size = dist.get_world_size()
    store = dist.PrefixStore(f"wrap {first_number}", dist.group.WORLD.get_group_store())
    exchange = StoreExchange(store, rank, world_size, 20.0)
    return Channel("wrap", rank, exchange, Layout(world_size, SLOT_BYTES), 20.0, first_number=first_number)


def _round(provider: CpuProvider, rank: int, seed: int) -> None:
    """One call of each operation with each size, checked."""
    world_size = dist.get_world_size()
    for n in SIZES:
        seed += 1
        generator = torch.Generator().manual_seed(seed)
        dtype = (torch.float32, torch.bfloat16, torch.float16)[seed % 3]
        parts = torch.randint(-64, 64, (world_size, n), generator=generator).to(dtype)  # sums are exact
        total = parts.float().sum(0).to(dtype)

        out = torch.full_like(parts[0], -1)
        provider.all_reduce(parts[rank], out)
        assert torch.equal(out, total), (seed, "all_reduce")

        gathered = torch.full_like(parts, -1)
        provider.all_gather(parts[rank], gathered)
        assert torch.equal(gathered, parts), (seed, "all_gather")

        scattered = torch.full_like(parts[0], -1)
        provider.reduce_scatter((parts[rank] + torch.arange(world_size)[:, None]).to(dtype), scattered)
        assert torch.equal(scattered, (total.float() + rank * world_size).to(dtype)), (seed, "reduce_scatter")

        source = seed % world_size
        data = parts[rank].clone()
        provider.broadcast(data, source)
        assert torch.equal(data, parts[source]), (seed, "broadcast")


def _words(channel: Channel) -> list[int]:
    words, layout = channel.segment.words, channel.layout
    return [words[layout.word(channel.rank, which) // 4] for which in (CPU_PUBLISHED, CPU_CONSUMED)]


def _across_the_wrap(rank: int, first_number: int, resets: int) -> None:
    channel = _channel(rank, first_number)
    provider = CpuProvider(channel)
    assert _words(channel) == [first_number] * 2
    for generation in range(resets + 1):
        if generation:
            if rank == generation % 2:
                channel.abort("planted")
            with pytest.raises(CollectiveAbortedError):
                provider.all_reduce(torch.ones(4), torch.empty(4))
            channel.reset()
            assert _words(channel) == [first_number] * 2
        for i in range(2):
            _round(provider, rank, 1000 * generation + 100 * i)
        published, consumed = _words(channel)
        assert consumed == channel.region.operation
        assert (consumed - first_number) & MASK < 200
        assert (published - first_number) & MASK < 300
        if first_number > MASK - 60:
            assert published < 300, "the counters did not pass their wrap"
            assert consumed < 200, "the counters did not pass their wrap"
    channel.destroy()


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("first_number", [MASK, MASK - 1, MASK - 2, MASK - 7, MASK - 50, (1 << 31) - 3])
def test_counters_pass_their_wrap(world_size: int, first_number: int) -> None:
    run_ranks(_across_the_wrap, world_size, first_number, 0)


@pytest.mark.parametrize("world_size", [2, 3])
def test_counters_pass_their_wrap_again_after_each_reset(world_size: int) -> None:
    run_ranks(_across_the_wrap, world_size, MASK - 5, 3)


def _each_step_of_the_wrap(rank: int) -> None:
    """Wrap at each point of a run of operations: every start that lies a few operations below it."""
    for below in range(12):
        channel = _channel(rank, MASK - below)
        provider = CpuProvider(channel)
        for i in range(8):
            x, out = torch.full((SLOT_BYTES // 4,), float(rank + i)), torch.empty(SLOT_BYTES // 4)
            provider.all_reduce(x, out)
            assert out[0] == out[-1] == 3 * i + 3
        channel.destroy()


def test_the_wrap_may_fall_on_any_step_of_two_shots() -> None:
    run_ranks(_each_step_of_the_wrap, 3)
