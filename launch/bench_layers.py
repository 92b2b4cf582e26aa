"""A stack of layers in overlapped pieces, against its parts alone, the best possible time, and NCCL.

    python launch/bench_layers.py --json FILE             # starts its ranks itself, one a GPU

The layers are the projections of a 27B-class decoder, in BF16, as each of two ranks holds them; there is no attention.
For every number of tokens these take turns, each checked against the serial run before anything is timed:
- the stack serially, in 2, 3 and 4 pieces, and in as many as the executor chooses, on NCCL without peer access and on
  the copy engines; where the GPUs reach each other, serially on NCCL with peer access, by ranks of their own;
- the compute of 1 to 4 pieces alone, and their all-reduces alone. From these come the bounds: the time that pieces
  take at best if compute and communication each serve first come, first served.
On CPU tensors gloo and the shared-memory channel take the transports' places.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch
from allreduce_report import print_tables
from bench_common import Arm, alternate, write_json
from bench_teams import Team, peer_access
from job_ranks import start_ranks
from layer_report import Measured, figures, missed, tables
from layer_stack import SHAPES
from layer_trials import TOLERANCE, Trials

from tpoverlap.errors import TpOverlapError

TOKENS = (1600, 2048, 4096, 8192)
# The all-reduces of a turn in place double their values each time; beyond this BF16 would overflow.
MAX_LAYERS = 24


@dataclass(frozen=True)
class Options:
    """Fields are those of ``--help``. teams: 2 where NCCL with peer access is compared."""

    device: str
    ranks: int
    teams: int
    shape: str
    layers: int
    tokens: tuple[int, ...]
    repetitions: int
    warmup: int
    json: Path | None
    gates: bool


def main() -> int:
    """Returns the exit status: 1 for an error, a wrong result or, with --gates, a goal that was not reached."""
    options = parse_options()
    try:
        found = start_ranks(options.ranks * options.teams, measure, options)
        return report(options, found)
    except (TpOverlapError, OSError) as error:
        print(f"bench_layers: {error}", file=sys.stderr, flush=True)
        return 1


def measure(options: Options) -> list[Measured]:
    """One rank's part of the work; the same result on every rank."""
    found = []
    with ExitStack() as stack:
        team = Team.join(options.ranks, options.device)
        stack.callback(team.world.leave)
        trials = Trials(team, SHAPES[options.shape], options.layers)
        stack.callback(trials.close)
        for tokens in options.tokens:
            trials.begin(tokens)
            arms = [
                Arm(trial.name, trial.check, team.turn(trial.owner, trial.run))
                for trial in trials.of_tokens(with_peer=options.teams == 2)
            ]
            times = alternate(arms, options.repetitions, options.warmup, label=f"{tokens} tokens")
            found.append(Measured(tokens, options.layers, trials.served, times, trials.host_costs()))
    return found


def report(options: Options, found: Sequence[Measured]) -> int:
    made = tables(found)
    print_tables(made)
    notes = [
        f"{options.ranks} ranks, {options.layers} layers, BF16, {SHAPES[options.shape]}.",
        "Times are of a forward pass on the slowest rank, arms in turn: median (10th to 90th percentile) of "
        f"{options.repetitions} turns after {options.warmup} of warm-up. Ratios are taken turn by turn.",
        f"Every arm's output was checked first: relative L2 distance to the serial run below {TOLERANCE:g}, and the "
        "same bits on all ranks.",
        "Bound: two resources that serve first come, first served, fed with the times of the pieces' compute and "
        "all-reduces alone, measured in the same turns.",
        "Host times: from the call to its return, on an idle device, median of 5.",
    ]
    if options.teams == 1 and options.device == "cuda":
        notes.append("NCCL with peer access was not compared: these GPUs do not reach each other's memory.")
    if options.json:
        write_json(options.json, what="layers", tables=made, figures=figures(found), notes=notes)
        print(f"\nrecord: {options.json}")
    not_reached = missed(found)
    for sentence in not_reached:
        print(f"goal missed: {sentence}", file=sys.stderr)
    return 1 if options.gates and not_reached else 0


def parse_options(arguments: Sequence[str] | None = None) -> Options:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    add = parser.add_argument
    add("--device", choices=("cpu", "cuda"), default="cuda", help="where the tensors lie (default: cuda)")
    add("--ranks", type=int, default=2, metavar="N", help="tensor-parallel ranks, one a GPU (default: 2)")
    add("--shape", choices=tuple(SHAPES), default="27b", help="default: 27b")
    add("--layers", type=int, default=16, metavar="N", help="default: 16")
    add("--tokens", nargs="+", type=int, default=list(TOKENS), metavar="N", help=f"default: {TOKENS}")
    add("--repetitions", type=int, default=20, metavar="N", help="turns of each arm (default: 20)")
    add("--warmup", type=int, default=3, metavar="N", help="turns before them that do not count (default: 3)")
    add("--no-peer", action="store_true", help="leave NCCL with peer access out")
    add("--json", type=Path, metavar="FILE", help="write the record here")
    add("--gates", action="store_true", help="exit with status 1 if a goal is missed")
    given = parser.parse_args(arguments)
    if given.device == "cuda" and torch.cuda.device_count() < given.ranks:
        parser.error(f"{given.ranks} ranks need a GPU each, and torch sees {torch.cuda.device_count()} here")
    if not 2 <= given.ranks <= 8:
        parser.error(f"--ranks {given.ranks} is not supported: give 2 to 8")
    if not 1 <= given.layers <= MAX_LAYERS:
        parser.error(f"--layers {given.layers} is not supported: give 1 to {MAX_LAYERS}")
    if min(given.tokens) < 512:
        parser.error(f"--tokens {min(given.tokens)} is not supported: 4 pieces in multiples of 128 need 512 or more")
    if given.repetitions < 1 or given.warmup < 2:
        parser.error("--repetitions must be at least 1, and --warmup at least 2: the second run chooses the pieces")
    if given.json is not None and not given.json.absolute().parent.is_dir():
        parser.error(f"the folder {given.json.parent} of {given.json} does not exist: make it, or give another path")
    teams = 2 if given.device == "cuda" and not given.no_peer and peer_access(given.ranks) else 1
    return Options(
        given.device,
        given.ranks,
        teams,
        given.shape,
        given.layers,
        tuple(given.tokens),
        given.repetitions,
        given.warmup,
        given.json,
        given.gates,
    )


if __name__ == "__main__":
    sys.exit(main())
