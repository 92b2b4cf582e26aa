"""Times candidate tiles of the Triton attention kernels; the winners go to tpoverlap/attention/triton/configs.py.

Candidates are compiled by several processes at once, checked against the torch reference, and timed in turn.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

import torch
from attention_problems import Problem, Shape, graph_of
from bench_attention import TURN_S, Table, on_many, print_table
from bench_common import Arm, alternate, write_json

from tpoverlap.attention.triton.configs import DecodeTiles, PrefillTiles
from tpoverlap.attention.triton.decode import decode_rows
from tpoverlap.attention.triton.prefill import launch_prefill

PREFILL = {
    64: [
        PrefillTiles(128, 64, 4, 3),
        PrefillTiles(128, 64, 8, 3),
        PrefillTiles(128, 128, 8, 3),
        PrefillTiles(128, 64, 4, 3, specialized_stages=4),
        PrefillTiles(128, 128, 8, 3, specialized_stages=3),
    ],
    128: [
        PrefillTiles(64, 64, 4, 3),
        PrefillTiles(128, 64, 8, 3),
        PrefillTiles(128, 128, 8, 2),
        PrefillTiles(128, 64, 8, 3, specialized_stages=3),
        PrefillTiles(128, 128, 8, 2, specialized_stages=2),
        PrefillTiles(128, 128, 8, 2, part_keys=8192, specialized_stages=2),
        PrefillTiles(128, 128, 8, 2, part_keys=1 << 20, specialized_stages=2),
    ],
    256: [
        PrefillTiles(64, 32, 4, 2),
        PrefillTiles(128, 32, 8, 3),
        PrefillTiles(128, 64, 8, 2),
        PrefillTiles(128, 32, 8, 3, specialized_stages=4),
        PrefillTiles(128, 64, 8, 2, specialized_stages=2),
        PrefillTiles(128, 64, 8, 2, part_keys=8192, specialized_stages=2),
        PrefillTiles(128, 64, 8, 2, part_keys=1 << 20, specialized_stages=2),
    ],
}
PREFILL_SHAPES = ((2048, 2048), (8192, 8192), (32768, 32768), (2048, 34816), (2048, 155648))
DECODE = {
    64: [
        DecodeTiles(16, 64, 1, 3),
        DecodeTiles(16, 64, 1, 3, ring_stages=6, few_ring_stages=6),
        DecodeTiles(32, 64, 1, 3),
        DecodeTiles(32, 64, 2, 3),
        DecodeTiles(64, 64, 4, 2),
        DecodeTiles(64, 64, 4, 3),
    ],
    128: [
        DecodeTiles(16, 64, 1, 3),
        DecodeTiles(16, 64, 2, 3),
        DecodeTiles(32, 64, 4, 3),
        DecodeTiles(64, 64, 4, 3),
        *(DecodeTiles(16, 64, 1, 3, ring_stages=n, few_ring_stages=n) for n in (2, 3, 4, 6, 12)),
        *(DecodeTiles(32, 64, 1, 3, ring_stages=n, few_ring_stages=n) for n in (2, 3, 4)),
        *(DecodeTiles(64, 64, 1, 3, ring_stages=n, few_ring_stages=n) for n in (2, 3)),
    ],
    256: [
        DecodeTiles(16, 64, 1, 3),
        DecodeTiles(16, 64, 1, 4),
        DecodeTiles(16, 64, 2, 3),
        DecodeTiles(32, 64, 4, 4),
        *(DecodeTiles(16, 64, 1, 3, ring_stages=n, few_ring_stages=n) for n in (2, 3, 4, 6)),
        DecodeTiles(32, 64, 1, 3, ring_stages=2, few_ring_stages=2),
    ],
}
# Requests, keys, query and KV heads, splits.
DECODE_SHAPES = (
    (16, 8192, 12, 2, 16),
    (64, 2048, 16, 2, 16),
    (64, 2048, 64, 8, 16),
    (4, 32768, 12, 2, 64),
    (4, 32768, 64, 8, 16),
    (1, 131072, 12, 2, 128),
    (1, 131072, 64, 8, 128),
    (1, 8192, 16, 16, 16),
    (1, 512, 16, 16, 16),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the record here")
    parser.add_argument("--repetitions", type=int, default=20, help="turns of each candidate (default 20)")
    parser.add_argument("--kernels", nargs="+", choices=("prefill", "decode"), default=["prefill", "decode"])
    parser.add_argument("--head-dims", nargs="+", type=int, choices=(64, 128, 256), default=[64, 128, 256])
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("this sweep measures a CUDA GPU, and there is none")
    prefill = {d: PREFILL[d] for d in args.head_dims if "prefill" in args.kernels}
    decode = {d: DECODE[d] for d in args.head_dims if "decode" in args.kernels and d in DECODE}
    refused = compile_all([(d, t) for chosen in (prefill, decode) for d, tiles in chosen.items() for t in tiles])
    tables = [
        sweep(Shape(1, n, keys, 12, 2, d), [t for t in tiles if (d, t) not in refused], args.repetitions)
        for d, tiles in prefill.items()
        for n, keys in PREFILL_SHAPES
    ]
    tables += [
        sweep(
            Shape(rows, 1, keys, q_heads, kv_heads, d),
            [t for t in tiles if (d, t) not in refused],
            args.repetitions,
            num_splits,
        )
        for d, tiles in decode.items()
        for rows, keys, q_heads, kv_heads, num_splits in DECODE_SHAPES
    ]
    notes = [f"Refused, head_dim {d}, {tiles}: {reason}" for (d, tiles), reason in refused.items()]
    for table in tables:
        print_table(table)
    print("\n".join(notes))
    if args.json:
        write_json(args.json, what="attention-tiles", tables=tables, figures={}, notes=notes)


Tiles = PrefillTiles | DecodeTiles


def sweep(shape: Shape, candidates: list[Tiles], repetitions: int, num_splits: int = 16) -> Table:
    problem = Problem.random(shape, torch.cuda.get_device_properties(0).L2_cache_size)
    arms = []
    for tiles in candidates:
        calls = [partial(launch, problem, tiles, num_splits, copy) for copy in range(len(problem.tables))]
        check = partial(check_launch, problem, tiles, num_splits)
        if shape.n == 1:
            turns = max(1, 8 // len(calls))
            arms.append(Arm(str(tiles), check, on_many(graph_of(calls * turns), len(calls) * turns)))
        else:
            turns = max(1, round(TURN_S * 400e12 / shape.flops))
            arms.append(Arm(str(tiles), check, on_many(graph_of(calls[:1] * turns), turns)))
    result = alternate(arms, repetitions, label=shape.name)
    work = ("GB/s", shape.kv_bytes / 1e9) if shape.n == 1 else ("TFLOPS", shape.flops / 1e12)
    rates = {arm.name: work[1] / result.time(arm.name).median for arm in arms}
    fastest_first = sorted(rates, key=lambda name: -rates[name])
    rows: list[list[object]] = [[name, result.time(name).as_time(), round(rates[name], 1)] for name in fastest_first]
    title = shape.name if num_splits == 16 else f"{shape.name}, {num_splits} splits"
    return {"title": title, "columns": ["tiles", "time", work[0]], "rows": rows}


def launch(problem: Problem, tiles: Tiles, num_splits: int = 16, copy: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """One launch with given tiles; a decode as when captured, in two kernels, so that graphs hold their buffers."""
    q = problem.q
    out, lse = torch.empty_like(q), q.new_empty(q.shape[:2], dtype=torch.float32)
    options = {"scale": problem.shape.head_dim**-0.5, "sliding_window": None, "softcap": None, "out": out, "lse": lse}
    if isinstance(tiles, PrefillTiles):
        launch_prefill(*problem.prefill(copy), tiles=tiles, **options)
    else:
        table, seq_lens = problem.decode(copy)[3:]
        decode_rows(
            q,
            problem.k_cache,
            problem.v_cache,
            table,
            None,
            seq_lens,
            num_splits=num_splits,
            workspace=None,
            merge_in_launch=False,
            first_row=0,
            rows=q.shape[0],
            tiles=tiles,
            **options,
        )
    return out, lse


def check_launch(problem: Problem, tiles: Tiles, num_splits: int) -> None:
    problem.check(*launch(problem, tiles, num_splits))


def compile_all(candidates: list[tuple[int, Tiles]]) -> dict[tuple[int, Tiles], str]:
    """Fill Triton's cache with every candidate, a process a core; returns why some cannot run here."""
    workers = min(len(candidates), max(1, len(os.sched_getaffinity(0)) - 2))
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        reasons = list(pool.map(_compile, candidates))
    return {candidate: reason for candidate, reason in zip(candidates, reasons, strict=True) if reason}


def _compile(candidate: tuple[int, Tiles]) -> str | None:
    head_dim, tiles = candidate
    decode = isinstance(tiles, DecodeTiles)
    kinds = sorted({kind[2:] for kind in DECODE_SHAPES}) if decode else [(12, 2, 16)]
    try:
        for q_heads, kv_heads, num_splits in kinds:
            shape = Shape(1, 1 if decode else 512, 512, q_heads, kv_heads, head_dim)
            launch(Problem.random(shape, 1), tiles, num_splits)
        torch.cuda.synchronize()
    # Whatever Triton raises (too much shared memory, an internal failure) rules the candidate out.
    except Exception as error:
        return (str(error) or type(error).__name__).splitlines()[0]
    return None


if __name__ == "__main__":
    main()
