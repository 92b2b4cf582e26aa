"""Times the parts of bench_prefill.py's model, from which launch/predict.py predicts the prefills of the same launch.

All timing is of the host team's slowest rank, medians of a few turns. On a device a gate holds the streams back until a
turn's work is queued, so that no host time is in it.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from bench_teams import HOST
from predict_model import VALUE_BYTES
from predict_records import Measured as MeasuredPrefill
from predict_tables import Curve, Dequantization, DeviceTables, Kernel, PointAttention, Transport
from prefill_arms import BASELINE, OURS, PrefillArm
from prefill_contributions import Measured
from prefill_host import HostTimes, with_layers
from prefill_trials import PrefillTrials
from progress_bar import Progress

from tpoverlap.attention import paged_prefill
from tpoverlap.comm import current_scheduler, use_scheduler
from tpoverlap.microbatch.cpu_lane import CpuCommLane
from tpoverlap.microbatch.cuda_lane import CudaCommLane
from tpoverlap.model.metadata import AttentionMetadata
from tpoverlap.quant.nvfp4.tiles import Tile

TRANSPORTS = {"cuda": {BASELINE: "NCCL", OURS: "copy engines"}, "cpu": {BASELINE: "gloo", OURS: "channel"}}
_TURNS = 5
# Of a loop that runs beside all-reduces.
_LOOP_S = 10e-3
_SHORTEST_S = 1e-9
_CALLS, _ALL_REDUCES, _HAND_OVERS, _RESULTS = 4, 10, 32, 4
# Of the device's clocks: about 4 and 17 ms, several times what the host needs for the work behind them.
_SHORT_GATE, _LONG_GATE = 7_000_000, 30_000_000
_SOURCE = "Measured in the launch that measured the prefills, on the slowest rank."

Work = Callable[[], object]
T = TypeVar("T")


@dataclass(frozen=True)
class Kernels:
    """The kernels that an arm may choose; fields are those of the arm."""

    backend: str
    num_splits: int | None
    tile: Tile | None

    @classmethod
    def of(cls, arm: PrefillArm) -> Kernels:
        return cls(arm.backend, arm.num_splits, arm.tile)

    def __str__(self) -> str:
        parts = f" in {self.num_splits} part" if self.num_splits else ""
        tile = f"{self.tile.groups}x{self.tile.num_warps}" if self.tile else "default"
        return f"{self.backend} attention{parts}, {tile} dequantization tile"


def device_tables(trials: PrefillTrials, arms: Sequence[PrefillArm], shape: str, longest: int) -> list[DeviceTables]:
    """Tables for each choice of kernels that arms of the host team make; the same on every rank, which all call this.

    shape: the name of the model, which the trials have whole. longest: tokens that the cache holds. The cache and the
    states are overwritten.
    """
    chosen: dict[Kernels, PrefillArm] = {}
    for arm in arms:
        if arm.team == HOST:
            chosen.setdefault(Kernels.of(arm), arm)
    pieces = max(max(arm.pieces for arm in chosen.values()), 2)
    with Progress("parts for predictions", len(chosen) + 1) as progress, torch.inference_mode():
        parts = _Parts(trials, pieces, longest)
        base = parts.without_choice(shape, arms[0])
        progress.advance()
        made = []
        for kernels, arm in chosen.items():
            made.append(parts.of_kernels(base, kernels, arm))
            progress.advance(note=str(kernels))
    return made


def measured_by(tables: DeviceTables, prompts: Iterable[Measured], chunk: int, device: str) -> list[MeasuredPrefill]:
    """The prefills that ran with the kernels of these tables, without peer access."""
    return [
        MeasuredPrefill(
            TRANSPORTS[device][arm.transport], arm.pieces, one.length, chunk, one.whole.time(arm.name).median
        )
        for one in prompts
        for arm in one.arms
        if arm.team == HOST and str(Kernels.of(arm)) == tables.name
    ]


class _Parts:
    def __init__(self, trials: PrefillTrials, pieces: int, longest: int) -> None:
        self._trials, self._team, self._model = trials, trials.team, trials.model
        self._longest = longest
        chunk = self._chunk = trials.chunk_tokens
        self._piece = chunk // pieces
        self._sizes = sorted({chunk // 8, chunk // 4, chunk // 2, self._piece, chunk * 3 // 4, chunk})
        # As large a share of them has attention as of all layers.
        layers: Sequence[Any] = list(self._model.layers)
        self._some = layers[: trials.shape.attention_every]
        # More of them, so that none finds its weights dequantized.
        self._many = layers[: 2 * trials.shape.attention_every]
        self._on_device = self._team.device.type == "cuda"
        self._comm = torch.cuda.Stream(self._team.device, priority=-1) if self._on_device else None
        self._aside = torch.cuda.Stream(self._team.device) if self._on_device else None
        self._attention_s: dict[tuple[str, int | None], PointAttention] = {}
        self._slowdowns: dict[tuple[object, ...], float] = {}
        self._transports = TRANSPORTS[self._team.device.type]

    def without_choice(self, shape: str, arm: PrefillArm) -> DeviceTables:
        """What does not depend on the kernels that arms choose; of those, ``arm``'s run. No slow-downs yet."""
        self._trials.configure_alone(arm)
        attention = self._attention(arm)
        mixer, mlp = [], []
        for tokens in self._sizes:
            inputs = self._inputs(tokens, 0)
            mixers = statistics.fmean(self._seconds(inputs.mixers([layer]), _CALLS) for layer in self._some)
            # Of short parts on a busy host the difference can fall below nothing.
            mixer.append((float(tokens), max(_SHORTEST_S, mixers - attention.at(tokens, 0) / len(self._some))))
            mlp.append((float(tokens), self._seconds(inputs.mlps(self._some[:1]), _CALLS)))
        hidden = self._inputs(self._chunk, 0).hidden
        return DeviceTables(
            name=shape,
            sources=(_SOURCE,),
            shape=shape,
            ranks=self._team.size,
            mixer=Curve(tuple(mixer)),
            mlp=Curve(tuple(mlp)),
            dequantization=None,
            attention=attention,
            transports={name: self._transport(arm, at) for at, name in self._transports.items()},
            hand_over=self._hand_over(),
            per_chunk=self._per_chunk(),
            per_prompt=self._seconds(lambda: self._model.shard_logits(hidden[-1:]), _CALLS),
        )

    def of_kernels(self, base: DeviceTables, kernels: Kernels, arm: PrefillArm) -> DeviceTables:
        self._trials.configure_alone(arm)
        inputs = self._inputs(self._chunk, 0)
        cold = [self._seconds(part) / len(self._many) for part in (inputs.mixers(self._many), inputs.mlps(self._many))]
        attention = self._attention(arm)
        warm_mixer = base.mixer.at(self._chunk) + attention.at(self._chunk, 0) / len(self._some)
        of_mixer, of_mlp = (
            max(0.0, seconds - warm) for seconds, warm in zip(cold, (warm_mixer, base.mlp.at(self._chunk)), strict=True)
        )
        transports = {
            name: replace(base.transports[name], slowdown=self._slowdown(arm, at, base.transports[name]))
            for at, name in self._transports.items()
        }
        host = None
        if self._on_device:  # elsewhere computing is issuing
            piece, times = self._inputs(self._piece, 0), HostTimes(self._trials, self._some)
            host = times.of_segments(piece.mixers, piece.mlps(self._some))
            transports = {
                name: replace(transports[name], issue=times.of_all_reduce(arm, at, host))
                for at, name in self._transports.items()
            }
            self._trials.configure_alone(arm)
        return replace(
            base,
            name=str(kernels),
            # Pieces follow each other segment by segment, and the workspace keeps a segment's weights.
            dequantization=Dequantization(of_mixer, of_mlp, per="chunk"),
            attention=attention,
            transports=transports,
            host=host,
        )

    # Parts

    def _attention(self, arm: PrefillArm) -> PointAttention:
        key = arm.backend, arm.num_splits
        if key not in self._attention_s:
            points = []
            for tokens in sorted({max(self._chunk // 4, 1), self._piece, self._chunk}):
                room = self._longest - tokens
                for context in sorted({0, room // 2, room}):
                    points.append((tokens, context, self._seconds(self._attend(arm, tokens, context), 2)))
            self._attention_s[key] = PointAttention(tuple(points))
        return self._attention_s[key]

    def _attend(self, arm: PrefillArm, tokens: int, context: int) -> Work:
        inputs, shape = self._inputs(tokens, context), self._trials.shape
        metadata = inputs.metadata
        caches = self._trials.attentions[0].kv_cache
        assert caches is not None  # the trials have allocated it
        heads = shape.query_heads // self._team.size
        q = torch.randn(tokens, heads, shape.head_dim, dtype=self._model.dtype, device=self._team.device)
        return lambda: paged_prefill(
            q,
            *caches,
            metadata.block_table,
            metadata.cu_seqlens_q,
            metadata.seq_lens,
            max_query_len=tokens,
            backend=arm.backend,
            num_splits=arm.num_splits,
        )

    def _dequantize(self) -> None:
        """The MLP weights of some layers, each anew."""
        for layer in self._many:
            for linear in (layer.mlp.gate_up, layer.mlp.down.linear):
                self._trials.workspace.dense(linear.weight, self._model.dtype)

    def _per_chunk(self) -> float:
        """Of what surrounds the layers: the embedding, the batch's metadata, the last norm."""
        batch = self._trials.batch(self._ids(self._chunk), 0)
        with with_layers(self._model, []):
            return self._seconds(lambda: self._model(batch), _CALLS)

    def _hand_over(self) -> float:
        """What a segment takes longer on the device (on CPU: in all) for handing a collective to the lane and waiting
        for an earlier one."""
        if self._team.name != HOST:
            lane = None
        else:
            lane = CudaCommLane(self._team.device) if self._on_device else CpuCommLane("tpoverlap-comm")
        x = self._inputs(self._piece, 0).hidden
        y = torch.empty_like(x)

        def hand_over() -> None:
            assert lane is not None  # only the host team runs it
            lane.begin_run()
            for _ in range(_HAND_OVERS):
                pending = lane.submit(lambda: None, lane.now(), lambda: False)  # type: ignore[arg-type]
                torch.add(x, 1, out=y)
                pending.result()
                lane.now()

        plain = self._seconds(_times(_HAND_OVERS, lambda: torch.add(x, 1, out=y)))
        seconds = self._seconds(hand_over)
        if lane is not None:
            lane.close()
        return max(0.0, seconds - plain) / _HAND_OVERS

    # Communication

    def _transport(self, arm: PrefillArm, at: int) -> Transport:
        """The transport without slow-downs."""
        points = []
        for tokens in self._sizes:
            seconds = self._seconds(self._all_reduces(at, tokens, _ALL_REDUCES)) / _ALL_REDUCES
            points.append((float(tokens * self._trials.shape.hidden * VALUE_BYTES), seconds))
        all_reduce = Curve(tuple(points))
        # Whole layers in a prompt's middle, for longer than the all-reduces beside them.
        inputs = self._inputs(self._piece, (self._longest - self._piece) // 2)
        compute, compute_s = self._loop([inputs.mixers(self._many), inputs.mlps(self._many)], all_reduce)
        count = max(1, int(0.5 * compute_s / self._all_reduce_s(all_reduce)))
        communicate = self._all_reduces(at, self._piece, count)
        alone, beside = self._alternate((_nothing, communicate), (compute, communicate), of=1)
        return Transport(all_reduce, beside / alone, {})

    def _slowdown(self, arm: PrefillArm, at: int, transport: Transport) -> dict[Kernel, float]:
        """Loops of each kernel beside all-reduces that go on for longer."""
        context = (self._longest - self._piece) // 2
        mlp = self._inputs(self._piece, 0).mlps(self._some[:1])
        loops: dict[Kernel, tuple[Work, object]] = {
            "linear": (mlp, None),
            "dequantization": (self._dequantize, arm.tile),
            "attention": (self._attend(arm, self._piece, context), (arm.backend, arm.num_splits)),
        }
        found: dict[Kernel, float] = {}
        for kernel, (work, choice) in loops.items():
            key = (at, kernel, choice)
            if key not in self._slowdowns:
                compute, compute_s = self._loop([work], transport.all_reduce)
                count = math.ceil(2 * compute_s / self._all_reduce_s(transport.all_reduce))
                communicate = self._all_reduces(at, self._piece, count)
                alone, beside = self._alternate((compute, _nothing), (compute, communicate), of=0)
                self._slowdowns[key] = max(0.0, beside / alone - 1)
            found[kernel] = self._slowdowns[key]
        return found

    def _all_reduce_s(self, all_reduce: Curve) -> float:
        """Of a piece."""
        return all_reduce.at(self._piece * self._trials.shape.hidden * VALUE_BYTES)

    def _all_reduces(self, at: int, tokens: int, count: int) -> Work:
        """All-reduces one after the other, as in the model.

        On the baseline in place, of values that are small again after every few. Ours leave their additions to the
        stream that needs the sums, which is another one than that of the transfers: nobody does here. Only the host
        team, which has a group for each transport, calls what this returns.
        """
        source = self._inputs(tokens, 0).hidden
        payload = source * 2.0**-14
        results = [torch.empty_like(source) for _ in range(_RESULTS)]

        @torch.inference_mode()
        def in_place() -> None:
            group = self._trials.groups[at]
            for i in range(count):
                if i % _ALL_REDUCES == 0:
                    torch.mul(source, 2.0**-14, out=payload)
                group.all_reduce(payload, out=payload)

        @torch.inference_mode()
        def transfer() -> None:
            group = self._trials.groups[at]
            scheduler = _OnStream(torch.cuda.current_stream()) if self._on_device else current_scheduler()
            with torch.cuda.stream(self._aside), use_scheduler(scheduler):
                for i in range(count):
                    group.all_reduce(payload, out=results[i % _RESULTS])

        return in_place if at == BASELINE else transfer

    def _loop(self, works: list[Work], all_reduce: Curve) -> tuple[Work, float]:
        """The works again and again, for several all-reduces of a piece at least; and its seconds."""

        def once() -> None:
            for work in works:
                work()

        once_s = self._seconds(once)
        count = math.ceil(max(_LOOP_S, 4 * self._all_reduce_s(all_reduce)) / once_s)
        return _times(count, once), count * once_s

    # Timing

    def _seconds(self, work: Work, calls: int = 1) -> float:
        """Of one call."""

        def turn() -> float:
            return self._together(_times(calls, work), _nothing, _SHORT_GATE)[0] / calls

        turn()
        return statistics.median(turn() for _ in range(_TURNS))

    def _alternate(self, first: tuple[Work, Work], second: tuple[Work, Work], of: int) -> tuple[float, float]:
        """Seconds of part ``of`` (compute, communication) of two pairs that take turns."""
        turns = [[self._together(*pair, _LONG_GATE)[of] for pair in (first, second)] for _ in range(1 + _TURNS)]
        alone, beside = (statistics.median(column) for column in zip(*turns[1:], strict=True))
        return alone, beside

    def _together(self, compute: Work, communicate: Work, gate: int) -> tuple[float, float]:
        """Seconds of both, which begin together, on the host team's slowest rank."""
        self._team.meet()
        mine = (0.0, 0.0)
        if self._team.name == HOST:
            mine = (
                self._on_streams(compute, communicate, gate) if self._on_device else _in_threads(compute, communicate)
            )
        return self._team.largest(mine[0]), self._team.largest(mine[1])

    def _on_streams(self, compute: Work, communicate: Work, gate: int) -> tuple[float, float]:
        assert self._comm is not None
        start, computed, communicated = (torch.cuda.Event(enable_timing=True) for _ in range(3))
        torch.cuda._sleep(gate)
        start.record()
        self._comm.wait_event(start)
        compute()
        computed.record()
        with torch.cuda.stream(self._comm):
            communicate()
            communicated.record()
        torch.cuda.synchronize()
        return start.elapsed_time(computed) * 1e-3, start.elapsed_time(communicated) * 1e-3

    # Inputs

    def _ids(self, tokens: int) -> torch.Tensor:
        return self._trials.make_prompt(tokens).chunks[0].input_ids  # type: ignore[return-value]

    def _inputs(self, tokens: int, context: int) -> _Inputs:
        """Of ``tokens`` behind ``context`` others."""
        model = self._model
        batch = self._trials.batch(self._ids(tokens), context)
        angles = batch.positions.float()[:, None] * model.rope_inv_freq
        hidden = torch.randn(tokens, self._trials.shape.hidden, dtype=model.dtype, device=model.device)
        return _Inputs(hidden, (angles.cos().to(model.dtype), angles.sin().to(model.dtype)), model.metadata(batch))


class _OnStream:
    """A scheduler whose collectives run on a given stream; the caller's goes on behind them."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream

    def run(self, name: str, inputs: Sequence[torch.Tensor], launch: Callable[[], T]) -> T:
        with torch.cuda.stream(self._stream):
            result = launch()
        torch.cuda.current_stream().wait_stream(self._stream)
        return result


@dataclass(frozen=True)
class _Inputs:
    """What layers take."""

    hidden: torch.Tensor
    rotary: tuple[torch.Tensor, torch.Tensor]
    metadata: AttentionMetadata

    def mixers(self, layers: Iterable[Any]) -> Work:
        """Each layer up to its first all-reduce, with the residual sum that is behind it."""

        def run() -> None:
            for layer in layers:
                self.hidden + layer.attention(layer.input_norm(self.hidden), self.rotary, self.metadata)

        return run

    def mlps(self, layers: Iterable[Any]) -> Work:
        """From there to the second, likewise."""

        def run() -> None:
            for layer in layers:
                self.hidden + layer.mlp(layer.post_attention_norm(self.hidden))

        return run


def _in_threads(compute: Work, communicate: Work) -> tuple[float, float]:
    def timed(work: Work) -> float:
        work()
        return time.perf_counter() - start_s

    with ThreadPoolExecutor(1) as thread:
        start_s = time.perf_counter()
        communication = thread.submit(timed, communicate)
        return timed(compute), communication.result()


def _times(count: int, work: Work) -> Work:
    def run() -> None:
        for _ in range(count):
            work()

    return run


def _nothing() -> None:
    """Beside what is timed alone."""
