"""The Turing prefill on one GPU: against FlashAttention-2, against itself without splits, and the instruction's peak.

Newer GPUs run it as the PTX of compute capability 7.5, so the peak that it can reach is that of mma.m16n8k8, measured
in the same launch by a kernel of nothing else. FlashAttention-2 is torch's, on keys and values gathered beforehand.
"""

from __future__ import annotations

import argparse
import ctypes
import math
import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from attention_peers import sdpa_flash
from attention_problems import Problem, Shape
from bench_common import Arm, alternate, on_gpu, write_json

from tpoverlap.attention import paged_prefill, turing
from tpoverlap.attention.turing.launch import BLOCK_ROWS, TILE_KEYS
from tpoverlap.cuda.device import device_facts
from tpoverlap.cuda.kernel import Kernel
from tpoverlap.cuda.nvrtc import compile_cuda

# Query tokens, and keys before them.
ROWS = (
    (2048, 32_000),
    (2048, 150_000),
    (1600, 30_000),
    (1600, 100_000),
    (1600, 184_000),
    (801, 100_000),
    (801, 184_000),
    (512, 150_000),
    (96, 150_000),
)
Q_HEADS, KV_HEADS, HEAD_DIM = 12, 2, 256
COLUMNS = [
    "query tokens",
    "after",
    "splits",
    "turing",
    "without splits",
    "FlashAttention-2",
    "turing / FlashAttention-2",
    "turing / without splits",
    "TFLOPS",
    "of the instruction's peak",
]


class PeakArguments(ctypes.Structure):
    _fields_ = [("out", ctypes.c_void_p), ("rounds", ctypes.c_int)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the record here")
    parser.add_argument("--repetitions", type=int, default=20, help="turns of each arm (default 20)")
    parser.add_argument("--rows", type=int, nargs="+", default=range(len(ROWS)), help=f"0 to {len(ROWS) - 1}")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("this benchmark measures a CUDA GPU, and there is none")
    peak = mma_peak()
    print(f"mma.m16n8k8: {peak / 1e12:.0f} TFLOPS")
    rows = []
    figures: dict[str, float | int | str] = {"mma_m16n8k8_TFLOPS": round(peak / 1e12, 1)}
    for n, before in (ROWS[i] for i in args.rows):
        row, ratio = measure(n, before, args.repetitions, peak)
        rows.append(row)
        print("  ".join(f"{name}: {cell}" for name, cell in zip(COLUMNS, row, strict=True)), flush=True)
        if ratio is not None:
            figures[f"turing_{n}_after_{before}_of_flash"] = round(ratio, 3)
    if args.json:
        write_json(
            args.json,
            what="turing-prefill",
            tables=[
                {
                    "title": f"{Q_HEADS} query heads, {KV_HEADS} KV heads of 256, causal",
                    "columns": COLUMNS,
                    "rows": rows,
                }
            ],
            figures=figures,
            notes=["Times are per call, by events; every arm agreed with the FP32 reference before it was timed."],
        )


def measure(n: int, before: int, repetitions: int, peak: float) -> tuple[list[object], float | None]:
    """The table's row, and the time over FlashAttention-2's where there is one."""
    shape = Shape(1, n, before + n, Q_HEADS, KV_HEADS, HEAD_DIM)
    problem = Problem.random(shape, torch.cuda.get_device_properties(0).L2_cache_size)
    ours = partial(paged_prefill, *problem.prefill(), backend="turing", max_query_len=n)
    arms = [arm("turing", problem, ours), arm("without splits", problem, partial(ours, num_splits=1))]
    has_flash = torch.cuda.get_device_capability() >= (8, 0)
    if has_flash:
        arms.append(arm("flash", problem, sdpa_flash(problem)))
    result = alternate(arms, repetitions, label=shape.name)
    time = result.time("turing")
    of_flash = result.ratio("turing", "flash") if has_flash else None
    row: list[object] = [
        n,
        before,
        splits_of(shape),
        time.as_time(),
        result.time("without splits").as_time(),
        result.time("flash").as_time() if has_flash else None,
        of_flash.as_ratio() if of_flash else None,
        result.ratio("turing", "without splits").as_ratio(),
        round(shape.flops / time.median / 1e12, 1),
        round(shape.flops / time.median / peak, 3),
    ]
    return row, of_flash.median if of_flash else None


def arm(name: str, problem: Problem, call: Callable[[], torch.Tensor]) -> Arm:
    return Arm(name, lambda: problem.check(call()), on_gpu(call))


def splits_of(shape: Shape) -> int:
    """What the launcher chooses: a block of threads fills a multiprocessor."""
    ctas = math.ceil(shape.n * shape.q_heads / shape.kv_heads / BLOCK_ROWS) * shape.kv_heads
    return turing.choose_num_splits(ctas, device_facts(0).num_sms, shape.keys // TILE_KEYS)


def mma_peak() -> float:
    """FLOP a second of mma.m16n8k8, with every multiprocessor busy for some milliseconds."""
    facts = device_facts(0)
    arch = "sm_75" if facts.capability == (7, 5) else "compute_75"
    image = compile_cuda(Path(__file__).with_name("mma_peak.cu").read_text(), name="mma_peak.cu", arch=arch)
    kernel = Kernel(image, "mma_peak", 0, block=256)
    blocks, rounds = 4 * facts.num_sms, 2000
    out = torch.empty(blocks * 256, device="cuda")
    arguments = PeakArguments(out.data_ptr(), rounds)
    turn = on_gpu(lambda: kernel.launch((blocks, 1, 1), arguments))
    for _ in range(3):
        turn()
    if not out.isfinite().all():
        raise RuntimeError("the peak kernel's sums are not finite")
    return blocks * 8 * rounds * 64 * (2 * 16 * 8 * 8) / statistics.median(turn() for _ in range(20))


if __name__ == "__main__":
    main()
