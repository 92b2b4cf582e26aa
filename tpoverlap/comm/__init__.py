"""The transport: collectives through host memory, and the coordinator that chooses who serves them.

Read in this order: :mod:`~tpoverlap.comm.protocol` (what makes shared slots safe), :mod:`~tpoverlap.comm.channel`
(the group's segment, its failures and reset), a provider such as :mod:`~tpoverlap.comm.cpu`, and
:mod:`~tpoverlap.comm.coordinator`.
"""

from tpoverlap.comm.coordinator import GroupCoordinator
from tpoverlap.comm.provider import Call, Provider, Reason
from tpoverlap.comm.scheduler import CollectiveScheduler, InlineScheduler, current_scheduler, use_scheduler

__all__ = [
    "Call",
    "CollectiveScheduler",
    "GroupCoordinator",
    "InlineScheduler",
    "Provider",
    "Reason",
    "current_scheduler",
    "use_scheduler",
]
