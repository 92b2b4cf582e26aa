"""The executor on CUDA ranks: a thousand random batches, two hundred faults, peak memory, host time of hand-overs."""

from __future__ import annotations

import statistics
import time

import pytest
import torch
from faults import random_faults
from gpu_group import make_group
from layer_models import ExactMath, TritonMath
from rank_harness import run_ranks
from test_executor_gpu import cuda_batch
from test_layers import compare_random_batches

from tpoverlap.comm import GroupCoordinator
from tpoverlap.config import OverlapConfig
from tpoverlap.microbatch import Batch, MicroBatchExecutor

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]
MIB = 1 << 20


def _random_batches(rank: int, batches: int) -> tuple[int, dict[str, int]]:
    # Almost all payloads go through the copy engines: kernels of ranks that share a GPU wait for each other's time.
    group = make_group(max_bytes=8192)
    exact = compare_random_batches(group, ExactMath("cuda"), 1, batches // 20)
    split = compare_random_batches(group, TritonMath(), 100, batches)
    served = group.served
    group.destroy()
    return exact + split, served


def test_a_thousand_random_batches_give_the_bits_of_the_whole_ones() -> None:
    for split, served in run_ranks(_random_batches, 2, 1000, timeout_s=280):
        assert split > 700
        assert set(served) == {"kernel", "copy_engine"}


def _faults(rank: int, cases: int) -> dict[str, int]:
    group = make_group()
    # Rows of one piece go through the copy engines, a single one through kernel mode.
    seen = random_faults(group, cuda_batch(1000, 1), cases)
    group.destroy()
    return seen


def test_two_hundred_faults_end_a_run_everywhere_and_the_next_is_right() -> None:
    assert min(run_ranks(_faults, 2, 200, timeout_s=280)[0].values()) > 20


class Gated:
    """SwiGLU layers, each followed by an all-reduce. Weights are shared, so that activations are what counts."""

    hidden, intermediate = 1024, 4096

    def __init__(self, group: GroupCoordinator, layers: int) -> None:
        generator = torch.Generator("cuda").manual_seed(group.rank_in_group)
        self.group = group
        self.layers = layers
        self.gate, self.up, self.down = (
            torch.randn(shape, generator=generator, device="cuda").mul_(shape[0] ** -0.5).half()
            for shape in [(self.hidden, self.intermediate)] * 2 + [(self.intermediate, self.hidden)]
        )

    def __call__(self, batch: Batch) -> torch.Tensor:
        x = batch.inputs_embeds
        assert x is not None
        for _ in range(self.layers):
            h = torch.nn.functional.silu(x @ self.gate) * (x @ self.up)
            y = h @ self.down
            del h  # what a piece holds at a collective, it holds while the others compute
            x = x + self.group.all_reduce(y)
            del y
        return x

    def layer_bytes(self, tokens: int) -> int:
        """At most the gate's activation, up and their product are there at once; then the layer's output comes."""
        return 2 * tokens * (3 * self.intermediate + self.hidden)


def _peak(executor: MicroBatchExecutor, model: Gated, batch: Batch) -> int:
    """Bytes that a run takes beyond what is there before it; the second run, when libraries have their workspaces."""
    for _ in range(2):
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        executor.run(model, batch)
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated() - before
    return peak


def _memory(rank: int, num_pieces: int) -> tuple[int, int]:
    group = make_group()
    model = Gated(group, layers=6)
    batch = cuda_batch(8192, 0, torch.float16)
    overlapped = MicroBatchExecutor(group, OverlapConfig(min_tokens=1, num_pieces=num_pieces))
    with torch.inference_mode():
        whole = _peak(MicroBatchExecutor(group), model, batch)
        pieces = _peak(overlapped, model, batch)
    tokens = max(overlapped.stats.piece_tokens)
    payload = 2 * tokens * model.hidden
    # What each piece holds while another one computes: what it has sent and its sum; what comes from the peers is
    # staged for one collective at a time.
    buffers = num_pieces * 2 * payload + group.world_size * payload
    assert pieces <= whole + model.layer_bytes(tokens) + buffers, (whole / MIB, pieces / MIB)
    # More closely: one piece is inside a layer, the others hold their residual stream, and at the end there are the
    # pieces' outputs beside the joined one. The allocator rounds up by less than 1 MiB a tensor.
    resting = num_pieces * payload + buffers
    joined = 2 * 2 * batch.num_tokens * model.hidden
    assert pieces <= max(model.layer_bytes(tokens) + resting, joined + buffers) + 16 * MIB, pieces / MIB
    # Where a layer's activations are larger than the buffers, as in this model, pieces even take less than the whole.
    assert pieces <= whole, (whole / MIB, pieces / MIB)
    group.destroy()
    return whole // MIB, pieces // MIB


@pytest.mark.parametrize("num_pieces", [2, 4])
def test_peak_memory_grows_by_no_more_than_a_pieces_layer_and_the_buffers(num_pieces: int) -> None:
    for rank, (whole, pieces) in enumerate(run_ranks(_memory, 2, num_pieces, timeout_s=100)):
        print(f"rank {rank}: peak of activations {whole} MiB whole, {pieces} MiB in {num_pieces} pieces")


class Narrow:
    """64 layers of two all-reduces and next to no compute."""

    def __init__(self, group: GroupCoordinator) -> None:
        self.group = group

    def __call__(self, batch: Batch) -> torch.Tensor:
        x = batch.inputs_embeds
        assert x is not None
        for _ in range(128):
            x = self.group.all_reduce(x)
        return x * 0


def _hand_overs(rank: int, turns: int) -> dict[str, float]:
    group = make_group()
    batch = cuda_batch(512, 0)
    executors = {
        "whole": MicroBatchExecutor(group),
        "pieces": MicroBatchExecutor(group, OverlapConfig(min_tokens=1, num_pieces=2, cut_multiple=1)),
    }
    host_s: dict[str, list[float]] = {name: [] for name in executors}
    handover_s: list[float] = []
    with torch.inference_mode():
        for turn in range(turns + 2):
            for name, executor in executors.items():
                torch.cuda.synchronize()
                started = time.perf_counter()
                executor.run(Narrow(group), batch)
                seconds = time.perf_counter() - started
                if turn >= 2:
                    host_s[name].append(seconds)
                    if name == "pieces":
                        handovers = [i.end_s - i.start_s for i in executor.stats.intervals if i.kind == "handover"]
                        assert len(handovers) == 2 * 128 + 2 - 1
                        handover_s.append(sum(handovers))
    group.destroy()
    return {
        "handover_ms": 1e3 * statistics.median(handover_s),
        "whole_host_ms": 1e3 * statistics.median(host_s["whole"]),
        "pieces_host_ms": 1e3 * statistics.median(host_s["pieces"]),
    }


def test_hand_overs_of_64_layers_take_less_than_4_ms_of_host_time() -> None:
    for rank, figures in enumerate(run_ranks(_hand_overs, 2, 15, timeout_s=100)):
        print(f"rank {rank}:", ", ".join(f"{name} {value:.2f}" for name, value in figures.items()))
        assert figures["handover_ms"] < 4
