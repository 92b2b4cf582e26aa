"""The last provider of the chain: torch.distributed, watched by the channel where there is one."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from tpoverlap.comm.channel import Channel
from tpoverlap.comm.cpu import CpuProvider
from tpoverlap.comm.failure import FailureKind
from tpoverlap.comm.provider import Call, Reason, describe
from tpoverlap.errors import ChannelError, CollectiveTimeoutError, PeerLostError, TpOverlapError

_WAIT_SLICE_S = 0.05
_BLAME_PATIENCE_S = 1.0


class TorchProvider:
    """Collectives through torch.distributed (gloo, NCCL). Sums are the backend's own, outside the bitwise promise.

    On CPU tensors each call first meets the other ranks in the channel (``watch``), so that it ends like any other
    when a peer is dead, late or in a different call. Without a channel the backend's own timeout holds.
    """

    name = "torch"

    def __init__(
        self,
        cpu_group: dist.ProcessGroup,
        device_group: dist.ProcessGroup,
        channel: Channel | None,
        watch: CpuProvider | None,
    ) -> None:
        self.cpu_group = cpu_group
        self.device_group = device_group
        self._channel = channel
        self._watch = watch
        self._rank = cpu_group.rank()
        self._world_size = cpu_group.size()
        self._pid = os.getpid()
        self._closed = False

    def close(self) -> None:
        """Lets the groups go: later calls raise ChannelError."""
        self._closed = True
        del self.cpu_group, self.device_group

    def rejection_reason(self, call: Call) -> Reason | None:
        return None

    def all_reduce(self, x: torch.Tensor, out: torch.Tensor) -> None:
        # The backend works in place on contiguous memory.
        work = _staged(x) if x.is_cpu or not out.is_contiguous() else out
        if work is out and out is not x:
            out.copy_(x)
        self._call("all_reduce", x, lambda: dist.all_reduce(work, group=self._group_for(x), async_op=True))
        if work is not out:
            out.copy_(work)

    def all_gather(self, x: torch.Tensor, out: torch.Tensor) -> None:
        rows, data = list(out.unbind(0)), x.contiguous()
        self._call("all_gather", x, lambda: dist.all_gather(rows, data, group=self._group_for(x), async_op=True))

    def reduce_scatter(self, shards: torch.Tensor, out: torch.Tensor) -> None:
        if shards.device.type == "cpu":
            # Not every gloo has a reduce-scatter.
            total = torch.empty_like(shards)
            self.all_reduce(shards, total)
            out.copy_(total[self._rank])
            return
        self._call(
            "reduce_scatter",
            shards,
            lambda: dist.reduce_scatter_tensor(out.view(-1), shards.view(-1), group=self.device_group, async_op=True),
        )

    def broadcast(self, x: torch.Tensor, src: int) -> None:
        data = _staged(x) if x.is_cpu else x.contiguous()
        self._call(
            f"broadcast from rank {src}",
            x,
            lambda: dist.broadcast(data, group=self._group_for(x), group_src=src, async_op=True),
        )
        if data is not x and self._rank != src:
            x.copy_(data)

    def gather(self, x: torch.Tensor, parts: list[torch.Tensor] | None, dst: int) -> None:
        """Every rank's ``x`` into ``parts``, which only group rank ``dst`` gives."""
        data = _staged(x) if x.is_cpu else x.contiguous()
        self._call(
            f"gather to rank {dst}",
            x,
            lambda: dist.gather(data, parts, group=self._group_for(x), group_dst=dst, async_op=True),
        )

    def send(self, x: torch.Tensor, dst: int) -> None:
        """To group rank ``dst``, which calls :meth:`recv` for a tensor of this shape and dtype."""
        data = x.contiguous()
        self.finish(f"send to rank {dst}", x, lambda: dist.isend(data, group=self._group_for(x), group_dst=dst))

    def recv(self, x: torch.Tensor, src: int) -> None:
        """Into contiguous ``x``, from group rank ``src``."""
        self.finish(f"recv from rank {src}", x, lambda: dist.irecv(x, group=self._group_for(x), group_src=src))

    def finish(self, operation: str, x: torch.Tensor, launch: Callable[[], Any]) -> None:
        """Launches work of the backend and waits for it (on CUDA: makes the current stream wait)."""
        if self._closed:
            raise ChannelError(f"the group is destroyed ({describe(operation, x, self.name)}): make a new one")
        if os.getpid() != self._pid:
            raise ChannelError(
                f"the group belongs to process {self._pid}, not to its fork {os.getpid()}: "
                "make the group after the fork"
            )
        if self._channel is not None:
            self._channel.check()
        try:
            work = launch()
            if x.device.type == "cpu":
                self._await_host(work)
            else:
                work.wait()
        except TpOverlapError:
            raise
        except RuntimeError as e:
            self._explain(e, describe(operation, x, self.name))
        except BaseException as e:
            if self._channel is not None:
                # What is under way cannot be called back: a later receive would get what was meant for this one.
                self._channel.abort(f"{type(e).__name__} during {describe(operation, x, self.name)}", raised=True)
            raise

    def _group_for(self, x: torch.Tensor) -> dist.ProcessGroup:
        return self.cpu_group if x.device.type == "cpu" else self.device_group

    def _call(self, operation: str, x: torch.Tensor, launch: Callable[[], Any]) -> None:
        if self._watch is not None and x.device.type == "cpu":
            self._watch.meet(describe(operation, x, self.name), lambda: self.finish(operation, x, launch))
        else:
            self.finish(operation, x, launch)

    def _await_host(self, work: Any) -> None:
        """Waits for work of a host backend, which cannot be cancelled, but leaves it alone if the group fails."""
        done = threading.Event()
        errors: list[RuntimeError] = []

        def wait() -> None:
            try:
                work.wait()
            except RuntimeError as e:
                errors.append(e)
            done.set()

        threading.Thread(target=wait, name="tpoverlap-gloo-wait", daemon=True).start()
        while not done.wait(_WAIT_SLICE_S):
            if self._channel is not None:
                self._channel.check()
        if errors:
            raise errors[0]

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
        timed_out, broken = "imed out" in text or "imeout" in text, "onnection" in text
        if self._channel is not None:
            # The backend's connections are of no use any more; a reset makes new ones.
            kind = FailureKind.TIMEOUT if timed_out else FailureKind.ABORTED
            self._channel.fail(kind, self._rank, f"torch.distributed failed in {description}: {text}")
            if timed_out or broken:
                raise self._channel.failure_error() from error
        if timed_out:
            raise CollectiveTimeoutError(f"{description}: {text}") from error
        if broken:
            raise PeerLostError(f"a peer closed its connection during {description}: {text}") from error
        raise error


def _staged(x: torch.Tensor) -> torch.Tensor:
    """A contiguous copy: a host backend may still read and write what it was given after the call has failed."""
    return x.clone(memory_format=torch.contiguous_format)
