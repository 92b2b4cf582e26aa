"""The sparse attention parts on one GPU: DSA candidate blocks by live length and width, QSA scoring and selection.

Every arm is checked before any is timed and is timed as a replayed CUDA graph, in turn with the others.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from bench_common import write_json
from sparse_dsa import measure_mask, measure_scores, measure_select
from sparse_qsa import measure_break_even, measure_metadata, measure_selection
from sparse_run import Run, print_table
from sparse_topk import measure_topk

PARTS = {
    "mask": measure_mask,
    "scores": measure_scores,
    "select": measure_select,
    "topk": measure_topk,
    "qsa": measure_selection,
    "break-even": measure_break_even,
    "metadata": measure_metadata,
}
NOTES = [
    "Times are of one call, kernels only unless a row says host, by replayed CUDA graphs; inputs rotate among several "
    "buffers, which pass the L2 cache where the live data of a call is large enough.",
    "Wide over narrow: the same live length in a buffer of 1,048,576 columns and in one of just that length.",
    "Full-width grid: one program a 1024-column tile of the whole width, with flags cleared at full width.",
    "Floor: the live columns moved at the same addresses by a grid that was told their number, nothing looked up (the "
    "mask's reads the candidates once, and is told which blocks they keep). Its wide over narrow is the price of the "
    "addresses; 'of the floor's' is what is left of ours when that is taken out.",
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the record here")
    parser.add_argument("--repetitions", type=int, default=20, help="turns of each arm (default 20)")
    parser.add_argument("--parts", nargs="+", choices=tuple(PARTS), default=list(PARTS), help="default: everything")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("this benchmark measures a CUDA GPU, and there is none")
    run = Run(args.repetitions, torch.cuda.get_device_properties(0).L2_cache_size)
    for part in args.parts:
        first = len(run.tables)
        PARTS[part](run)
        for table in run.tables[first:]:
            print_table(table)
        torch.cuda.empty_cache()
        if args.json:  # after every part, so that a run that is stopped keeps what it measured
            write_json(args.json, what="sparse", tables=run.tables, figures=run.figures, notes=NOTES)


if __name__ == "__main__":
    main()
