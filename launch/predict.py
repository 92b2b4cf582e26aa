"""Predicts prefill: its time step by step, the best cuts, and from how many tokens on a batch should be split.

    python launch/predict.py                                          # the reference's cards, 150k tokens
    python launch/predict.py --shape llama-70b --tp 4 --link 12       # another model, a faster link
    python launch/predict.py --tables box.json --tokens 32000         # a box of your own: see predict_tables.py
    python launch/predict.py --reference                              # the model against measured figures

docs/prediction.md says what the model is and how far to trust it. No GPU is used.
"""

from __future__ import annotations

import argparse
import itertools
import math
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import predict_h200 as h200
import predict_reference as reference
from allreduce_report import print_tables
from bench_common import write_json
from predict_model import SHAPES, Prediction, Predictor, at_speed, chunks, equal_cuts
from predict_tables import DeviceTables, read_tables

from tpoverlap.errors import ConfigError
from tpoverlap.trace.timeline import duration

Table = dict[str, Any]
CUT_MULTIPLE = 128


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status: 2 for input that is not supported."""
    options = parse_options(arguments)
    try:
        if options.reference:
            print("\n\n".join(reference_tables()))
            return 0
        tables = load(options.tables)
        if options.link is not None:
            tables = on_link(tables, options.link)
        made, figures = predict(options, tables)
    except ConfigError as error:
        print(f"predict: {error}", file=sys.stderr)
        return 2
    print_tables(made)
    if options.json:
        notes = [f"Predictions, not measurements: {options.shape} on {options.tp} ranks.", *tables.sources]
        write_json(options.json, what="prediction", tables=made, figures=figures, notes=notes)
    return 0


def load(name: str) -> DeviceTables:
    """The built-in tables of that name, or else those of that file."""
    return reference.fitted().tables if name == reference.NAME else read_tables(Path(name))


def on_link(tables: DeviceTables, gb_per_s: float) -> DeviceTables:
    """The tables with all-reduces of their last transport at that speed."""
    ours = list(tables.transports)[-1]
    faster = replace(tables.transports[ours], all_reduce=at_speed(gb_per_s))
    return replace(tables, transports={**tables.transports, ours: faster})


def predict(options: argparse.Namespace, tables: DeviceTables) -> tuple[list[Table], dict[str, float | int | str]]:
    """What is printed, and its figures by name. ConfigError where tables and model do not fit."""
    shape, tokens, chunk = SHAPES[options.shape], options.tokens, options.chunk
    predictor = Predictor(shape, tables, options.tp)
    baseline, ours = next(iter(tables.transports)), list(tables.transports)[-1]
    runs: dict[str, Prediction] = {}
    if options.tables == reference.NAME:
        # How that box got where it is: its earlier kernels, which only these rows know.
        for step in reference.steps(tables):
            of_step = Predictor(shape, step.tables, options.tp)
            runs[step.name] = of_step.prefill(step.transport, tokens, chunk, step.num_pieces)
    else:
        runs["serial"] = predictor.prefill(baseline, tokens, chunk)
        for transport in tables.transports:
            runs[f"2 pieces, {transport}"] = predictor.prefill(transport, tokens, chunk, 2)
    runs[f"whole chunks, {ours}"] = predictor.prefill(ours, tokens, chunk)
    for pieces in (3, 4):
        runs[f"{pieces} pieces, {ours}"] = predictor.prefill(ours, tokens, chunk, pieces)
    cuts = _cuts(predictor, ours, tokens, chunk)
    least = predictor.min_tokens(ours, chunk, CUT_MULTIPLE)
    serial_s = next(iter(runs.values())).seconds
    times = {
        "title": f"{options.shape}, {options.tp} ranks, {tokens} tokens in chunks of {chunk}, on {tables.name}",
        "columns": ["step", "s", "/ serial", "compute, s", "communication, s", "host, s", "limit, s", "s / limit"],
        "rows": [
            [
                name,
                round(run.seconds, 2),
                round(run.seconds / serial_s, 3),
                round(run.compute_s, 2),
                round(run.communication_s, 2),
                round(run.issue_s, 2),
                round(run.limit_s, 2),
                round(run.seconds / run.limit_s, 3),
            ]
            for name, run in runs.items()
        ],
    }
    says_least = f"none up to {chunk}" if least is None else least
    advice = {
        "title": "Splitting",
        "columns": ["setting", "value"],
        "rows": [["min_tokens", says_least], ["num_pieces", _most_common(cuts)]],
    }
    figures: dict[str, float | int | str] = {f"{name}, s": round(run.seconds, 3) for name, run in runs.items()}
    figures |= {"min_tokens": says_least, "num_pieces": _most_common(cuts)}
    return [times, cuts, advice], figures


def _cuts(predictor: Predictor, transport: str, tokens: int, chunk: int) -> Table:
    """The best cuts of the first, the middle and the last full chunk."""
    full = [context for context, count in chunks(tokens, chunk) if count == chunk] or [0]
    size = min(tokens, chunk)
    rows: list[list[Any]] = []
    for context in dict.fromkeys((full[0], full[len(full) // 2], full[-1])):
        best = predictor.best_cut(transport, context, size, CUT_MULTIPLE)
        borders = [0, *best.cuts, size]
        sizes = " + ".join(str(b - a) for a, b in itertools.pairwise(borders))
        whole = predictor.whole(transport, context, size)
        halves = predictor.split(transport, context, size, equal_cuts(size, 2))
        times = [duration(seconds) for seconds in (best.seconds, halves.seconds, whole.seconds)]
        rows.append([context, len(best.cuts) + 1, sizes, *times])
    return {
        "title": f"Best cuts of {size} tokens, {transport}",
        "columns": ["keys before", "pieces", "tokens", "time", "2 equal pieces", "whole"],
        "rows": rows,
    }


def _most_common(cuts: Table) -> int:
    counts = [row[1] for row in cuts["rows"]]
    return max(sorted(set(counts)), key=counts.count)


def reference_tables() -> list[str]:
    """The tables of docs/prediction.md, in its order, as Markdown."""
    fit = reference.fitted()
    lengths = [f"{tokens // 1000}k" for tokens in reference.LENGTHS]
    steps = [
        f"| step | {' | '.join(f'{name} measured, s | predicted, s | error' for name in lengths)} |",
        "|---" + "|--:" * (3 * len(lengths)) + "|",
    ]
    for step in reference.MEASURED_S:
        figures = [figure for figure in fit.figures if figure.step == step]
        cells = [
            f"{figure.measured_s:.2f} | {figure.predicted_s:.2f} | "
            + (_percent(figure.error) if figure in fit.others else "fitted")
            for figure in figures
        ]
        steps.append(f"| {step} | {' | '.join(cells)} |")
    columns = "| `half_tokens` | TFLOPS at full speed | errors of the other figures |"
    assumptions = [f"| assumed {columns}", "|---|--:|--:|---|", _fit("as above", fit)]
    assumptions += [
        _fit(words, reference.fitted(assumed=assumed))
        for words, assumed in (
            ("NCCL as fast beside compute as alone", reference.Assumed(nccl_beside_compute=1.0)),
            ("dequantized once a chunk", reference.Assumed(dequantized_per="chunk")),
        )
    ]
    fits = [f"| fitted on, at {lengths[0]} {columns}", "|---|--:|--:|---|"]
    fits += [_fit(step, reference.fitted(step, reference.LENGTHS[0])) for step in list(reference.MEASURED_S)[1:]]
    factor = h200.fitted_nccl()
    loops = ["| tokens | halves on | measured, ms | predicted, ms | error |", "|--:|---|--:|--:|--:|"]
    for loop in h200.LOOPS:
        copies, nccl = h200.predicted_ms(loop, h200.COPY_ENGINES), h200.predicted_ms(loop, h200.NCCL, factor)
        error = "fitted" if loop is h200.LOOPS[0] else _percent(nccl / loop.halves_on_nccl - 1)
        for transport, measured, predicted, says in (
            (
                h200.COPY_ENGINES,
                loop.halves_on_copy_engines,
                copies,
                _percent(copies / loop.halves_on_copy_engines - 1),
            ),
            (f"NCCL, {factor:.2f} beside compute", loop.halves_on_nccl, nccl, error),
        ):
            loops.append(f"| {loop.tokens} | {transport} | {measured} | {predicted:.1f} | {says} |")
    return ["\n".join(table) for table in (steps, assumptions, fits, loops)]


def _fit(words: str, fit: reference.Fit) -> str:
    worst = [pick(fit.others, key=lambda figure: figure.error) for pick in (min, max)]
    spread = " to ".join(f"{_percent(one.error)} ({one.step}, {one.tokens // 1000}k)" for one in worst)
    return f"| {words} | {fit.half_tokens:.0f} | {fit.full_speed_flops / 1e12:.0f} | {spread} |"


def _percent(error: float) -> str:
    return f"{100 * error:+.1f} %"


def parse_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--shape", choices=tuple(SHAPES), default=reference.SHAPE, help=f"the model (default: {reference.SHAPE})")
    add(
        "--tables",
        default=reference.NAME,
        metavar="FILE",
        help=f"what the box takes, as launch/predict_tables.py describes it (default: the built-in {reference.NAME})",
    )
    add("--tp", type=int, default=2, metavar="N", help="tensor-parallel ranks (default: 2)")
    add("--tokens", type=int, default=150_000, metavar="N", help="of the prompt (default: 150000)")
    add("--chunk", type=int, default=reference.CHUNK, metavar="N", help=f"default: {reference.CHUNK}")
    add(
        "--link", type=float, metavar="GB/S", help="payload of an all-reduce a second, in place of the last transport's"
    )
    add("--json", type=Path, metavar="FILE", help="write the record here")
    add("--reference", action="store_true", help="print the model against measured figures, and nothing else")
    given = parser.parse_args(arguments)
    for name, value, low in (("--tp", given.tp, 2), ("--tokens", given.tokens, 1), ("--chunk", given.chunk, 1)):
        if value < low:
            parser.error(f"{name} {value} is not supported: give an integer >= {low}")
    if given.link is not None and not 0 < given.link < math.inf:
        parser.error(f"--link {given.link} is not supported: give a positive number of GB/s")
    if given.json is not None and not given.json.absolute().parent.is_dir():
        parser.error(f"the folder {given.json.parent} of {given.json} does not exist: make it, or give another path")
    return given


if __name__ == "__main__":
    sys.exit(main())
