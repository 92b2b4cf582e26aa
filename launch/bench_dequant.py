"""NVFP4 on one GPU: dequantization against a copy of as many bytes, its tiles, and decode-sized products.

Every arm is checked before any is timed, works on buffers that are rotated past the L2 cache, and is timed as a
replayed CUDA graph, in turn with the others. A copy "of as many bytes" reads and writes together what the arm does.
"""

from __future__ import annotations

import argparse
import ctypes
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from bench_common import Arm, Comparison, alternate, on_gpu, write_json

from tpoverlap.cuda.kernel import Kernel
from tpoverlap.cuda.nvrtc import compile_cuda
from tpoverlap.quant.nvfp4 import (
    NVFP4Tensor,
    QPN2Tensor,
    dequantize,
    small_batch,
    to_qpn2,
    torch_backend,
    triton_backend,
)
from tpoverlap.quant.nvfp4.tiles import Layout, Tile, tile_for

SHAPES = ((17408, 5120), (5120, 8704), (5120, 2560), (8192, 5120))
ROWS = (1, 2, 4, 8)
WEIGHT_BYTES = 0.5625
MIN_CALLS = 24
"""Calls of one graph: the start of a replay then weighs little in the time of a call."""
ROW_MAJOR_TILES = (
    Tile(16, 1),
    Tile(32, 1),
    Tile(64, 1),
    Tile(64, 2),
    Tile(64, 4),
    Tile(128, 2),
    Tile(128, 4),
    Tile(256, 4),
    Tile(256, 8),
    Tile(512, 4),
    Tile(512, 8),
    Tile(1024, 8),
)
QPN2_TILES = (
    Tile(8, 1),
    Tile(8, 2),
    Tile(16, 2),
    Tile(16, 4),
    Tile(32, 4),
    Tile(32, 8),
    Tile(64, 8),
)
NAMES = {torch.float16: "FP16", torch.bfloat16: "BF16", torch.float32: "FP32"}
Table = dict[str, object]


@dataclass
class Run:
    """What the parts of the benchmark share and fill."""

    repetitions: int
    l2_bytes: int
    tables: list[Table]
    figures: dict[str, float | int | str]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the record here")
    parser.add_argument("--repetitions", type=int, default=30, help="turns of each arm (default 30)")
    parser.add_argument(
        "--parts",
        nargs="+",
        choices=tuple(PARTS),
        default=list(PARTS),
        help="what to measure (default: everything)",
    )
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("this benchmark measures a CUDA GPU, and there is none")
    properties = torch.cuda.get_device_properties(0)
    run = Run(args.repetitions, properties.L2_cache_size, [], {})
    for part in args.parts:
        PARTS[part](run)
    for table in run.tables:
        print_table(table)
    if args.json:
        write_json(
            args.json,
            what="dequant",
            tables=run.tables,
            figures=run.figures,
            notes=[
                "Times are per call, by replayed CUDA graphs over buffers rotated past the L2 cache.",
                "Ratios to a copy are over a copy that reads and writes together as many bytes, turn by turn.",
            ],
        )


def measure_dequantization(run: Run) -> None:
    """Both layouts and 16-bit dtypes with the device's tile, against the copy and the torch path."""
    rows: list[list[object]] = []
    run.figures["copy_GBps_1GB"] = round(large_copy_gbps(run), 1)
    for shape in SHAPES:
        weights = rotated_weights(shape, run, copies_of=2 + WEIGHT_BYTES)
        packed = [to_qpn2(weight) for weight in weights]
        outs = [torch.empty(shape, dtype=torch.int16, device="cuda") for _ in weights]
        moved = round((2 + WEIGHT_BYTES) * weights[0].codes.numel() * 2)
        arms = [copy_arm(moved, len(weights))]
        for dtype in (torch.float16, torch.bfloat16):
            targets = [out.view(dtype) for out in outs]
            for layout, sources in (("row_major", weights), ("qpn2", packed)):
                arms.append(dequantize_arm(f"{layout} {NAMES[dtype]}", sources, weights, targets, None))
            if dtype == torch.float16:
                arms.append(torch_arm(weights, targets))
        result = alternate(arms, run.repetitions, label=f"dequantize {shape[0]} x {shape[1]}")
        for arm in arms[1:]:
            seconds, of_copy = result.time(arm.name), result.ratio("copy", arm.name)
            against_torch = result.ratio("torch FP16", arm.name)
            rows.append(
                [
                    f"{shape[0]} x {shape[1]}",
                    arm.name,
                    seconds.as_time(),
                    round(moved / seconds.median / 1e9),
                    of_copy.as_ratio(),
                    against_torch.as_ratio(),
                ]
            )
            key = f"dequant_{shape[0]}x{shape[1]}_{arm.name.replace(' ', '_')}"
            run.figures[f"{key}_us"] = round(seconds.median * 1e6, 2)
            run.figures[f"{key}_of_copy"] = round(of_copy.median, 3)
            run.figures[f"{key}_torch_over_ours"] = round(against_torch.median, 2)
        seconds = result.time("copy")
        rows.append(
            [f"{shape[0]} x {shape[1]}", "copy", seconds.as_time(), round(moved / seconds.median / 1e9), "1", ""]
        )
    run.tables.append(
        {
            "title": "Dequantization",
            "columns": ["weight", "arm", "time", "GB/s", "of the copy's speed", "speed over the torch path"],
            "rows": rows,
        }
    )


def measure_tiles(run: Run) -> None:
    """Time of every tile, for the largest and the smallest weight, FP16."""
    capability = torch.cuda.get_device_capability()
    layouts: tuple[tuple[Layout, tuple[Tile, ...]], ...] = (("row_major", ROW_MAJOR_TILES), ("qpn2", QPN2_TILES))
    for layout, tiles in layouts:
        chosen = tile_for(layout, capability)
        results: list[Comparison] = []
        shapes = (SHAPES[0], SHAPES[2])
        for shape in shapes:
            weights = rotated_weights(shape, run, copies_of=2 + WEIGHT_BYTES)
            sources = weights if layout == "row_major" else [to_qpn2(weight) for weight in weights]
            targets = [torch.empty(shape, dtype=torch.float16, device="cuda") for _ in weights]
            moved = round((2 + WEIGHT_BYTES) * weights[0].codes.numel() * 2)
            arms = [copy_arm(moved, len(weights))]
            arms += [dequantize_arm(str(tile), sources, weights, targets, tile) for tile in tiles]
            results.append(alternate(arms, run.repetitions, label=f"tiles {layout} {shape[0]} x {shape[1]}"))
        rows = [
            [
                tile.groups,
                tile.num_warps,
                "table's entry" if tile == chosen else "",
                *(
                    cell
                    for r in results
                    for cell in (r.time(str(tile)).as_time(), r.ratio("copy", str(tile)).as_ratio())
                ),
            ]
            for tile in tiles
        ]
        columns = ["groups", "warps", ""]
        for n, k in shapes:
            columns += [f"{n} x {k}", f"of the copy's speed, {n} x {k}"]
        run.tables.append({"title": f"Tiles, {layout}, FP16", "columns": columns, "rows": rows})


def measure_small_batch(run: Run) -> None:
    """1 to 8 rows: the fused kernel, dequantize and GEMM, a dense GEMM, and a copy of the weight's bytes."""
    rows: list[list[object]] = []
    for shape in SHAPES:
        for dtype in (torch.bfloat16, torch.float16):
            weights = rotated_weights(shape, run, copies_of=WEIGHT_BYTES)
            # The dense weights alone exceed the cache with fewer copies, and a GPU's memory with as many.
            dense = [dequantize(weight, dtype) for weight in weights[: max(2, rotations(2 * shape[0] * shape[1], run))]]
            scratch = torch.empty(shape, dtype=dtype, device="cuda")
            moved = round(WEIGHT_BYTES * shape[0] * shape[1])
            for m in ROWS if dtype == torch.bfloat16 else ROWS[:1]:
                x = torch.randn(m, shape[1], device="cuda", dtype=dtype)
                fused = [partial(small_batch.linear, x, weight) for weight in weights]
                both = [partial(dequantize_and_multiply, x, weight, scratch) for weight in weights]
                multiply = [partial(F.linear, x, matrix) for matrix in dense]
                arms = [
                    copy_arm(moved, len(weights)),
                    graph_arm("fused", fused, partial(check_product, fused[0], x, weights[0])),
                    graph_arm("dequantize + GEMM", both, partial(check_product, both[0], x, weights[0])),
                    graph_arm("dense GEMM", multiply, partial(check_product, multiply[0], x, weights[0])),
                    empty_arm(weights[0], dtype),
                ]
                label = f"{shape[0]} x {shape[1]}, {m} {NAMES[dtype]} rows"
                result = alternate(arms, run.repetitions, label=label)
                seconds, of_copy = result.time("fused"), result.ratio("copy", "fused")
                over = {name: result.ratio(name, "fused") for name in ("dequantize + GEMM", "dense GEMM")}
                rows.append(
                    [
                        f"{shape[0]} x {shape[1]}",
                        NAMES[dtype],
                        m,
                        seconds.as_time(),
                        result.time("empty kernel").as_time(),
                        of_copy.as_ratio(),
                        over["dequantize + GEMM"].as_ratio(),
                        over["dense GEMM"].as_ratio(),
                    ]
                )
                key = f"small_batch_{shape[0]}x{shape[1]}_{NAMES[dtype]}_{m}"
                run.figures[f"{key}_us"] = round(seconds.median * 1e6, 2)
                run.figures[f"{key}_of_copy"] = round(of_copy.median, 3)
                run.figures[f"{key}_speedup_over_dense_gemm"] = round(over["dense GEMM"].median, 2)
            del dense
    run.tables.append(
        {
            "title": "Decode-sized products",
            "columns": [
                "weight",
                "dtype",
                "rows",
                "fused",
                "empty kernel",
                "of the copy's speed",
                "speed over dequantize + GEMM",
                "speed over dense GEMM",
            ],
            "rows": rows,
        }
    )
    weight, x = weights[0], torch.randn(1, shape[1], device="cuda", dtype=torch.float16)
    run.figures["host_us_dequantize"] = host_us(partial(dequantize, weight, torch.float16, out=scratch))
    run.figures["host_us_small_batch"] = host_us(partial(small_batch.linear, x, weight))


PARTS: dict[str, Callable[[Run], None]] = {
    "dequantization": measure_dequantization,
    "tiles": measure_tiles,
    "small-batch": measure_small_batch,
}


def rotations(bytes_per_call: float, run: Run) -> int:
    """Copies of a buffer that make a pass over them several times the L2 cache."""
    return max(2, -(-4 * run.l2_bytes // max(1, round(bytes_per_call))))


def rotated_weights(shape: tuple[int, int], run: Run, *, copies_of: float) -> list[NVFP4Tensor]:
    """Random weights, as many as a pass over ``copies_of`` bytes a weight needs to exceed the cache."""
    n, k = shape
    weights = []
    for _ in range(rotations(copies_of * n * k, run)):
        codes = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, device="cuda")
        scales = torch.randint(0x28, 0x70, (n, k // 16), dtype=torch.uint8, device="cuda").view(torch.float8_e4m3fn)
        weights.append(NVFP4Tensor(codes, scales, torch.tensor(1e-3, device="cuda"), shape))
    return weights


def graph_arm(name: str, calls: Sequence[Callable[[], object]], check: Callable[[], object]) -> Arm:
    """An arm whose turn replays a graph of all ``calls``, round after round, and returns the seconds of one."""
    for call in calls[:2]:
        call()
    torch.cuda.synchronize()
    rounds = -(-MIN_CALLS // len(calls))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(rounds):
            for call in calls:
                call()
    turn = on_gpu(graph.replay)
    return Arm(name, check, lambda: turn() / (rounds * len(calls)))


def copy_arm(moved_bytes: int, count: int) -> Arm:
    """Copies that read and write ``moved_bytes`` together, over ``count`` pairs of buffers."""
    pairs = [torch.randint(0, 256, (2, moved_bytes // 2), dtype=torch.uint8, device="cuda") for _ in range(count)]

    def check() -> None:
        pairs[0][1].zero_()
        pairs[0][1].copy_(pairs[0][0])
        assert torch.equal(pairs[0][0], pairs[0][1]), "the copy is wrong"

    return graph_arm("copy", [partial(pair[1].copy_, pair[0]) for pair in pairs], check)


def dequantize_arm(
    name: str,
    sources: Sequence[NVFP4Tensor | QPN2Tensor],
    row_major: Sequence[NVFP4Tensor],
    targets: Sequence[torch.Tensor],
    tile: Tile | None,
) -> Arm:
    def check() -> None:
        for source, weight, target in zip(sources, row_major, targets, strict=True):
            target.fill_(torch.nan)
            triton_backend.dequantize_into(source, target, tile)
            wanted = torch.empty_like(target)
            torch_backend.dequantize_into(weight, wanted)
            assert torch.equal(target.view(torch.int16), wanted.view(torch.int16)), (
                f"{name} differs from the torch path"
            )

    pairs = zip(sources, targets, strict=True)
    return graph_arm(name, [partial(triton_backend.dequantize_into, *pair, tile) for pair in pairs], check)


def torch_arm(weights: Sequence[NVFP4Tensor], targets: Sequence[torch.Tensor]) -> Arm:
    def check() -> None:
        torch_backend.dequantize_into(weights[0], targets[0])
        wanted = dequantize(weights[0].slice_rows(0, 64).to("cpu"), targets[0].dtype)
        assert torch.equal(targets[0][:64].cpu(), wanted), "the torch path differs between GPU and CPU"

    pairs = zip(weights, targets, strict=True)
    return graph_arm("torch FP16", [partial(torch_backend.dequantize_into, *pair) for pair in pairs], check)


def empty_arm(weight: NVFP4Tensor, dtype: torch.dtype) -> Arm:
    """A kernel that does nothing, with as many blocks and threads as the fused one takes for this weight."""
    major, minor = torch.cuda.get_device_capability()
    source = 'struct Nothing { int unused; };\nextern "C" __global__ void empty(const Nothing nothing) {}\n'
    image = compile_cuda(source, name="empty.cu", arch=f"sm_{major}{minor}")
    blocks, threads = small_batch.launch_size(weight, dtype)
    kernel = Kernel(image, "empty", torch.cuda.current_device(), block=threads)
    return graph_arm("empty kernel", [partial(kernel.launch, (blocks, 1, 1), _Nothing())], lambda: None)


class _Nothing(ctypes.Structure):
    _fields_ = (("unused", ctypes.c_int),)


def dequantize_and_multiply(x: torch.Tensor, weight: NVFP4Tensor, scratch: torch.Tensor) -> torch.Tensor:
    return F.linear(x, dequantize(weight, scratch.dtype, out=scratch))


def check_product(call: Callable[[], torch.Tensor], x: torch.Tensor, weight: NVFP4Tensor) -> None:
    """A call that multiplies x by the weight, against FP64: within the rounding of weight and output to x's dtype."""
    wanted = x.double() @ dequantize(weight, torch.float32).double().T
    error, scale = (call().double() - wanted).abs().max(), wanted.abs().max()
    assert error <= scale * torch.finfo(x.dtype).eps, f"the product is off by {error:.3g} of {scale:.3g}"


def large_copy_gbps(run: Run) -> float:
    size = 10**9  # no power of two: source and destination then differ in more than the highest bits of their addresses
    return size / alternate([copy_arm(size, 1)], run.repetitions, label="copy 1 GB").time("copy").median / 1e9


def host_us(function: Callable[[], object], calls: int = 200) -> float:
    """Host time of one call, with the GPU far behind or not."""
    for _ in range(20):
        function()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(calls):
        function()
    elapsed = time.perf_counter() - start
    torch.cuda.synchronize()
    return round(elapsed / calls * 1e6, 1)


def print_table(table: Table) -> None:
    columns, rows = table["columns"], table["rows"]
    cells = [[str(cell) for cell in row] for row in (columns, *rows)]  # type: ignore[misc]
    widths = [max(len(row[i]) for row in cells) for i in range(len(cells[0]))]
    print(f"\n{table['title']}")
    for row in cells:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


if __name__ == "__main__":
    main()
