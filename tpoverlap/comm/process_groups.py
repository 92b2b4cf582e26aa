"""The torch.distributed groups that coordinators bring along, handed on from one coordinator to the next.

torch derives the name of a group made by its members alone from their ranks and the names in use. A name that was
given up and comes again finds the keys of its former life in the store, and hangs. So groups are not destroyed one by
one: a coordinator returns a sound group here, where the next one of the same ranks takes it; they all end with
``torch.distributed.destroy_process_group()``.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist

_Key = tuple[str, tuple[int, ...], float]


class GroupPool:
    """Groups by backend, ranks and timeout. All members take and return in the same order."""

    def __init__(self) -> None:
        self._world: dist.ProcessGroup | None = None
        self._free: dict[_Key, list[dist.ProcessGroup]] = defaultdict(list)
        self._taken: dict[int, _Key] = {}

    def take(self, backend: str, ranks: Sequence[int], timeout_s: float) -> dist.ProcessGroup:
        if self._world is not dist.group.WORLD:
            # The former default group is gone, and every group with it.
            self._world = dist.group.WORLD
            self._free.clear()
            self._taken.clear()
        key = (backend, tuple(ranks), timeout_s)
        if self._free[key]:
            group = self._free[key].pop()
        else:
            # Local synchronization: only the members take part, so that disjoint groups can be made side by side.
            group = dist.new_group(
                list(ranks), timeout=timedelta(seconds=timeout_s), backend=backend, use_local_synchronization=True
            )
        self._taken[id(group)] = key
        return group

    def give_back(self, group: dist.ProcessGroup, sound: bool) -> None:
        """sound: no collective of the group was left half done. Groups that are not from here are left alone."""
        key = self._taken.pop(id(group), None)
        if key is not None and sound and self._world is dist.group.WORLD:
            self._free[key].append(group)


pool = GroupPool()
