"""The torch.distributed groups that coordinators bring along, handed on from one coordinator to the next.

``torch.distributed.new_group`` can make a group by its members alone, but names it after its ranks and the number of
groups that the process has: members with different numbers hang, and so does a name that was given up and comes again,
because it finds the keys of its former life in the store. So groups get names of their own here, which never come
again, and a coordinator returns its sound groups, where the next one of the same ranks takes them.

A collective that gloo was left with half done cannot be cancelled; it ends by its timeout, and the end of its group
would wait for it. So a spoilt group is kept until then.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from tpoverlap.comm.rendezvous import StoreExchange

_GRACE_S = 1.0
_Key = tuple[str, tuple[int, ...], float]


class GroupPool:
    """Groups by backend, ranks and timeout. All members take groups of one key in the same order."""

    def __init__(self) -> None:
        self._spoilt: list[tuple[float, dist.ProcessGroup]] = []
        self._begin_life(None)

    def _begin_life(self, world: dist.ProcessGroup | None) -> None:
        self._world = world
        self._free: dict[_Key, list[dist.ProcessGroup]] = defaultdict(list)
        self._taken: dict[dist.ProcessGroup, _Key] = {}
        self._requests: Counter[_Key] = Counter()

    def take(self, backend: str, ranks: Sequence[int], timeout_s: float) -> dist.ProcessGroup:
        """A group that all ``ranks`` have free, or a new one. Collective over ``ranks``.

        Raises CollectiveTimeoutError naming the members that do not come within ``timeout_s``.
        """
        key = (backend, tuple(ranks), timeout_s)
        name = self._next_name(key)
        self._end_spoilt()
        free = self._free[key]
        # One member may have called a group sound whose end another has seen fail.
        offers = self._exchange(ranks, timeout_s).all_gather(f"{name}/free", [g.group_name for g in free])
        common = [n for n in offers[0] if all(n in names for names in offers)]
        if common:
            group = next(g for g in free if g.group_name == common[0])
            free.remove(group)
        else:
            group = _new_group(name, backend, ranks, timeout_s)
        self._taken[group] = key
        return group

    def all_gather(self, what: str, ranks: Sequence[int], value: Any, timeout_s: float) -> list[Any]:
        """Every rank's ``value`` (JSON) before they have a group; errors as of :meth:`take`."""
        name = self._next_name((what, tuple(ranks), 0.0))
        return self._exchange(ranks, timeout_s).all_gather(name, value)

    def give_back(self, group: dist.ProcessGroup, sound: bool) -> None:
        """sound: no collective of the group was left half done. Groups that are not from here are left alone."""
        key = self._taken.pop(group, None)
        if key is None or self._world is not dist.group.WORLD:
            return
        if sound:
            self._free[key].append(group)
        elif key[0] == "gloo":
            # Its threads and connections would stay for good. Communicators of a device end with the default group.
            dist.destroy_process_group(group)
            self._spoilt.append((time.monotonic() + key[2] + _GRACE_S, group))

    def _next_name(self, key: _Key) -> str:
        if self._world is not dist.group.WORLD:
            # The former default group is gone, and every group with it.
            self._begin_life(dist.group.WORLD)
        self._requests[key] += 1
        what, ranks, timeout_s = key
        return f"tpoverlap/{what}/{'_'.join(map(str, ranks))}/{timeout_s:g}/{self._requests[key]}"

    def _end_spoilt(self) -> None:
        now = time.monotonic()
        self._spoilt = [(end, group) for end, group in self._spoilt if end > now]

    def _exchange(self, ranks: Sequence[int], timeout_s: float) -> StoreExchange:
        assert self._world is not None
        store = self._world.get_group_store()
        return StoreExchange(store, list(ranks).index(dist.get_rank()), len(ranks), timeout_s)


def _new_group(name: str, backend: str, ranks: Sequence[int], timeout_s: float) -> dist.ProcessGroup:
    """``torch.distributed.new_group`` by the members alone, under a given name."""
    assert dist.group.WORLD is not None
    group, _ = c10d._new_process_group_helper(
        len(ranks),
        list(ranks).index(dist.get_rank()),
        list(ranks),
        dist.Backend(backend),
        dist.group.WORLD.get_group_store(),
        name,  # type: ignore[arg-type]
        timeout=timedelta(seconds=timeout_s),
    )
    c10d._world.pg_group_ranks[group] = {rank: i for i, rank in enumerate(ranks)}
    return group


pool = GroupPool()
