"""A small tensor-parallel engine, written against a group coordinator of the shape that engines have; run by torchrun.

``engine_script.py MODULE:CLASS`` runs it with that coordinator and prints a digest of everything that it computed. The
engine's own class is ``torch_coordinator:GroupCoordinator``; ``tpoverlap.comm:GroupCoordinator`` takes its place by
being named here, without another change.
"""

from __future__ import annotations

import hashlib
import importlib
import os
import sys
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

VOCABULARY, HIDDEN, LAYERS = 32, 16, 3

_TP: Any = None
_PP: Any = None


def get_tp_group() -> Any:
    assert _TP is not None, "the tensor-parallel group is not initialized"
    return _TP


def init_groups(coordinator: type) -> None:
    global _TP, _PP
    ranks, local_rank = list(range(dist.get_world_size())), int(os.environ["LOCAL_RANK"])
    _TP = coordinator(ranks, local_rank, torch.device("cpu"), unique_name="tp:0")
    _PP = coordinator(ranks, local_rank, torch.device("cpu"), unique_name="pp:0")


class Digest:
    def __init__(self) -> None:
        self._hash = hashlib.sha256()

    def add(self, name: str, value: Any) -> None:
        if isinstance(value, torch.Tensor):
            value = (tuple(value.shape), str(value.dtype), value.double().tolist())
        self._hash.update(f"{name}={value!r}\n".encode())

    def __str__(self) -> str:
        return self._hash.hexdigest()[:16]


def weight(seed: int, rows: int, columns: int) -> torch.Tensor:
    """Small integers: sums are exact in any order, so that two coordinators can be compared bit for bit."""
    return torch.randint(-2, 3, (rows, columns), generator=torch.Generator().manual_seed(seed)).float()


def shard(x: torch.Tensor, dim: int) -> torch.Tensor:
    group = get_tp_group()
    return x.chunk(group.world_size, dim)[group.rank_in_group]


def embed(tokens: torch.Tensor) -> torch.Tensor:
    """Vocabulary-parallel: each rank has its rows, the others count as zero."""
    group = get_tp_group()
    rows = VOCABULARY // group.world_size
    local = tokens - group.rank_in_group * rows
    mine = (local >= 0) & (local < rows)
    table = shard(weight(0, VOCABULARY, HIDDEN), 0)
    return group.all_reduce(F.embedding(local.clamp(0, rows - 1), table) * mine[:, None])


def layer(x: torch.Tensor, k: int) -> torch.Tensor:
    """Column-parallel, then row-parallel."""
    up = F.relu(F.linear(x, shard(weight(2 * k + 1, 2 * HIDDEN, HIDDEN), 0)))
    down = F.linear(up, shard(weight(2 * k + 2, HIDDEN, 2 * HIDDEN), 1))
    return (x + get_tp_group().all_reduce(down)) % 7


def sequence_parallel_layer(x: torch.Tensor, k: int) -> torch.Tensor:
    """The same with the sequence scattered between the layers, in even or uneven parts."""
    group = get_tp_group()
    up = F.relu(F.linear(x, shard(weight(2 * k + 1, 2 * HIDDEN, HIDDEN), 0)))
    down = F.linear(up, shard(weight(2 * k + 2, HIDDEN, 2 * HIDDEN), 1))
    tokens = x.shape[0]
    if tokens % group.world_size == 0:
        return (x + group.all_gather(group.reduce_scatter(down, 0), 0)) % 7
    sizes = [tokens // group.world_size + (q < tokens % group.world_size) for q in range(group.world_size)]
    return (x + group.all_gatherv(group.reduce_scatterv(down, 0, sizes), 0, sizes)) % 7


def logits(x: torch.Tensor) -> torch.Tensor | None:
    """On the first rank alone, where tokens are sampled."""
    return get_tp_group().gather(F.linear(x, shard(weight(99, VOCABULARY, HIDDEN), 0)), 0, -1)


def step(tokens: torch.Tensor) -> torch.Tensor:
    x = embed(tokens)
    for k in range(LAYERS):
        x = layer(x, k) if k % 2 == 0 else sequence_parallel_layer(x, k)
    with get_tp_group().graph_capture():
        found = logits(x)
    sampled = found.argmax(-1) if found is not None else torch.empty_like(tokens)
    return get_tp_group().broadcast(sampled, 0)


def generate(digest: Digest) -> None:
    group = get_tp_group()
    request = {"tokens": torch.arange(7) % VOCABULARY, "steps": 5, "name": "request 1"} if group.is_first_rank else None
    request = group.broadcast_tensor_dict(request, 0)
    tokens = request["tokens"]
    for _ in range(request["steps"]):
        sampled = step(tokens)
        tokens = torch.cat([tokens, sampled[-1:]])
        digest.add("sampled", sampled)
    digest.add("tokens", tokens)
    settings = [None, None] if not group.is_first_rank else [{"temperature": 0}, "greedy"]
    digest.add("settings", group.broadcast_object_list(settings, 0))
    digest.add("finished", group.broadcast_object({"reason": "length"} if group.is_first_rank else None, 0))


def pipeline(digest: Digest) -> None:
    """The first rank hands its activations to the last, which sends a verdict back."""
    assert _PP is not None
    activations = {"hidden": weight(7, 4, HIDDEN), "residual": weight(8, 4, HIDDEN).half(), "step": 3}
    if _PP.is_first_rank:
        _PP.send_tensor_dict(activations, _PP.world_size - 1)
        digest.add("verdict", _PP.recv_object(_PP.world_size - 1))
        _PP.send(activations["hidden"], 1)
    else:
        received = _PP.recv_tensor_dict(0)
        for name, value in received.items():
            digest.add(name, value)
        _PP.send_object({"sum": received["hidden"].sum().item()}, 0)
        digest.add("hidden", _PP.recv((4, HIDDEN), torch.float32, 0))
    _PP.barrier()


def identity(digest: Digest) -> None:
    for group in (get_tp_group(), _PP):
        assert group.rank == dist.get_rank()
        assert dist.get_process_group_ranks(group.cpu_group) == group.ranks
        assert dist.get_world_size(group.device_group) == group.world_size
        for name in ("ranks", "world_size", "local_rank", "rank_in_group", "device", "first_rank", "last_rank"):
            digest.add(name, getattr(group, name))
        for name in ("next_rank", "prev_rank", "is_first_rank", "is_last_rank"):
            digest.add(name, getattr(group, name))
        assert group.unique_name.split(":")[0] in ("tp", "pp")


def main() -> None:
    module, name = sys.argv[1].split(":")
    dist.init_process_group("gloo")
    init_groups(getattr(importlib.import_module(module), name))
    digest = Digest()
    identity(digest)
    with torch.inference_mode():
        generate(digest)
    pipeline(digest)
    print(f"rank {dist.get_rank()} digest {digest}", flush=True)
    get_tp_group().destroy()
    _PP.destroy()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
