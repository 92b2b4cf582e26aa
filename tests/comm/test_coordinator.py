"""Collectives of the coordinator on CPU ranks: values, bits, layouts."""

from __future__ import annotations

import hashlib
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from rank_harness import run_ranks

from tpoverlap.comm import GroupCoordinator, Reason
from tpoverlap.comm.arguments import check_input
from tpoverlap.config import HostReduceConfig
from tpoverlap.errors import ConfigError

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def _group(world_size: int, **config: object) -> GroupCoordinator:
    return GroupCoordinator(range(world_size), dist.get_rank(), "cpu", HostReduceConfig(timeout_s=20, **config))  # type: ignore[arg-type]


def _inputs(seed: int, world_size: int, shape: tuple[int, ...], dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [(torch.randn(shape, generator=generator) * 3).to(dtype) for _ in range(world_size)]


def _expected_sum(parts: list[torch.Tensor]) -> torch.Tensor:
    if len(parts) == 2:
        return parts[0] + parts[1]
    total = parts[0].float().clone()
    for part in parts[1:]:
        total += part.float()
    return total.to(parts[0].dtype)


def _sums(rank: int, sizes: list[int]) -> None:
    world_size = dist.get_world_size()
    group = _group(world_size)
    for dtype in DTYPES:
        for i, n in enumerate(sizes):
            parts = _inputs(i, world_size, (n,), dtype)
            kept = parts[rank].clone()
            got = group.all_reduce(parts[rank])
            assert torch.equal(got, _expected_sum(parts)), (dtype, n)
            assert torch.equal(parts[rank], kept), "the input was written"
            out = torch.full_like(kept, float("nan"))
            assert group.all_reduce(parts[rank], out=out) is out
            assert torch.equal(out, got)
            assert group.all_reduce(kept, out=kept) is kept
            assert torch.equal(kept, got)
    assert group.served == {"cpu": 3 * 3 * len(sizes)}
    group.destroy()


@pytest.mark.parametrize("world_size", [2, 3, 4, 5, 8])
def test_sums_are_in_rank_order_and_rounded_once(world_size: int) -> None:
    sizes = [0, 1, 7, 1023, 40_000, 300_001] + ([3_000_000] if world_size <= 4 else [])
    run_ranks(_sums, world_size, sizes)


def _special_values(rank: int) -> None:
    group = _group(2)
    for dtype in DTYPES:
        tiny = torch.finfo(dtype).smallest_normal / 4
        values = torch.tensor([float("nan"), float("inf"), float("-inf"), tiny, -0.0, 0.0, 1.0, 65504.0], dtype=dtype)
        pairs = torch.cartesian_prod(values, values)
        got = group.all_reduce(pairs[:, rank])
        expected = pairs[:, 0] + pairs[:, 1]
        torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)
        assert torch.equal(torch.signbit(got)[~got.isnan()], torch.signbit(expected)[~got.isnan()])
        assert bool((got == 2 * tiny).any()), "a subnormal sum was flushed"
    group.destroy()


def test_nan_inf_and_subnormal_values_pass_through() -> None:
    run_ranks(_special_values, 2)


def _layouts(rank: int) -> None:
    world_size = dist.get_world_size()
    group = _group(world_size)
    for dtype in DTYPES:
        base = _inputs(3, world_size, (37, 50), dtype)
        expected = _expected_sum(base)
        views = [
            base[rank].t().contiguous().t(),
            torch.cat([base[rank].new_zeros(3), base[rank].flatten()])[3:].view(37, 50),
            torch.stack([base[rank], base[rank]], dim=-1)[..., 0],
        ]
        for view in views:
            assert torch.equal(group.all_reduce(view), expected)
            out = torch.empty_like(expected).t().contiguous().t()
            group.all_reduce(view, out=out)
            assert torch.equal(out, expected)
            assert torch.equal(view, base[rank])
        assert torch.equal(group.all_reduce(base[rank][:, 10:20]), expected[:, 10:20])
        scalar = group.all_reduce(base[rank][0, 0])
        assert scalar.shape == ()
        assert torch.equal(scalar, expected[0, 0])
    group.destroy()


@pytest.mark.parametrize("world_size", [2, 3])
def test_any_layout_gives_the_same_sum(world_size: int) -> None:
    run_ranks(_layouts, world_size)


def _digests(rank: int, rounds: int) -> list[str]:
    group = _group(dist.get_world_size())
    digests = []
    for seed in range(rounds):
        n = int(torch.randint(1, 100_000, (1,), generator=torch.Generator().manual_seed(seed)))
        n = n if seed % 2 else 1 + n % 8
        x = torch.randn(n, generator=torch.Generator().manual_seed(seed * 100 + rank)) * 10 ** (seed % 7 - 3)
        x[2::5] = float("nan")  # of a NaN the bits are free, but the same everywhere
        x = x.to(DTYPES[seed % 3])
        result = group.all_reduce(torch.stack([x, x], 1)[:, 0] if seed % 4 > 1 else x)
        digests.append(hashlib.sha256(result.view(torch.uint8).numpy().tobytes()).hexdigest())
    group.destroy()
    return digests


@pytest.mark.parametrize("world_size", [2, 3, 4, 7])
def test_every_rank_holds_the_same_bits(world_size: int) -> None:
    first = run_ranks(_digests, world_size, 30)
    assert all(digests == first[0] for digests in first)


def _surface(rank: int) -> None:
    """Everything against torch.distributed on the default group."""
    n = dist.get_world_size()
    group = _group(n)
    assert (group.rank, group.rank_in_group, group.world_size, group.ranks) == (rank, rank, n, list(range(n)))
    assert (group.first_rank, group.last_rank) == (0, n - 1)
    assert (group.next_rank, group.prev_rank) == ((rank + 1) % n, (rank - 1) % n)
    assert (group.is_first_rank, group.is_last_rank) == (rank == 0, rank == n - 1)
    assert group.device == torch.device("cpu")
    assert dist.get_process_group_ranks(group.cpu_group) == dist.get_process_group_ranks(group.device_group)

    for dtype in (*DTYPES, torch.int64, torch.uint8, torch.bool):
        x = (torch.arange(24).view(2, 3, 4) % 5 + rank).to(dtype)
        parts = [torch.empty_like(x) for _ in range(n)]
        dist.all_gather(parts, x)
        for dim in (-1, 0, 1, 2, -3):
            assert torch.equal(group.all_gather(x, dim), torch.cat(parts, dim)), (dtype, dim)
            gathered = group.gather(x, n - 1, dim)
            assert (gathered is None) == (rank != n - 1)
            assert gathered is None or torch.equal(gathered, torch.cat(parts, dim))
        if dtype is not torch.bool:
            total = x.clone()
            dist.all_reduce(total)
            assert torch.equal(group.all_reduce(x), total)
            assert torch.equal(group.all_reduce_sum2(x, x), total * 2)
            wide = torch.cat([x] * n, 1)
            for dim in (1, -2):
                assert torch.equal(group.reduce_scatter(wide, dim), total)
        for src in range(n):
            y = x.clone().mT
            assert torch.equal(group.broadcast(y, src), parts[src].mT)
            assert torch.equal(y, parts[src].mT)

    sizes = [(3 * q + 1) % 5 for q in range(n)]
    uneven = torch.full((2, sizes[rank]), float(rank))
    expected = torch.cat([torch.full((2, s), float(q)) for q, s in enumerate(sizes)], 1)
    assert torch.equal(group.all_gatherv(uneven, 1, sizes), expected)
    total = torch.arange(2.0 * sum(sizes)).view(2, -1) * n
    assert torch.equal(group.reduce_scatterv(total / n, 1, sizes), total.split(sizes, 1)[rank])
    assert torch.equal(group.all_gatherv(total, 1), torch.cat([total] * n, 1))

    for src in range(n):
        assert group.broadcast_object({"from": rank, "text": "x" * 100_000}, src) == {
            "from": src,
            "text": "x" * 100_000,
        }
        assert group.broadcast_object_list([rank, None, (rank,)], src) == [src, None, (src,)]
        mixed = {
            "a": torch.full((2, 3), rank),
            "none": None,
            "n": rank,
            "b": torch.ones(0),
            "t": torch.ones(3, 2).mT * rank,
        }
        got = group.broadcast_tensor_dict(mixed if rank == src else None, src)
        assert got is not None
        assert list(got) == list(mixed)
        assert torch.equal(got["a"], torch.full((2, 3), src))
        assert got["n"] == src
        assert got["b"].shape == (0,)
        assert torch.equal(got["t"], torch.ones(2, 3) * src)

    tensor = torch.arange(5) + rank
    if rank == 0:
        group.send(tensor)
        assert group.recv((5,), torch.int64).tolist() == [n - 1, n, n + 1, n + 2, n + 3]
        group.send_object([rank], 1)
        assert group.send_tensor_dict({"x": tensor, "label": "y"}) is None
    else:
        assert group.recv([5], torch.int64).tolist() == [rank - 1 + i for i in range(5)]
        group.send(tensor)
        if rank == 1:
            assert group.recv_object(0) == [0]
            got = group.recv_tensor_dict()
            assert got is not None
            assert got["label"] == "y"
            assert torch.equal(got["x"], torch.arange(5))
    group.barrier()
    with group.graph_capture() as context:
        assert context.stream is None
    group.destroy()
    group.destroy()


@pytest.mark.parametrize("world_size", [2, 4])
def test_the_whole_surface_gives_what_torch_distributed_gives(world_size: int) -> None:
    run_ranks(_surface, world_size)


def _sub_groups(rank: int) -> None:
    pair = [0, 2] if rank % 2 == 0 else [1, 3]
    group = GroupCoordinator(pair, rank, "cpu")
    everyone = _group(4)
    given = GroupCoordinator(range(4), rank, "cpu", process_group=dist.group.WORLD)
    alone = GroupCoordinator([rank], rank, "cpu")
    for _ in range(20):
        assert group.all_reduce(torch.full((9,), float(rank))).tolist() == [float(sum(pair))] * 9
        assert everyone.all_reduce(torch.ones(3)).tolist() == [4.0] * 3
        assert given.all_reduce(torch.ones(3)).tolist() == [4.0] * 3
        x = torch.ones(2)
        assert alone.all_reduce(x) is x
    assert group.all_gather(torch.tensor([rank])).tolist() == pair
    received = {}
    if group.is_first_rank:
        group.send_tensor_dict({"x": torch.arange(8.0)}, all_gather_group=None)
    else:
        received = group.recv_tensor_dict() or {}
        assert torch.equal(received["x"], torch.arange(8.0))
    # Pipeline ranks 0-1 to 2-3, whose tensor-parallel pairs hold the same dictionary and send half of it each.
    tensor_parallel = GroupCoordinator([0, 1] if rank < 2 else [2, 3], rank, "cpu")
    pipeline = GroupCoordinator([rank % 2, rank % 2 + 2], rank, "cpu")
    whole = {"hidden": torch.arange(12.0).view(3, 4), "odd": torch.arange(3)}
    if rank < 2:
        pipeline.send_tensor_dict(whole, all_gather_group=tensor_parallel)
    else:
        received = pipeline.recv_tensor_dict(all_gather_group=tensor_parallel) or {}
        assert all(torch.equal(received[k], v) for k, v in whole.items())
    assert alone.rejection_reasons(torch.ones(1)) == {"torch": Reason.WORLD_SIZE_1, "cpu": Reason.WORLD_SIZE_1}
    for g in (group, everyone, given, alone, tensor_parallel, pipeline):
        g.destroy()


def test_sub_groups_work_side_by_side() -> None:
    run_ranks(_sub_groups, 4)


def _refusals(rank: int) -> None:
    group = _group(2)
    x = torch.ones(4, 3)
    for call, match in [
        (lambda: group.all_reduce(x, out=torch.ones(3, 4)), "out must be like the input"),
        (lambda: group.all_reduce(x, out=torch.ones(4, 3, dtype=torch.float16)), "out must be like the input"),
        (lambda: group.all_reduce(x.view(-1)[:8], out=x.view(-1)[4:]), "overlaps"),
        (lambda: group.all_reduce(x, out=torch.zeros(4, 1).expand(4, 3)), "expanded"),
        (lambda: group.broadcast(torch.zeros(4, 1).expand(4, 3)), "expanded"),
        (lambda: group.all_reduce_sum2(x, x.half()), "two tensors alike"),
        (lambda: group.all_gather(x, 2), "dim 2 is out of range"),
        (lambda: group.reduce_scatter(x, 1), "divides by 2"),
        (lambda: group.broadcast(x, 2), "ranks 0 to 1"),
        (lambda: group.send(x, rank), "this rank itself"),
        (lambda: group.all_gatherv(x, 0, [4]), "one size for each"),
        (lambda: group.all_gatherv(x, 0, [1, 2]), "sizes say"),
        (lambda: group.reduce_scatterv(x, 0, [1, 2]), "add up to 3"),
    ]:
        with pytest.raises(ValueError, match=match):
            call()
    with pytest.raises(NotImplementedError, match="no gradient"):
        group.all_reduce(x.requires_grad_())
    lazy = torch.full((3,), 1 + 2j).conj()
    for call in (lambda: group.all_gather(lazy, 0), lambda: group.all_reduce(lazy.imag), lambda: group.broadcast(lazy)):
        with pytest.raises(NotImplementedError, match="resolve_neg"):
            call()
    on_one = SimpleNamespace(requires_grad=False, is_neg=bool, is_conj=bool, is_cuda=True, device="cuda:1")
    on_one.get_device = lambda: 1
    with pytest.raises(ValueError, match="the tensor is on cuda:1, this group's is cuda:0"):
        check_input(on_one, torch.device("cuda:0"))  # type: ignore[arg-type]
    for ranks, match in [([1, 0], "ascending"), ([0, 5], "below 2"), ([1 - rank], "only members")]:
        with pytest.raises(ConfigError, match=match):
            GroupCoordinator(ranks, rank, "cpu")
    with pytest.raises(ConfigError, match="emulate_link_gbps"):
        GroupCoordinator([0, 1], rank, "cpu", emulate_link_gbps=0)
    assert group.all_reduce(torch.ones(2)).tolist() == [2, 2]
    off = _group(2, max_bytes=0, copy_engine_max_bytes=0)
    assert off.rejection_reasons(x) == {"cpu": Reason.DISABLED, "torch": None}
    assert off.all_reduce(torch.ones(2)).tolist() == [2, 2]
    assert off.served == {"torch": 1}
    assert group.rejection_reasons(torch.ones(2, dtype=torch.int8))["cpu"] == Reason.DTYPE_UNSUPPORTED
    off.destroy()
    group.destroy()


def test_bad_calls_are_refused_and_the_group_goes_on() -> None:
    run_ranks(_refusals, 2)


def _disagreements(rank: int) -> None:
    for field, values in [
        ("max_bytes", (65536, 131072)),
        ("copy_engine_max_bytes", (0, 20_971_520)),
        ("copy_engine_pieces", (4, "auto")),
        ("timeout_s", (20.0, 21.0)),
    ]:
        config = {"max_bytes": 0, "timeout_s": 20.0} | {field: values[rank]}
        with pytest.raises(ConfigError, match=f"^{field} differs between the ranks, .*{values[0]}.*{values[1]}"):
            GroupCoordinator([0, 1], rank, "cpu", HostReduceConfig(**config))  # type: ignore[arg-type]
    group = _group(2)
    assert group.all_reduce(torch.ones(2)).tolist() == [2, 2]
    group.destroy()


def test_ranks_that_were_configured_differently_all_say_so() -> None:
    run_ranks(_disagreements, 2)
