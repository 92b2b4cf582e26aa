"""Paged attention in Triton on one GPU: decode against the copy bandwidth, prefill against other kernels, host cost.

Every arm's result is checked against the torch reference before any is timed, and arms are timed in turn. GPU times are
those of replayed graphs, and what an eager call costs the host is timed by itself. Decodes rotate through keys past the
L2 cache; "of the copy" is the speed at which the keys and values were read over that of a large device copy (bytes read
and written together) in the same turns, "of a plain read" the time that one kernel takes to do nothing but read the
same blocks over the decode's.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from attention_peers import PEERS
from attention_problems import Problem, Shape, graph_of
from attention_read import PlainRead
from bench_common import Arm, Comparison, alternate, on_gpu, write_json

from tpoverlap.attention import paged_decode, paged_prefill

Table = dict[str, object]

# (shape, num_splits); 0: the default. The keys of these exceed the L2 cache of an H200. Few rows and KV heads fill the
# GPU with more splits only; of 2048 keys no more than 8 are used.
DECODE = [
    (Shape(requests, 1, keys, group * kv_heads, kv_heads, head_dim), splits)
    for head_dim in (128, 256)
    for group in (6, 8)
    for kv_heads in (2, 8)
    for requests, keys, splits in (
        (16, 8192, 0),
        (64, 2048, 8),
        (4, 32768, 0),
        *([(4, 32768, 64)] if kv_heads == 2 else []),
        (1, 131072, 128),
    )
]
# Shapes of published figures: 16 heads of 128 on an H100, in us.
PUBLISHED_US = {(1, 512): 6.9, (1, 8192): 57.0, (16, 2048): 191.0, (64, 2048): 741.0}
PUBLISHED = [(Shape(requests, 1, keys, 16, 16, 128), 0) for requests, keys in PUBLISHED_US]
PREFILL = [
    Shape(1, n, keys, 12, 2, head_dim)
    for head_dim in (128, 256)
    for n, keys in ((2048, 2048), (8192, 8192), (32768, 32768), (2048, 34816), (2048, 155648))
]
# A turn of a prefill is at least so long, in seconds at 400 TFLOPS: starting the graph then weighs nothing.
TURN_S = 2e-3
COPY_BYTES = 1 << 30
# Some 10 ms, in which the host queues the calls of a turn.
SPIN_CYCLES = 20_000_000


@dataclass
class Run:
    """What the parts of the benchmark share and fill."""

    repetitions: int
    peers: list[str]
    short: bool
    l2_bytes: int
    tables: list[Table]
    figures: dict[str, float | int | str]
    notes: list[str]
    bars: list[tuple[str, str, float]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the record here")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the ratios here (needs matplotlib)")
    parser.add_argument("--repetitions", type=int, default=20, help="turns of each arm (default 20)")
    parser.add_argument("--parts", nargs="+", choices=tuple(PARTS), default=list(PARTS))
    parser.add_argument("--peers", nargs="*", choices=tuple(PEERS), default=list(PEERS), help="compared with prefill")
    parser.add_argument("--short", action="store_true", help="a few shapes of each part")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("this benchmark measures a CUDA GPU, and there is none")
    l2_bytes = torch.cuda.get_device_properties(0).L2_cache_size
    run = Run(args.repetitions, args.peers, args.short, l2_bytes, [], {}, [], [])
    for part in args.parts:
        PARTS[part](run)
    for table in run.tables:
        print_table(table)
    print("\n".join(run.notes))
    if args.json:
        what = "attention" if set(args.parts) == set(PARTS) else "-".join(["attention", *args.parts])
        write_json(args.json, what=what, tables=run.tables, figures=run.figures, notes=run.notes)
    if args.plot:
        draw(run, args.plot)


def measure_decode(run: Run) -> None:
    rows: list[list[object]] = []
    copy = copy_arm()
    shapes = DECODE[:9] if run.short else DECODE
    for shape, splits in shapes + PUBLISHED:
        problem = Problem.random(shape, run.l2_bytes)
        options: dict[str, Any] = {"num_splits": splits} if splits else {}
        calls = [
            partial(paged_decode, *problem.decode(copy_index), out=torch.empty_like(problem.q), **options)
            for copy_index in range(len(problem.tables))
        ]
        check = partial(check_decode, problem, options)
        turns = max(1, 8 // len(calls))
        read = PlainRead(problem)
        arms = [
            Arm("copy", lambda: None, partial(scaled, copy, shape.kv_bytes / (2 * COPY_BYTES))),
            Arm("read", read.check, on_many(graph_of([*read.calls()] * turns), len(calls) * turns)),
            Arm("graph", check, on_many(graph_of(calls * turns), len(calls) * turns)),
            Arm("eager", check, on_many(partial(run_all, calls * turns), len(calls) * turns)),
        ]
        result = alternate(arms, run.repetitions, label=f"decode {shape.name}")
        of_copy, of_read = result.ratio("copy", "graph"), result.ratio("read", "graph")
        published = PUBLISHED_US.get((shape.requests, shape.keys)) if (shape, splits) in PUBLISHED else None
        rows.append(
            [
                shape.name,
                splits or 16,
                result.time("graph").as_time(),
                result.time("eager").as_time(),
                round(shape.kv_bytes / result.time("graph").median / 1e9),
                of_copy.as_ratio(),
                of_read.as_ratio(),
                published,
            ]
        )
        key = f"{shape.key}_splits{splits}" if splits else shape.key
        run.figures[f"decode_{key}_us"] = round(result.time("graph").median * 1e6, 2)
        run.figures[f"decode_{key}_of_copy"] = round(of_copy.median, 3)
        run.figures[f"decode_{key}_of_read"] = round(of_read.median, 3)
        name = f"{shape.name}, {splits} splits" if splits else shape.name
        run.bars.append(("decode, speed of the copy = 1", name, of_copy.median))
    run.tables.append(
        {
            "title": "Split-KV decode",
            "columns": [
                "shape",
                "num_splits",
                "time (graph)",
                "time (eager)",
                "GB/s",
                "of the copy",
                "of a plain read",
                "published us",
            ],
            "rows": rows,
        }
    )
    run.notes.append(
        "Decode: n x keys, query/KV heads of head_dim; FP16, blocks of 16. Published: a split-KV Triton decode with 16 "
        "heads of 128 on an H100. Of a plain read: time of a kernel that only reads the same blocks over the decode's."
    )


def check_decode(problem: Problem, options: dict[str, Any]) -> None:
    problem.check(*paged_decode(*problem.decode(), return_lse=True, **options))


def measure_prefill(run: Run) -> None:
    rows: list[list[object]] = []
    missing: set[str] = set()
    for shape in PREFILL[1::3] if run.short else PREFILL:
        problem = Problem.random(shape, run.l2_bytes)
        ours = partial(paged_prefill, *problem.prefill(), backend="triton", out=torch.empty_like(problem.q))
        calls = max(1, min(50, round(TURN_S * 400e12 / shape.flops)))
        arms = [Arm("Triton", partial(check_prefill, problem), on_many(graph_of([ours] * calls), calls))]
        for name in run.peers:
            try:
                call = PEERS[name](problem)
                problem.check(call())
            # A peer that is absent, or does not serve this shape in this torch, is left out and named.
            except Exception as error:
                missing.add(f"{name}: {(str(error) or type(error).__name__).splitlines()[0][:160]}")
                continue
            arms.append(Arm(name, partial(check_call, problem, call), prefill_turn(run, name, call, calls)))
        result = alternate(arms, run.repetitions, label=f"prefill {shape.name}")
        rows += prefill_rows(run, shape, result, [arm.name for arm in arms])
    run.tables.append(
        {
            "title": "Packed prefill",
            "columns": ["shape", "arm", "time", "TFLOPS", "time of Triton over it"],
            "rows": rows,
        }
    )
    run.notes.append(
        "Prefill: FP16, one request, causal, bottom-right aligned; peers without paging get gathered keys. Calls of a "
        "graph follow each other on the same tensors, for all arms alike."
    )
    run.notes += [f"Left out at some shapes: {reason}" for reason in sorted(missing)]


def prefill_turn(run: Run, name: str, call: Callable[[], object], calls: int) -> Callable[[], float]:
    """A turn of replayed calls; of queued ones where they cannot be captured, behind a kernel that hides the host."""
    try:
        return on_many(graph_of([call] * calls), calls)
    # Whatever a library does that a capture refuses.
    except Exception as error:
        torch.cuda.synchronize()
        reason = (str(error) or type(error).__name__).splitlines()[0][:120]
        note = f"{name} is timed as queued calls, since it cannot be captured: {reason}"
        if note not in run.notes:
            run.notes.append(note)
        return on_gpu(call, calls, first=partial(torch.cuda._sleep, SPIN_CYCLES))


def prefill_rows(run: Run, shape: Shape, result: Comparison, arms: list[str]) -> list[list[object]]:
    rows: list[list[object]] = []
    for arm in arms:
        seconds, ratio = result.time(arm), result.ratio("Triton", arm)
        tflops = round(shape.flops / seconds.median / 1e12, 1)
        rows.append([shape.name, arm, seconds.as_time(), tflops, "1" if arm == "Triton" else ratio.as_ratio()])
        if arm == "Triton":
            run.figures[f"prefill_{shape.key}_ms"] = round(seconds.median * 1e3, 3)
        else:
            run.figures[f"prefill_{shape.key}_over_{arm.replace(' ', '_')}"] = round(ratio.median, 3)
            run.bars.append((f"prefill, speed of {arm} = 1", shape.name, 1 / ratio.median))
    fastest = min(arms, key=lambda arm: result.time(arm).median)
    run.figures[f"prefill_{shape.key}_fastest"] = fastest
    return rows


def check_prefill(problem: Problem) -> None:
    problem.check(*paged_prefill(*problem.prefill(), backend="triton", return_lse=True))


def check_call(problem: Problem, call: Callable[[], torch.Tensor]) -> None:
    problem.check(call())


def measure_decode_host(run: Run) -> None:
    """Host time of one eager decode: the queue is never full, so that the GPU does not count."""
    rows: list[list[object]] = []
    for shape in (Shape(1, 1, 512, 16, 16, 128), Shape(1, 1, 512, 12, 2, 128), Shape(8, 1, 512, 12, 2, 256)):
        problem = Problem.random(shape, 1)
        arguments, out = problem.decode(), torch.empty_like(problem.q)
        variants = {
            "out given": partial(paged_decode, *arguments, out=out),
            "out allocated": partial(paged_decode, *arguments),
            "with log-sum-exp": partial(paged_decode, *arguments, return_lse=True),
        }
        arms = [Arm(name, partial(check_decode, problem, {}), host_turn(call)) for name, call in variants.items()]
        result = alternate(arms, max(run.repetitions, 20), label=f"host cost {shape.name}")
        for name in variants:
            seconds = result.time(name)
            rows.append([shape.name, name, seconds.as_time()])
            run.figures[f"decode_host_{shape.key}_{name.replace(' ', '_')}_us"] = round(seconds.median * 1e6, 2)
    run.tables.append({"title": "Host cost of an eager decode", "columns": ["shape", "call", "time"], "rows": rows})


def measure_prefill_host(run: Run) -> None:
    """The same of one eager prefill; with a table of 32768 keys it allocates partial results and merges them."""
    rows: list[list[object]] = []
    for shape in (Shape(1, 64, 512, 12, 2, 128), Shape(1, 16, 32768, 12, 2, 128)):
        problem = Problem.random(shape, 1)
        prefill = partial(paged_prefill, *problem.prefill(), backend="triton")
        variants: dict[str, Callable[[], object]] = {
            "out given": partial(prefill, out=torch.empty_like(problem.q)),
            "out allocated": prefill,
        }
        checks = dict.fromkeys(variants, partial(check_prefill, problem))
        if "SDPA flash" in run.peers:
            variants["SDPA flash"] = PEERS["SDPA flash"](problem)
            checks["SDPA flash"] = partial(check_call, problem, PEERS["SDPA flash"](problem))
        arms = [Arm(name, checks[name], host_turn(call)) for name, call in variants.items()]
        result = alternate(arms, max(run.repetitions, 20), label=f"host cost {shape.name}")
        for name in variants:
            seconds = result.time(name)
            rows.append([shape.name, name, seconds.as_time()])
            run.figures[f"prefill_host_{shape.key}_{name.replace(' ', '_')}_us"] = round(seconds.median * 1e6, 2)
    run.tables.append({"title": "Host cost of an eager prefill", "columns": ["shape", "call", "time"], "rows": rows})


def measure_host(run: Run) -> None:
    measure_decode_host(run)
    measure_prefill_host(run)


def host_turn(call: Callable[[], object], calls: int = 200) -> Callable[[], float]:
    def turn() -> float:
        torch.cuda.synchronize()
        start_s = time.perf_counter()
        for _ in range(calls):
            call()
        seconds = (time.perf_counter() - start_s) / calls
        torch.cuda.synchronize()
        return seconds

    return turn


def copy_arm() -> Callable[[], float]:
    source = torch.randn(COPY_BYTES // 4, device="cuda")
    target = torch.empty_like(source)
    return on_gpu(partial(target.copy_, source))


def scaled(turn: Callable[[], float], factor: float) -> float:
    return turn() * factor


def on_many(function: Callable[[], object], calls: int) -> Callable[[], float]:
    """A turn that times ``function``, which makes ``calls`` calls, and returns the seconds of one."""
    return partial(scaled, on_gpu(function), 1 / calls)


def run_all(calls: Sequence[Callable[[], object]]) -> None:
    for call in calls:
        call()


def print_table(table: Table) -> None:
    rows = [table["columns"], *table["rows"]]  # type: ignore[misc, has-type]
    widths = [max(len(str(row[i])) for row in rows) for i in range(len(rows[0]))]
    print(f"\n{table['title']}")
    for row in rows:
        print("  ".join(str(cell).ljust(width) for cell, width in zip(row, widths, strict=True)))


def draw(run: Run, path: Path) -> None:
    """One panel for each comparison, a bar for each shape."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    titles = list(dict.fromkeys(title for title, _, _ in run.bars))
    heights = [1 + 0.3 * sum(bar[0] == title for bar in run.bars) for title in titles]
    figure, panels = pyplot.subplots(
        len(titles), 1, figsize=(9, sum(heights)), gridspec_kw={"height_ratios": heights}, squeeze=False
    )
    for title, axis in zip(titles, panels[:, 0], strict=True):
        bars = [(shape, value) for at, shape, value in run.bars if at == title]
        axis.barh([shape for shape, _ in bars], [value for _, value in bars])
        axis.axvline(1.0, color="black", linewidth=0.8)
        axis.invert_yaxis()
        axis.set_title(title, fontsize=10)
        axis.tick_params(labelsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


PARTS: dict[str, Callable[[Run], None]] = {
    "decode": measure_decode,
    "prefill": measure_prefill,
    "host": measure_host,
}


if __name__ == "__main__":
    main()
