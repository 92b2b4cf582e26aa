"""One rank's part of bench_prefill.py: a synthetic model, prompts, and their prefill in each of the arms."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from allreduce_contest import WrongResultError
from bench_teams import HOST, Team
from prefill_arms import BASELINE, PrefillArm
from progress_bar import Progress
from synthetic_decoder import SyntheticShape, synthetic_decoder

from tpoverlap.attention import PREFILL_BACKENDS, paged_prefill, slot_mapping
from tpoverlap.comm import GroupCoordinator
from tpoverlap.config import HostReduceConfig, OverlapConfig
from tpoverlap.errors import UnsupportedError
from tpoverlap.microbatch import Batch, MicroBatchExecutor, RunStats
from tpoverlap.model.layers import Attention

# Largest relative L2 distance of the logits behind a prompt to those of the serial run. FP16 kernels that add up in
# another order move them by some 1e-3.
TOLERANCE = 0.02
# How far the best logit must lead the next one, in standard deviations of all, for its token to be one that rounding
# does not decide: several times the difference that the tolerance allows in two logits.
CLEAR_LEAD = 6 * TOLERANCE
_TRIES = 50
BLOCK_SIZE = 32


class SwitchedGroup:
    """The group that a model's collectives go to, which changes between arms. in_place: sums replace their input, which
    every layer has made for itself, as suits NCCL. is_silent: there are none, for parts of layers that are timed alone.
    """

    def __init__(self, group: GroupCoordinator) -> None:
        self.current = group
        self.in_place = True
        self.is_silent = False

    @property
    def rank_in_group(self) -> int:
        return self.current.rank_in_group

    @property
    def world_size(self) -> int:
        return self.current.world_size

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return x if self.is_silent else self.current.all_reduce(x, out=x if self.in_place else None)

    def all_gather(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        return self.current.all_gather(x, dim)


@dataclass(frozen=True)
class Prompt:
    """A prompt's chunks, ready on the device, and its length in tokens."""

    length: int
    chunks: list[Batch]


@dataclass(frozen=True)
class Answer:
    """What a prefill gave: the first token, and the relative distance of its logits to the serial run's."""

    token: int
    distance: float


class PrefillTrials:
    """A model of this rank with one cache, which all arms of its team fill in turn with the same prompt."""

    def __init__(self, team: Team, shape: SyntheticShape, chunk_tokens: int, state_block: int, max_length: int) -> None:
        self.team = team
        self.chunk_tokens = chunk_tokens
        self.state_block = state_block
        self.shape = shape
        configs = [HostReduceConfig(max_bytes=0, copy_engine_max_bytes=0)]
        configs += [HostReduceConfig()] if team.name == HOST else []
        self.groups = [GroupCoordinator(team.ranks, team.rank, team.device, config) for config in configs]
        self._switch = SwitchedGroup(self.groups[BASELINE])
        self._executors: dict[tuple[int, int], MicroBatchExecutor] = {}
        dtype = torch.float16 if team.device.type == "cuda" else torch.float32
        with Progress("make layers", shape.num_layers) as progress:
            self.model, self.workspace = synthetic_decoder(
                shape,
                self._switch,
                dtype=dtype,
                device=team.device,
                state_block=state_block,
                progress=progress.advance,
            )
        # One state's slot more than the longest prompt needs: decode steps come behind it.
        slots, runs = max_length // state_block + 2, state_block // BLOCK_SIZE
        self.model.allocate_kv_cache(slots * runs, BLOCK_SIZE)
        order = torch.randperm(slots, generator=torch.Generator().manual_seed(3))
        self.block_table = (order[:, None] * runs + torch.arange(runs)).view(1, -1).to(team.device, torch.int32)
        self.attentions = [module for module in self.model.modules() if isinstance(module, Attention)]
        self._prompts: dict[int, Prompt] = {}
        self._expected: dict[int, torch.Tensor] = {}

    def prompt(self, length: int) -> Prompt:
        """The prompt of this length that arms are compared on."""
        if length not in self._prompts:
            self._prompts[length] = self.make_prompt(length)
        return self._prompts[length]

    def make_prompt(self, length: int) -> Prompt:
        """Random tokens, the same ones for the same length on all ranks."""
        device = self.team.device
        ids = torch.randint(self.shape.vocab, (length,), generator=torch.Generator().manual_seed(length)).to(device)
        return Prompt(
            length,
            [
                self.batch(ids[start : start + self.chunk_tokens], start)
                for start in range(0, length, self.chunk_tokens)
            ],
        )

    def batch(self, ids: torch.Tensor, start: int) -> Batch:
        """One request's next tokens, from position ``start`` on."""
        end = start + ids.shape[0]
        return Batch(
            input_ids=ids,
            positions=torch.arange(start, end, device=ids.device),
            query_start_loc=[0, ids.shape[0]],
            seq_lens=[end],
            block_table=self.block_table,
            slot_mapping=slot_mapping(self.block_table, [0, ids.shape[0]], [end], BLOCK_SIZE),
        )

    def configure_transport(self, arm: PrefillArm, transport: int) -> None:
        """Gives the model the arm's kernels, and any transport."""
        self._switch.current, self._switch.is_silent = self.groups[transport], False
        self._switch.in_place = transport == BASELINE
        for attention in self.attentions:
            attention.prefill_backend, attention.prefill_num_splits = arm.backend, arm.num_splits
        self.workspace.tile = arm.tile

    def configure_alone(self, arm: PrefillArm) -> None:
        """Gives the model the arm's kernels, and no all-reduces."""
        self.configure_transport(arm, BASELINE)
        self._switch.is_silent = True

    def configure(self, arm: PrefillArm) -> MicroBatchExecutor:
        """Makes the model run as the arm says; what runs its batches."""
        self.configure_transport(arm, arm.transport)
        key = (arm.transport, arm.pieces)
        if key not in self._executors:
            small = self.chunk_tokens < 512
            overlap = OverlapConfig(
                min_tokens=0 if arm.pieces == 1 else self.chunk_tokens // 4,
                num_pieces=max(arm.pieces, 2),  # type: ignore[arg-type]
                cut_multiple=16 if small else 128,
            )
            self._executors[key] = MicroBatchExecutor(
                self.groups[arm.transport],
                overlap,
                state_block=self.state_block if self.shape.has_states else None,
                balance_position=self.shape.balance_position,
            )
        return self._executors[key]

    def prefill(self, arm: PrefillArm, prompt: Prompt) -> torch.Tensor:
        """Logits [1, vocabulary] behind the prompt."""
        executor = self.configure(arm)
        for chunk in prompt.chunks:
            hidden = executor.run(self.model, chunk)
        assert isinstance(hidden, torch.Tensor)  # the decoder returns one
        return self.model.logits(hidden[-1:])

    def timed_prefill(self, arm: PrefillArm, prompt: Prompt) -> tuple[float, int, Answer]:
        """Seconds of the arm's slowest rank, the most bytes that torch had allocated on a device meanwhile (0 on CPU),
        and the result, which has been checked. The first arm of a prompt also decides the prompt's last token."""
        on_device = self.team.device.type == "cuda" and arm.team == self.team.name
        if on_device:
            torch.cuda.reset_peak_memory_stats()
        logits: list[torch.Tensor] = []
        seconds = self.team.turn(arm.team, lambda: logits.append(self.prefill(arm, prompt)))()
        peak = self.team.largest(torch.cuda.max_memory_allocated() if on_device else 0)
        if prompt.length not in self._expected:
            self._make_clear(arm, prompt, logits)
        return seconds, round(peak), self.verify(arm.name, prompt.length, logits[-1] if logits else None)

    def timed_chunk(self, arm: PrefillArm, chunk: Batch) -> tuple[float, RunStats | None]:
        """Seconds of one chunk on a cache that holds all before it, and this rank's account of it if it ran it."""
        executor = self.configure(arm) if arm.team == self.team.name else None
        seconds = self.team.turn(arm.team, lambda: executor.run(self.model, chunk) if executor else None)()
        return seconds, executor.stats if executor else None

    def _make_clear(self, arm: PrefillArm, prompt: Prompt, logits: list[torch.Tensor]) -> None:
        """Changes the last token until the arm's first token leads clearly; adds each try's logits to ``logits``.

        arm: one of rank 0's team.
        """
        last = prompt.chunks[-1]
        assert last.input_ids is not None  # as make_prompt has made it
        for attempt in range(_TRIES):
            if self.team.world.share(bool(logits) and lead(logits[-1]) >= CLEAR_LEAD):
                return
            last.input_ids[-1] = (7919 * attempt + 1) % self.shape.vocab
            if arm.team == self.team.name:
                logits.append(self.prefill(arm, Prompt(prompt.length, [last])))
        raise WrongResultError(f"{_TRIES} last tokens of a prompt of {prompt.length} give no clear first token")

    def verify(self, name: str, key: int, logits: torch.Tensor | None) -> Answer:
        """Compares logits [1, vocabulary] of one arm's ranks (None elsewhere) with the first ones seen for ``key``.

        WrongResultError on every rank unless they lie within TOLERANCE on all ranks of the arm, and give the same first
        token, should that be clear.
        """
        mine = None if logits is None else logits[0].float().cpu()
        if key not in self._expected:
            shared: list[Any] = [mine if self.team.world.rank == 0 else None]
            dist.broadcast_object_list(shared, src=0)
            self._expected[key] = shared[0]
        expected = self._expected[key]
        answer = None
        if mine is not None:
            distance = float((mine - expected).norm() / expected.norm())
            answer = Answer(int(mine.argmax()), distance)
        answers: list[Any] = [None] * self.team.world.size
        dist.all_gather_object(answers, answer)
        given: list[Answer] = [one for one in answers if one is not None]
        is_clear = lead(expected[None]) >= CLEAR_LEAD
        # "not <=": a distance of NaN must not pass.
        if any((is_clear and one.token != int(expected.argmax())) or not one.distance <= TOLERANCE for one in given):
            raise WrongResultError(
                f"{name}: first tokens {[one.token for one in given]} with logits at relative distances "
                f"{[one.distance for one in given]}; the serial run gives token {int(expected.argmax())}, and "
                f"{TOLERANCE:g} is the limit"
            )
        return max(given, key=lambda one: one.distance)

    def check_transport(self, arm: PrefillArm) -> None:
        """WrongResultError where a chunk's all-reduces would not take the way that the arm is named for."""
        if arm.team != self.team.name:
            return
        like = torch.empty(self.chunk_tokens // max(arm.pieces, 1), self.shape.hidden, dtype=self.model.dtype)
        reasons = self.groups[arm.transport].rejection_reasons(like.to(self.team.device))
        wanted = "torch" if arm.transport == BASELINE else "copy_engine" if like.dtype == torch.float16 else "cpu"
        chosen = next(name for name, reason in reasons.items() if reason is None)
        if chosen != wanted:
            raise WrongResultError(f"{arm.name}: all-reduces would go through {chosen}, not {wanted}: {reasons}")

    def attention_times(self, length: int) -> dict[str, float]:
        """Seconds of one chunk's attention behind ``length`` tokens on each backend that serves it."""
        k_cache, v_cache = self.attentions[0].kv_cache or (None, None)
        assert k_cache is not None
        assert v_cache is not None
        k_cache.normal_()
        v_cache.normal_()
        tokens, device = self.chunk_tokens, self.team.device
        heads = self.shape.query_heads // self.team.size
        q = torch.randn(tokens, heads, self.shape.head_dim, dtype=self.model.dtype, device=device)
        lengths = torch.tensor([max(length, tokens)], dtype=torch.int32, device=device)
        starts = torch.tensor([0, tokens], dtype=torch.int32, device=device)
        found = {}
        for name in PREFILL_BACKENDS:
            if name in ("triton_rows", "reference"):
                continue  # for other purposes than speed

            def run(name: str = name) -> None:
                paged_prefill(
                    q, k_cache, v_cache, self.block_table, starts, lengths, backend=name, max_query_len=tokens
                )

            try:
                run()
            except UnsupportedError:
                continue
            timed = self.team.timed(run, 2)
            found[name] = statistics.median(timed() for _ in range(3))
        return found

    def close(self) -> None:
        for executor in self._executors.values():
            executor.close()
        for group in self.groups:
            group.destroy()


def lead(logits: torch.Tensor) -> float:
    """How far the best of the logits [1, vocabulary] leads the next one, in standard deviations of them all."""
    best, second = logits[0].float().topk(2).values
    return float((best - second) / logits[0].float().std())


def sample(chunks: Sequence[Batch], count: int) -> list[Batch]:
    """``count`` chunks evenly over the prompt, full ones only where there are any; again from the start if too few."""
    full = [chunk for chunk in chunks if chunk.num_tokens == chunks[0].num_tokens]
    if count <= len(full):
        return [full[(2 * i + 1) * len(full) // (2 * count)] for i in range(count)]
    return [full[i % len(full)] for i in range(count)]
