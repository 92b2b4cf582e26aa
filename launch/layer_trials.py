"""The arms of bench_layers.py on one rank."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.distributed as dist
from allreduce_contest import WrongResultError
from bench_teams import HOST, PEER, Team
from layer_stack import LayerStack, StackShape

from tpoverlap.comm import GroupCoordinator
from tpoverlap.config import HostReduceConfig, OverlapConfig
from tpoverlap.microbatch import Batch, MicroBatchExecutor, split_tokens

# Largest relative L2 distance of an output to the serial run's: GEMMs of other sizes add up in another order.
TOLERANCE = 0.02
PIECES = (2, 3, 4)
NCCL, COPY_ENGINES, PEER_NCCL = "NCCL", "copy engines", "NCCL with P2P"
GLOO, CHANNEL = "gloo", "channel"
_CUT_MULTIPLE = 128
_HOST_REPETITIONS = 5
# 2^-110: in place, 2 all-reduces a layer and piece double it up to 192 times, which BF16 can still hold.
_SMALL = 2.0**-110


@dataclass(frozen=True)
class Trial:
    """An arm. owner: the team that runs it."""

    name: str
    owner: str
    run: Callable[[], object]
    check: Callable[[], object]


@dataclass(frozen=True)
class HostCosts:
    """Of one way to run the stack, medians over forward passes, in seconds. pieces: of the batch. issue_s: host time of
    a call. handover_s: one hand-over. exposed_s: waiting for communication in a pass."""

    way: str
    pieces: int
    issue_s: float
    handover_s: float | None
    exposed_s: float


@dataclass
class Transport:
    """A group whose all-reduces one provider serves, and what runs forward passes on it."""

    name: str
    provider: str
    group: GroupCoordinator
    executors: dict[str, MicroBatchExecutor] = field(default_factory=dict)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """As suits it: the backend's own sum replaces its input."""
        return self.group.all_reduce(x, out=x if self.provider == "torch" else None)


class Trials:
    """Makes arms, the same ones on every rank of all teams; what they share lives until :meth:`close`."""

    def __init__(self, team: Team, shape: StackShape, num_layers: int) -> None:
        self._team = team
        self._hidden_size = shape.hidden
        self._num_layers = num_layers
        self._stack = LayerStack(shape, num_layers, torch.bfloat16, team.device, team.rank)
        self._transports = self._open()

    @property
    def served(self) -> tuple[str, str]:
        """Names of the baseline's transport and of ours."""
        return (NCCL, COPY_ENGINES) if self._team.device.type == "cuda" else (GLOO, CHANNEL)

    def begin(self, tokens: int) -> None:
        """Makes the input, and what the serial run gives for it on torch.distributed. A collective of all teams."""
        generator = torch.Generator(self._team.device).manual_seed(tokens)
        self._hidden = torch.randn(
            tokens, self._hidden_size, dtype=torch.bfloat16, device=self._team.device, generator=generator
        )
        self._batch = _batch(self._hidden)
        for name in (HOST, PEER):  # not at once: the teams share the GPUs
            self._team.meet()
            if self._team.name == name:
                self._expected = self._serial(self._transports[0])
        if not bool(self._expected.isfinite().all()):
            raise WrongResultError(f"the serial run of {tokens} tokens gives values that are not finite")

    def of_tokens(self, with_peer: bool) -> Iterator[Trial]:
        """The arms for the present input."""
        for at, name in enumerate(self.served):
            transport = self._transports[at if self._team.name == HOST else 0]
            yield self._forward(f"serial, {name}", HOST, partial(self._serial, transport))
            for way in self._ways():
                yield self._forward(f"{way}, {name}", HOST, partial(self._split, transport, way))
            for pieces in (1, *PIECES):
                sources = self._pieces(pieces)
                run = partial(self._communicate, transport, [torch.empty_like(part) for part in sources], sources)
                yield Trial(f"communication, {_pieces(pieces)}, {name}", HOST, run, self._nothing_to_check)
        for pieces in (1, *PIECES):
            for part in ("attention", "mlp"):
                run = partial(getattr(self._stack, f"{part}_alone"), self._pieces(pieces))
                yield Trial(f"{part} compute, {_pieces(pieces)}", HOST, run, self._nothing_to_check)
        if with_peer:
            yield self._forward(f"serial, {PEER_NCCL}", PEER, partial(self._serial, self._transports[0]))

    def host_costs(self) -> list[HostCosts]:
        """What the host takes; on the host team, and empty elsewhere."""
        if self._team.name != HOST:
            return []
        found = []
        for transport in self._transports:
            issue = [self._issue_s(partial(self._serial, transport)) for _ in range(_HOST_REPETITIONS)]
            found.append(HostCosts(f"serial, {transport.name}", 1, statistics.median(issue), None, 0.0))
            for way in self._ways():
                executor = transport.executors[way]
                issue, handovers, exposed = [], [], []
                for _ in range(_HOST_REPETITIONS):
                    issue.append(self._issue_s(partial(self._split, transport, way)))
                    exposed.append(executor.stats.exposed_s)
                    handovers += [i.end_s - i.start_s for i in executor.stats.intervals if i.kind == "handover"]
                found.append(
                    HostCosts(
                        f"{way}, {transport.name}",
                        executor.stats.num_pieces,
                        statistics.median(issue),
                        statistics.median(handovers),
                        statistics.median(exposed),
                    )
                )
        return found

    def close(self) -> None:
        for transport in self._transports:
            for executor in transport.executors.values():
                executor.close()
            transport.group.destroy()

    def _open(self) -> list[Transport]:
        """The baseline first. The peer team has only that."""
        team, off = self._team, HostReduceConfig(max_bytes=0, copy_engine_max_bytes=0)
        baseline, ours = self.served
        configs = {baseline: ("torch", off)}
        if team.name == HOST:
            configs[ours] = ("copy_engine" if team.device.type == "cuda" else "cpu", HostReduceConfig())
        transports = []
        for name, (provider, config) in configs.items():
            group = GroupCoordinator(team.ranks, team.rank, team.device, config, unique_name=name)
            transport = Transport(name, provider, group)
            for way, pieces in self._ways().items():
                overlap = OverlapConfig(min_tokens=1, num_pieces=pieces, cut_multiple=_CUT_MULTIPLE)  # type: ignore[arg-type]
                transport.executors[way] = MicroBatchExecutor(group, overlap)
            transports.append(transport)
        return transports

    @staticmethod
    def _ways() -> dict[str, int | str]:
        return {**{_pieces(count): count for count in PIECES}, "auto": "auto"}

    def _pieces(self, count: int) -> list[torch.Tensor]:
        tokens = self._hidden.shape[0]
        cut = split_tokens([0, tokens], [tokens], num_pieces=count, cut_multiple=_CUT_MULTIPLE)
        return [self._hidden[slice(*piece.token_range)] for piece in cut]

    @torch.inference_mode()
    def _serial(self, transport: Transport) -> torch.Tensor:
        return self._stack.forward(self._hidden, transport.all_reduce)

    @torch.inference_mode()
    def _split(self, transport: Transport, way: str) -> torch.Tensor:
        def forward(piece: Batch) -> torch.Tensor:
            assert piece.inputs_embeds is not None  # _batch gives them
            return self._stack.forward(piece.inputs_embeds, transport.all_reduce)

        output = transport.executors[way].run(forward, self._batch)
        assert isinstance(output, torch.Tensor)  # as forward returns it
        return output

    def _communicate(self, transport: Transport, payloads: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
        """The all-reduces of a forward pass, in place as there."""
        for payload, source in zip(payloads, sources, strict=True):
            torch.mul(source, _SMALL, out=payload)
        for _ in range(2 * self._num_layers):
            for payload in payloads:
                transport.group.all_reduce(payload, out=payload)

    def _forward(self, name: str, owner: str, run: Callable[[], torch.Tensor]) -> Trial:
        def check() -> None:
            bits = None
            if self._team.name == owner:
                output = run()
                distance = float((output - self._expected).float().norm() / self._expected.float().norm())
                # Not "> TOLERANCE": that would let a distance of NaN pass.
                bits = (distance <= TOLERANCE, int(output.view(torch.int16).long().sum()), distance)
            answers: list[tuple[bool, int, float] | None] = [None] * self._team.world.size
            dist.all_gather_object(answers, bits)
            given = [answer for answer in answers if answer is not None]
            if not all(near for near, _, _ in given) or len({total for _, total, _ in given}) != 1:
                raise WrongResultError(
                    f"{name}: relative distances {[distance for _, _, distance in given]} to the serial run may be "
                    f"{TOLERANCE:g} at most, and sums of bits {[total for _, total, _ in given]} must be one"
                )
            if self._team.name == owner:
                self._check_provider(name)

        return Trial(name, owner, run, check)

    def _check_provider(self, name: str) -> None:
        for transport in self._transports:
            # "cpu" serves the ranks' agreement on the number of pieces.
            others = transport.group.served.keys() - {transport.provider, "cpu"}
            if name.endswith(transport.name) and others:
                reasons = transport.group.rejection_reasons(self._hidden)
                raise WrongResultError(f"{name}: all-reduces went through {sorted(others)}, because {reasons}")

    def _nothing_to_check(self) -> None:
        """Parts alone compute nothing that the checked arms do not."""

    def _issue_s(self, run: Callable[[], object]) -> float:
        if self._team.device.type == "cuda":
            torch.cuda.synchronize()
        started_s = time.perf_counter()
        run()
        return time.perf_counter() - started_s


def _pieces(count: int) -> str:
    return "1 piece" if count == 1 else f"{count} pieces"


def _batch(hidden: torch.Tensor) -> Batch:
    tokens = hidden.shape[0]
    positions = torch.arange(tokens, device=hidden.device)
    return Batch(
        inputs_embeds=hidden,
        positions=positions,
        query_start_loc=[0, tokens],
        seq_lens=[tokens],
        block_table=torch.zeros(1, 1, dtype=torch.int32, device=hidden.device),
        slot_mapping=torch.full_like(positions, -1),
    )
