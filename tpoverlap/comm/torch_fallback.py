"""The last provider of the chain: torch.distributed, watched by the channel where there is one."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from tpoverlap.comm.channel import Channel
from tpoverlap.comm.cpu import CpuProvider
from tpoverlap.comm.provider import Call, Reason, describe
from tpoverlap.errors import CollectiveTimeoutError, PeerLostError, TpOverlapError

_WAIT_SLICE_S = 0.05
_BLAME_PATIENCE_S = 1.0


class TorchProvider:
    """Collectives through torch.distributed (gloo, NCCL). Sums are the backend's own, outside the bitwise promise.

    On CPU tensors each call first meets the other ranks in the channel (``watch``), so that it ends like any other
    when a peer is dead, late or in a different call. Without a channel the backend's own timeout holds.
    """

    name = "torch"

    def __init__(self, group: dist.ProcessGroup, channel: Channel | None, watch: CpuProvider | None) -> None:
        self.group = group
        self._channel = channel
        self._watch = watch
        self._world_size = group.size()

    def rejection_reason(self, call: Call) -> Reason | None:
        return None

    def all_reduce(self, x: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
        # The backend works in place on contiguous memory.
        work = out if out is not None and out.is_contiguous() else torch.empty(x.shape, dtype=x.dtype, device=x.device)
        if work is not x:
            work.copy_(x)
        self._call("all_reduce", x, lambda: dist.all_reduce(work, group=self.group, async_op=True))
        return work if out is None or work is out else out.copy_(work)

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        result = torch.empty((self._world_size, *x.shape), dtype=x.dtype, device=x.device)
        rows = list(result.unbind(0))
        self._call("all_gather", x, lambda: dist.all_gather(rows, x.contiguous(), group=self.group, async_op=True))
        return result

    def reduce_scatter(self, shards: torch.Tensor) -> torch.Tensor:
        if shards.device.type == "cpu":
            # Not every gloo has a reduce-scatter.
            return self.all_reduce(shards, None)[self.group.rank()].clone()
        result = torch.empty(shards.shape[1:], dtype=shards.dtype, device=shards.device)
        self._call(
            "reduce_scatter",
            shards,
            lambda: dist.reduce_scatter_tensor(
                result.view(-1), shards.contiguous().view(-1), group=self.group, async_op=True
            ),
        )
        return result

    def broadcast(self, x: torch.Tensor, src: int) -> None:
        data = x.contiguous()
        self._call(
            f"broadcast from rank {src}",
            x,
            lambda: dist.broadcast(data, group=self.group, group_src=src, async_op=True),
        )
        if data is not x:
            x.copy_(data)

    def _call(self, operation: str, x: torch.Tensor, launch: Callable[[], Any]) -> None:
        description = describe(operation, x, self.name)

        def run() -> None:
            try:
                work = launch()
                if x.device.type == "cpu":
                    self._await_host(work)
                work.wait()
            except TpOverlapError:
                raise
            except RuntimeError as e:
                self._explain(e, description)

        if self._watch is not None and x.device.type == "cpu":
            self._watch.meet(description, run)
        else:
            run()

    def _await_host(self, work: Any) -> None:
        """Waits for work of a host backend, which cannot be cancelled, but leaves it alone if the group fails."""
        done = threading.Event()
        work.get_future().add_done_callback(lambda _: done.set())
        while not done.wait(_WAIT_SLICE_S):
            if self._channel is not None:
                self._channel.check()

    def _explain(self, error: RuntimeError, description: str) -> None:
        """Raises the error of ours that the backend's stands for, from it."""
        if self._channel is not None:
            # The connection of a dead peer may break before the watcher has seen the death.
            waited = threading.Event()
            for _ in range(int(_BLAME_PATIENCE_S / _WAIT_SLICE_S)):
                if self._channel.failed:
                    raise self._channel.failure_error() from error
                waited.wait(_WAIT_SLICE_S)
        text = str(error)
        if "imed out" in text or "imeout" in text:
            raise CollectiveTimeoutError(f"{description}: {text}") from error
        if "onnection" in text:
            raise PeerLostError(f"a peer closed its connection during {description}: {text}") from error
        raise error
