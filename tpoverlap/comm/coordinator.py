"""The group of ranks that a model shards over: its collectives, each through the best provider."""

from __future__ import annotations

import dataclasses
import itertools
import logging
from collections import Counter
from collections.abc import Sequence

import torch
import torch.distributed as dist

from tpoverlap.comm.arguments import (
    alike,
    call_of,
    check_input,
    check_out,
    checked_dimension,
    checked_ranks,
    indexed_device,
    padded_rows,
)
from tpoverlap.comm.channel import Channel
from tpoverlap.comm.cpu import CpuProvider
from tpoverlap.comm.gpu_providers import GPU_PROVIDERS, gpu_layout, open_gpu_providers
from tpoverlap.comm.layout import Layout, page_aligned
from tpoverlap.comm.messages import Messages
from tpoverlap.comm.process_groups import pool
from tpoverlap.comm.provider import Call, Completion, Provider, Reason
from tpoverlap.comm.rendezvous import StoreExchange
from tpoverlap.comm.scheduler import current_scheduler, run_to_the_end
from tpoverlap.comm.torch_fallback import TorchProvider
from tpoverlap.config import HostReduceConfig
from tpoverlap.errors import ChannelError, ConfigError

logger = logging.getLogger("tpoverlap")

# Slots of the CPU provider stay in cache between the writer and the reader.
_CPU_SLOT_BYTES = 2 << 20
_instances: Counter[str] = Counter()
_names = itertools.count()


class GroupCoordinator(Messages):
    """One group of ranks and its collectives.

    ranks: global ranks of the group, ascending; every one of them, and nobody else, makes the coordinator. local_rank:
    of this process on its host. device: where the tensors live. config: how they travel. process_group: use this
    group of the same ranks; None makes gloo (and, on CUDA, NCCL) groups of their own. The default process group must
    be initialized. unique_name: for messages. emulate_link_gbps: slow CPU transfers to that many GB/s.

    Collectives run through the calling thread's :class:`~tpoverlap.comm.scheduler.CollectiveScheduler`; one thread at
    a time uses a group. Where a peer dies, hangs or calls something else, they raise PeerLostError,
    CollectiveTimeoutError, CollectiveMismatchError or CollectiveAbortedError on every rank, and never hang. Ranks whose
    configurations differ all get a ConfigError.
    """

    def __init__(
        self,
        ranks: Sequence[int],
        local_rank: int,
        device: torch.device | str,
        config: HostReduceConfig | None = None,
        process_group: dist.ProcessGroup | None = None,
        *,
        unique_name: str | None = None,
        emulate_link_gbps: float | None = None,
    ) -> None:
        self.ranks = checked_ranks(ranks)
        self.rank = dist.get_rank()
        self.world_size = len(self.ranks)
        self.rank_in_group = self.ranks.index(self.rank)
        self.local_rank = local_rank
        self.device = indexed_device(torch.device(device))
        self.config = config or HostReduceConfig()
        self.unique_name = unique_name or f"tpoverlap:{next(_names)}"
        if emulate_link_gbps is not None and not emulate_link_gbps > 0:
            raise ConfigError(f"emulate_link_gbps={emulate_link_gbps!r} is not supported: give a positive number")
        if self.world_size > 1:
            self._check_agreement()
        self.cpu_group, self.device_group = self._process_groups(process_group)
        self._destroyed = False
        self._served: Counter[str] = Counter()
        self._channel: Channel | None = None
        self._absent: dict[str, Reason] = {}
        self._chain = (*(GPU_PROVIDERS if self.device.type == "cuda" else ()), CpuProvider.name, TorchProvider.name)
        self._providers: list[Provider] = []
        if self.world_size > 1:
            try:
                self._open_channel(emulate_link_gbps)
            except BaseException:
                if self._channel is not None:
                    self._channel.destroy()
                self._give_back_groups(sound=False)
                raise
        self._torch = TorchProvider(self.cpu_group, self.device_group, self._channel, self._cpu_provider)
        self._providers.append(self._torch)
        self._choices: dict[Call, Provider] = {}

    # Who is where

    @property
    def first_rank(self) -> int:
        """Global rank of the group's first member; ``last_rank``, ``next_rank`` and ``prev_rank`` (cyclic) alike."""
        return self.ranks[0]

    @property
    def last_rank(self) -> int:
        return self.ranks[-1]

    @property
    def is_first_rank(self) -> bool:
        return self.rank == self.first_rank

    @property
    def is_last_rank(self) -> bool:
        return self.rank == self.last_rank

    @property
    def next_rank(self) -> int:
        return self.ranks[(self.rank_in_group + 1) % self.world_size]

    @property
    def prev_rank(self) -> int:
        return self.ranks[(self.rank_in_group - 1) % self.world_size]

    # Collectives

    def all_reduce(self, x: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
        """The sum of ``x`` over the group, in a new tensor or in ``out``; ``x`` itself is never written.

        x: any shape and layout; FP32, FP16 and BF16 travel through the channel, other dtypes through
        torch.distributed. out: of x's shape, dtype and device; may be x itself, but not overlap it otherwise. In a
        group of one rank the result is ``x`` (or ``out`` filled from it). Raises ValueError for an unfit ``out``.
        """
        check_input(x, self.device)
        check_out(x, out)
        if self.world_size == 1:
            return x if out is None else out.copy_(x)
        result = torch.empty_like(x, memory_format=torch.contiguous_format) if out is None else out

        def issue() -> Completion | None:
            return self._choose("all_reduce", x).all_reduce(x, result)

        return run_to_the_end("all_reduce", x, result, issue)

    def all_reduce_sum2(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """The sum over the group of ``a + b``, where each rank's own sum is rounded once to the dtype before the wire.

        a, b: same shape, dtype and device.
        """
        if a.shape != b.shape or a.dtype != b.dtype or a.device != b.device:
            raise ValueError(f"all_reduce_sum2 takes two tensors alike, got {alike(a)} and {alike(b)}")
        check_input(a, self.device)
        check_input(b, self.device)
        return self.all_reduce(a + b)

    def all_gather(self, x: torch.Tensor, dim: int = -1) -> torch.Tensor:
        """The tensors of all ranks, concatenated along ``dim`` in rank order. x: same shape and dtype on every rank."""
        dim = checked_dimension(x, dim)
        if self.world_size == 1:
            return x

        check_input(x, self.device)
        rows = torch.empty((self.world_size, *x.shape), dtype=x.dtype, device=x.device)

        def issue() -> Completion | None:
            return self._choose("all_gather", x).all_gather(x, rows)

        stacked = run_to_the_end("all_gather", x, rows, issue)
        # Here and not in issue: what a model computes with comes from its own stream's memory.
        if dim == 0:
            return stacked.flatten(0, 1)
        shape = (*x.shape[:dim], self.world_size * x.shape[dim], *x.shape[dim + 1 :])
        return stacked.movedim(0, dim).reshape(shape)

    def reduce_scatter(self, x: torch.Tensor, dim: int = -1) -> torch.Tensor:
        """This rank's part, along ``dim``, of the sum of ``x`` over the group.

        x: same shape and dtype on every rank; ``dim`` divides by the group's size (ValueError otherwise).
        """
        dim = checked_dimension(x, dim)
        if x.shape[dim] % self.world_size:
            raise ValueError(
                f"reduce_scatter needs a size along dim {dim} that divides by {self.world_size} ranks, "
                f"got {tuple(x.shape)}"
            )
        if self.world_size == 1:
            return x

        check_input(x, self.device)
        shards = x.unflatten(dim, (self.world_size, -1)).movedim(dim, 0).contiguous()
        result = torch.empty(shards.shape[1:], dtype=x.dtype, device=x.device)
        return run_to_the_end(
            "reduce_scatter",
            shards,
            result,
            lambda: self._choose("reduce_scatter", shards).reduce_scatter(shards, result),
        )

    def all_gatherv(self, x: torch.Tensor, dim: int = 0, sizes: Sequence[int] | None = None) -> torch.Tensor:
        """Like :meth:`all_gather`, for tensors of uneven size: rank q's has ``sizes[q]`` along ``dim``.

        sizes: one a rank, the same on every rank; None means equal. Raises ValueError where x does not have its size.
        """
        dim = checked_dimension(x, dim)
        if sizes is None:
            return self.all_gather(x, dim)
        self._check_sizes(sizes)
        if x.shape[dim] != sizes[self.rank_in_group]:
            raise ValueError(f"rank {self.rank_in_group} has {x.shape[dim]} along dim {dim}, sizes say {list(sizes)}")
        rows = padded_rows(x.movedim(dim, 0), max(sizes))
        gathered = self.all_gather(rows, 0).unflatten(0, (self.world_size, -1))
        return torch.cat([gathered[q, :n] for q, n in enumerate(sizes)]).movedim(0, dim)

    def reduce_scatterv(self, x: torch.Tensor, dim: int = -1, sizes: Sequence[int] | None = None) -> torch.Tensor:
        """Like :meth:`reduce_scatter`, with uneven parts: rank q gets ``sizes[q]`` along ``dim``; they add up to x's.

        sizes: one a rank, the same on every rank; None means equal.
        """
        dim = checked_dimension(x, dim)
        if sizes is None:
            return self.reduce_scatter(x, dim)
        self._check_sizes(sizes)
        if sum(sizes) != x.shape[dim]:
            raise ValueError(f"sizes {list(sizes)} add up to {sum(sizes)}, dim {dim} has {x.shape[dim]}")
        parts = x.movedim(dim, 0).split(list(sizes))
        padded = torch.cat([padded_rows(part, max(sizes)) for part in parts])
        return self.reduce_scatter(padded, 0)[: sizes[self.rank_in_group]].movedim(0, dim)

    def broadcast(self, x: torch.Tensor, src: int = 0) -> torch.Tensor:
        """``x`` of group rank ``src`` on every rank, written into each rank's ``x``, which is returned."""
        self._check_rank(src, "broadcast from")
        if self.world_size == 1:
            return x
        check_input(x, self.device)
        check_out(x, x)

        def launch() -> torch.Tensor:
            self._choose("broadcast", x).broadcast(x, src)
            return x

        return current_scheduler().run("broadcast", (x,), launch)

    def barrier(self) -> None:
        """Returns once every rank of the group has called it."""
        if self.world_size > 1:
            self.all_reduce(torch.zeros(1))

    # Trust

    def rejection_reasons(self, x: torch.Tensor, operation: str = "all_reduce") -> dict[str, Reason | None]:
        """For each provider, in the order of the chain, why it would not serve ``x``; None where it would."""
        call = call_of(operation, x)
        asked = {p.name: p.rejection_reason(call) for p in self._providers}
        reasons: dict[str, Reason | None] = {**self._absent, **asked}
        if self.world_size == 1:
            reasons = dict.fromkeys(self._chain, Reason.WORLD_SIZE_1)
        return {name: reasons[name] for name in self._chain if name in reasons}

    @property
    def served(self) -> dict[str, int]:
        """How many collectives each provider has served on this rank."""
        return dict(self._served)

    @property
    def failed(self) -> bool:
        """Whether the group has failed, seen from any rank of it."""
        return self._channel is not None and self._channel.failed

    @property
    def generation(self) -> int:
        """How many times the group has been reset: the same on all ranks between two collectives."""
        return 0 if self._channel is None else self._channel.generation

    @property
    def failure_delivered(self) -> bool:
        """Whether the present failure has been raised to this rank's caller."""
        return self._channel is not None and self._channel.failure_delivered

    def check(self) -> None:
        """Raises the group's failure, if it has one.

        Where it does not, after a synchronization with the device, the calls until then are sound on this rank.
        """
        if self._channel is not None:
            self._channel.compare_calls()
            self._channel.check()

    def begin_run(self) -> None:
        """An executor begins a run, as all ranks' do, so that a failure can be told from one of the run after it."""
        if self._channel is not None:
            self._channel.begin_run()

    def end_run(self) -> None:
        """Like :meth:`check`, but for failures that a peer has met in a later run already."""
        if self._channel is not None:
            self._channel.end_run()

    def abort(self, why: str, *, raised: bool = False) -> None:
        """Ends collectives under way, on every rank, with CollectiveAbortedError. May be called from any thread.

        raised: this rank's caller gets an exception anyway, so that the failure counts as delivered here.
        """
        if self._channel is not None:
            self._channel.abort(why, raised)

    def reset(self) -> None:
        """Makes the group work again after an abort, a timeout or a mismatch. Collective: every rank calls it.

        Raises PeerLostError after the loss of a rank, which is permanent, and CollectiveTimeoutError when a rank
        does not come.
        """
        if self._channel is not None:
            self._channel.reset()
            try:
                self._renew_cpu_group(f"{self._store_prefix}/reset/{self.generation}")
            except BaseException as e:
                self._channel.abort(f"after a reset its torch group could not be made anew: {e!r}", raised=True)
                raise

    def destroy(self) -> None:
        """Leaves the group and frees what it holds, ``cpu_group`` and ``device_group`` too; once is enough."""
        if self._destroyed:
            return
        self._destroyed = True
        sound = not self.failed
        self._torch.close()
        try:
            if self._channel is not None:
                self._channel.destroy()
        finally:
            self._channel = None
            self._give_back_groups(sound)
            del self.cpu_group, self.device_group
            self._providers.clear()
            self._choices.clear()

    # Parts

    def _check_agreement(self) -> None:
        """ConfigError on every rank where their settings differ: what they choose by them must be the same."""
        mine = dataclasses.asdict(self.config) | {"device": self.device.type}
        everyone = pool.all_gather("config", self.ranks, mine, self.config.timeout_s)
        for field in mine:
            values = [theirs.get(field) for theirs in everyone]
            if any(value != values[0] for value in values):
                raise ConfigError(f"{field} differs between the ranks, {values} in rank order: give all ranks the same")

    def _process_groups(self, given: dist.ProcessGroup | None) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
        if given is not None:
            if dist.get_process_group_ranks(given) != self.ranks:
                raise ConfigError(
                    f"process_group joins ranks {dist.get_process_group_ranks(given)}, the coordinator {self.ranks}"
                )
            return given, given
        cpu_group = pool.take("gloo", self.ranks, self.config.timeout_s)
        if self.device.type != "cuda":
            return cpu_group, cpu_group
        return cpu_group, pool.take("nccl", self.ranks, self.config.timeout_s)

    def _give_back_groups(self, sound: bool) -> None:
        for group in {id(g): g for g in (self.cpu_group, self.device_group)}.values():
            pool.give_back(group, sound)

    @property
    def _cpu_provider(self) -> CpuProvider | None:
        return next((p for p in self._providers if isinstance(p, CpuProvider)), None)

    def _open_channel(self, emulate_link_gbps: float | None) -> None:
        """Adds the providers that stand on a shared segment; those that cannot be are noted with their reason."""
        config, cuda = self.config, self.device.type == "cuda"
        names = self._chain[:-1]
        largest = max(config.copy_engine_max_bytes, config.max_bytes)
        if largest == 0:
            self._absent = dict.fromkeys(names, Reason.DISABLED)
            return
        key = self.cpu_group.group_name
        self._store_prefix = f"{key}/tpoverlap/{_instances[key]}"
        store = dist.PrefixStore(self._store_prefix, self.cpu_group.get_group_store())
        _instances[key] += 1
        exchange = StoreExchange(store, self.rank_in_group, self.world_size, config.timeout_s)
        cpu_slot = page_aligned(min(largest, _CPU_SLOT_BYTES))
        layout = gpu_layout(self.world_size, cpu_slot, config) if cuda else Layout(self.world_size, cpu_slot)
        try:
            self._channel = Channel(self.unique_name, self.rank_in_group, exchange, layout, config.timeout_s)
        except ChannelError as e:
            self._absent = dict.fromkeys(names, Reason(e.reason))
            logger.warning("group %s: no host-memory channel, torch.distributed serves: %s", self.unique_name, e)
            return
        if cuda:
            providers, self._absent = open_gpu_providers(self._channel, exchange, self.device, config)
            self._providers += providers
        self._providers.append(CpuProvider(self._channel, emulate_link_gbps))

    def _choose(self, operation: str, x: torch.Tensor) -> Provider:
        call = call_of(operation, x)
        provider = self._choices.get(call)
        if provider is None:
            if not self._providers:
                raise ChannelError(f"group {self.unique_name!r} is destroyed: make a new one")
            provider = next(p for p in self._providers if p.rejection_reason(call) is None)
            self._choices[call] = provider
        self._served[provider.name] += 1
        return provider

    def _renew_cpu_group(self, name: str) -> None:
        """A host backend's group is of no use once a collective in it was left half done."""
        pool.give_back(self.cpu_group, sound=False)
        renewed = pool.take("gloo", self.ranks, self.config.timeout_s, name)
        if self.device_group is self.cpu_group and self.device.type == "cpu":
            self.device_group = renewed
        self.cpu_group = renewed
        self._torch.cpu_group, self._torch.device_group = self.cpu_group, self.device_group

    def _check_sizes(self, sizes: Sequence[int]) -> None:
        if len(sizes) != self.world_size or min(sizes) < 0:
            raise ValueError(f"sizes needs one size for each of {self.world_size} ranks, got {list(sizes)}")
