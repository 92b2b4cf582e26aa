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
from weakref import WeakKeyDictionary, ref

import torch.distributed as dist

# Its functions take the default group of the time of the import as a default argument. Imported after
# init_process_group, as torch.compile and transformers do, it would keep that group, and gloo's threads, for good.
import torch.distributed.nn  # noqa: F401
from torch.distributed import distributed_c10d as c10d

from tpoverlap.comm.rendezvous import StoreExchange
from tpoverlap.errors import CollectiveTimeoutError

_GRACE_S = 1.0
_Key = tuple[str, tuple[int, ...], float]


class _Life:
    """The groups of one default process group. torch.distributed keeps them alive, until it is told to end them."""

    def __init__(self) -> None:
        self.free: dict[_Key, list[ref[dist.ProcessGroup]]] = defaultdict(list)
        self.taken: WeakKeyDictionary[dist.ProcessGroup, _Key] = WeakKeyDictionary()
        self.requests: Counter[_Key] = Counter()


class GroupPool:
    """Groups by backend, ranks and timeout. All members take groups of one key in the same order.

    Sound groups are referred to weakly: one that outlived ``destroy_process_group()`` would take gloo's threads along
    to the end of the process, where a thread that lets go of its last tensor aborts the interpreter.
    """

    def __init__(self) -> None:
        self._spoilt: list[tuple[float, dist.ProcessGroup]] = []
        self._lives: WeakKeyDictionary[dist.ProcessGroup, _Life] = WeakKeyDictionary()

    def take(self, backend: str, ranks: Sequence[int], timeout_s: float, name: str | None = None) -> dist.ProcessGroup:
        """A group that all ``ranks`` have free, or a new one. Collective over ``ranks``.

        name: of this request, the same on all ranks and never given again; None numbers them, which needs that no
        member gives up on one. Raises CollectiveTimeoutError naming the members that do not come within ``timeout_s``.
        """
        key = (backend, tuple(ranks), timeout_s)
        name = name or self._next_name(key)
        self._end_spoilt()
        life = self._life()
        free = {group.group_name: group for known in life.free[key] if (group := known()) is not None}
        # One member may have called a group sound whose end another has seen fail.
        offers = self._exchange(ranks, timeout_s).all_gather(f"{name}/free", list(free))
        common = [n for n in offers[0] if all(n in names for names in offers)]
        if common:
            group = free[common[0]]
            life.free[key].remove(ref(group))
        else:
            try:
                group = _new_group(name, backend, ranks, timeout_s)
            except dist.DistError as e:  # a member gave up behind the exchange
                raise CollectiveTimeoutError(f"not all of ranks {list(ranks)} made {name!r}: {e}") from e
        life.taken[group] = key
        return group

    def all_gather(self, what: str, ranks: Sequence[int], value: Any, timeout_s: float) -> list[Any]:
        """Every rank's ``value`` (JSON) before they have a group; errors as of :meth:`take`."""
        name = self._next_name((what, tuple(ranks), 0.0))
        return self._exchange(ranks, timeout_s).all_gather(name, value)

    def give_back(self, group: dist.ProcessGroup, sound: bool) -> None:
        """sound: no collective of the group was left half done. Groups that are not from here are left alone."""
        if dist.group.WORLD is None:
            return
        life = self._life()
        key = life.taken.pop(group, None)
        if key is None:
            return
        if sound:
            life.free[key].append(ref(group))
        elif key[0] == "gloo":
            # Its threads and connections would stay for good. Communicators of a device end with the default group.
            dist.destroy_process_group(group)
            self._spoilt.append((time.monotonic() + key[2] + _GRACE_S, group))

    def _life(self) -> _Life:
        assert dist.group.WORLD is not None
        return self._lives.setdefault(dist.group.WORLD, _Life())

    def _next_name(self, key: _Key) -> str:
        requests = self._life().requests
        requests[key] += 1
        what, ranks, timeout_s = key
        return f"tpoverlap/{what}/{'_'.join(map(str, ranks))}/{timeout_s:g}/{requests[key]}"

    def _end_spoilt(self) -> None:
        now = time.monotonic()
        self._spoilt = [(end, group) for end, group in self._spoilt if end > now]

    def _exchange(self, ranks: Sequence[int], timeout_s: float) -> StoreExchange:
        assert dist.group.WORLD is not None
        store = dist.group.WORLD.get_group_store()
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
