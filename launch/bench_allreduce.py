"""All-reduce against its peers: time and achieved speed by payload, every result checked before it is timed.

    python launch/bench_allreduce.py                      # starts 2, then 4, then 8 ranks itself
    torchrun --standalone --nproc-per-node 2 launch/bench_allreduce.py

All arms run in the same processes, in turn. A turn begins at a barrier with an input that has just been written; its
time is that of one call (several back to back where the payload is small) on the slowest rank. On CPU tensors the
peer is gloo; "copy + add" is what a rank's memory takes to copy the payload once and to add it once, with no waiting.
On CUDA tensors it is NCCL, eager and in graphs, where each rank has a GPU of its own; say NCCL_P2P_DISABLE=1 to see
the machines that this is for. ``--parts host`` times only what an eager call costs the host, which ranks that share a
GPU can tell, too.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch
from allreduce_contest import Contest, Contests, ExtraMeasurement, Measurement, slowest_rank
from allreduce_cpu import CpuContests
from allreduce_report import figures, missed, print_tables, size_name, tables, write_plot
from bench_common import Comparison, alternate, hardware, write_json
from job_machine import require_packages, set_threads
from job_ranks import start_ranks
from job_world import JobError, World

from tpoverlap.errors import TpOverlapError

SIZES = "4KiB 16KiB 64KiB 256KiB 1MiB 4MiB 8MiB 16MiB 64MiB"
GPU_SIZES = "2KiB 8KiB 64KiB 256KiB 1MiB 4MiB 8192000 16384000 32MiB 64MiB"
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
PLOT_FORMATS = (".png", ".svg", ".pdf")
_SCALES = {"": 1, "B": 1, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30}


@dataclass(frozen=True)
class Options:
    """Fields are those of ``--help``. ranks: empty where torchrun has started them."""

    sizes: tuple[int, ...]
    ranks: tuple[int, ...]
    device: str
    parts: str
    dtype: str
    repetitions: int
    warmup: int
    json: Path | None
    plot: Path | None
    gates: bool


def main() -> int:
    """Returns the exit status: 1 for an error, a wrong result or, with --gates, a goal that was not reached."""
    options = parse_options()
    kind = contests_of(options.device, options.parts)
    try:
        if options.plot:
            require_packages("matplotlib")
        if options.ranks:
            found = [one for ranks in options.ranks for one in start_ranks(ranks, measure, options, kind)]
        else:
            found = measure(options, kind)
        return report(options, kind, found) if found else 0
    except (TpOverlapError, OSError) as error:
        if not isinstance(error, JobError) or error.reporter == int(os.environ.get("RANK", "0")):
            print(f"bench_allreduce: {error}", file=sys.stderr, flush=True)
        return 1


def contests_of(device: str, parts: str = "all") -> type[Contests]:
    if device == "cpu":
        return CpuContests
    from allreduce_gpu import GpuContests, HostContests

    return HostContests if parts == "host" else GpuContests


def measure(options: Options, kind: type[Contests]) -> list[ExtraMeasurement]:
    """This rank's part of the work. Returns what came of it on rank 0, and an empty list elsewhere."""
    found: list[ExtraMeasurement] = []
    with ExitStack() as stack:
        world = World.join()
        stack.callback(world.leave)
        set_threads(None, world)
        contests = kind(world, DTYPES[options.dtype])
        stack.callback(contests.close)

        def compare(contest: Contest, title: str) -> Comparison | None:
            label = f"{world.size} ranks, {title}"
            of_ranks = world.gather(alternate(contest.arms, options.repetitions, options.warmup, label=label))
            return None if of_ranks is None else slowest_rank(of_ranks)

        for num_bytes in options.sizes:
            contest, title = contests.contest(num_bytes), size_name(num_bytes)
            slowest = compare(contest, title)
            if slowest is not None:
                ratios, floors = tuple(contest.ratios), tuple(contest.floors)
                found.append(Measurement(world.size, title, slowest, ratios, num_bytes, floors))
        for extra in contests.extras():
            slowest = compare(extra.contest, extra.title)
            if slowest is not None:
                found.append(ExtraMeasurement(world.size, extra.title, slowest, tuple(extra.contest.ratios)))
    return found


def report(options: Options, kind: type[Contests], found: Sequence[ExtraMeasurement]) -> int:
    """Prints the tables, writes the files, names the goals that were missed; returns the exit status."""
    measurements = [one for one in found if isinstance(one, Measurement)]
    made = tables(measurements, [one for one in found if not isinstance(one, Measurement)])
    print_tables(made)
    notes = [
        f"Payloads are {options.dtype}.",
        *kind.notes,
        f"Times are of one call on the slowest rank: median (10th to 90th percentile) of {options.repetitions} turns "
        f"after {options.warmup} of warm-up, arms in turn. Ratios are taken turn by turn.",
    ]
    if measurements:
        notes.append("GB/s: payload of a rank over the median time.")
    if options.json:
        write_json(options.json, what=kind.what, tables=made, figures=figures(found), notes=notes)
        print(f"\nrecord: {options.json}")
    if options.plot:
        facts = hardware()
        machine = ", ".join(facts["gpus"]) or f"{facts['cpu']} ({facts['cpus']} CPUs)"
        write_plot(options.plot, measurements, f"All-reduce of {kind.subject}, {machine}")
        print(f"plot: {options.plot}")
    not_reached = missed(found)
    for sentence in not_reached:
        print(f"goal missed: {sentence}", file=sys.stderr)
    return 1 if options.gates and not_reached else 0


def parse_options(arguments: Sequence[str] | None = None) -> Options:
    parser = argparse.ArgumentParser(
        description="Time all-reduce through host memory against gloo (CPU tensors) or NCCL (CUDA tensors)."
    )
    add = parser.add_argument
    add("--device", choices=("cpu", "cuda"), default="cpu", help="where the tensors lie (default: cpu)")
    add("--parts", choices=("all", "host"), default="all", help="host: a call's host time alone (cuda; default: all)")
    sizes_help = f"payloads of a rank (default: {SIZES}; cuda: {GPU_SIZES})"
    add("--sizes", nargs="+", metavar="SIZE", help=sizes_help)
    add("--ranks", nargs="+", type=int, metavar="N", help="how many to start (default: 2 4 8; cuda: 2)")
    add("--dtype", choices=tuple(DTYPES), default="float32", help="default: float32")
    add("--repetitions", type=int, default=30, metavar="N", help="turns of each arm (default: 30)")
    add("--warmup", type=int, default=5, metavar="N", help="turns before them that do not count (default: 5)")
    add("--json", type=Path, metavar="FILE", help="write the record here")
    add("--plot", type=Path, metavar="FILE", help=f"draw it here ({', '.join(PLOT_FORMATS)})")
    add("--gates", action="store_true", help="exit with status 1 if a goal is missed")
    given = parser.parse_args(arguments)
    under_torchrun = "RANK" in os.environ
    if given.ranks and under_torchrun:
        parser.error("--ranks starts ranks, and torchrun has started them already: give one of both")
    if given.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda needs a GPU, and torch sees none here")
    if given.parts == "host" and given.device != "cuda":
        parser.error("--parts host needs --device cuda: a call of CPU tensors is the host's from beginning to end")
    if given.parts == "host" and (given.sizes or given.plot or given.gates):
        parser.error(
            "--parts host has payloads of its own, nothing to draw and no goals: leave --sizes, --plot and --gates away"
        )
    ranks = () if under_torchrun else tuple(given.ranks or ((2,) if given.device == "cuda" else (2, 4, 8)))
    if not all(2 <= n <= 8 for n in ranks):
        parser.error(f"--ranks {' '.join(map(str, ranks))} is not supported: give numbers from 2 to 8")
    if under_torchrun and not 2 <= int(os.environ["WORLD_SIZE"]) <= 8:
        parser.error(f"{os.environ['WORLD_SIZE']} ranks are not supported: start 2 to 8")
    if given.repetitions < 1 or given.warmup < 0:
        parser.error("--repetitions must be at least 1, and --warmup at least 0")
    for path in (given.json, given.plot):
        if path is not None and not path.absolute().parent.is_dir():
            parser.error(f"the folder {path.parent} of {path} does not exist: make it, or give another path")
    if given.plot is not None and given.plot.suffix not in PLOT_FORMATS:
        parser.error(f"--plot {given.plot} is not supported: give a name that ends with {', '.join(PLOT_FORMATS)}")
    try:
        default = "" if given.parts == "host" else GPU_SIZES if given.device == "cuda" else SIZES
        texts = given.sizes or default.split()
        sizes = tuple(parse_size(text, DTYPES[given.dtype].itemsize) for text in texts)
    except ValueError as error:
        parser.error(str(error))
    return Options(
        sizes,
        ranks,
        given.device,
        given.parts,
        given.dtype,
        given.repetitions,
        given.warmup,
        given.json,
        given.plot,
        given.gates,
    )


def parse_size(text: str, multiple: int) -> int:
    """ "64KiB" -> 65536. ValueError unless it is a positive multiple of ``multiple`` bytes."""
    match = re.fullmatch(r"(\d+)\s*([A-Za-z]*)", text)
    scale = _SCALES.get(match[2].upper()) if match else None
    size = int(match[1]) * scale if match and scale else 0
    if size < 1 or size % multiple:
        raise ValueError(f"size {text!r} is not supported: give a multiple of {multiple} bytes, such as 4KiB or 1MiB")
    return size


if __name__ == "__main__":
    sys.exit(main())
