"""Prefill of long prompts, step by step: serial on NCCL, then in halves, on copy engines, with split-KV attention, ...

    python launch/bench_prefill.py --lengths 29000 --json FILE --plot FILE --trace FILE    # two GPUs, one a rank

The model has the shapes of a real one and random NVFP4 weights. Arms take turns, and where the GPUs reach each other
the last ones run serially on NCCL with peer access, by ranks of their own. Every arm's first token and logits are
checked against the serial arm's. Prompts are timed whole, ``--rounds`` times an arm; then single chunks evenly over
the prompt, on the cache that it has left, where the arms also say how much communication no compute has hidden. The
communication of a decode step is compared in CUDA graphs behind the prompt. Then the model's parts are timed alone, and
each prefill is predicted from them (docs/prediction.md). On CPU ranks gloo and the shared-memory
channel take the transports' places.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from allreduce_report import print_tables
from bench_common import Arm, Comparison, alternate, check_record, command_line, write_json
from bench_teams import Team, peer_access
from job_machine import require_packages
from job_ranks import start_ranks
from predict_records import to_record
from prefill_arms import PrefillArm, everything, prefill_arms
from prefill_contributions import (
    WHAT,
    ChunkAccount,
    Findings,
    Measured,
    figures,
    missed,
    notes,
    predictions,
    tables,
    write_plot,
)
from prefill_decode import decode_times
from prefill_parts import device_tables, measured_by
from prefill_soak import SETTLED, soak
from prefill_trials import BLOCK_SIZE, TOLERANCE, PrefillTrials, Prompt, sample
from synthetic_decoder import SHAPES, SyntheticShape

from tpoverlap.errors import TpOverlapError
from tpoverlap.trace import Timeline, write_chrome

_LONG = 64_000
"""Prompts from here on are timed once by default."""
_UNTIMED = 2


@dataclass(frozen=True)
class Options:
    """Fields are those of ``--help``. teams: 2 where NCCL with peer access is compared."""

    device: str
    ranks: int
    teams: int
    shape: str
    layers: int
    chunk: int
    state_block: int
    lengths: tuple[int, ...]
    pieces: int
    rounds: int | None
    samples: int
    decode_repetitions: int
    only: tuple[str, ...]
    soak: int
    json: Path | None
    plot: Path | None
    record: Path | None
    trace: Path | None
    gates: bool

    @property
    def model(self) -> SyntheticShape:
        return SHAPES[self.shape].with_layers(self.layers)

    def rounds_of(self, length: int) -> int:
        return self.rounds or (3 if length < _LONG else 1)


def main() -> int:
    """Returns the exit status: 1 for an error, a wrong result or, with --gates, a goal that was not reached."""
    options = parse_options()
    try:
        if options.plot:
            require_packages("matplotlib")
        if options.record and options.plot:
            write_plot(options.plot, load_record(options.record))
            return 0
        return report(options, start_ranks(options.ranks * options.teams, measure, options, command_line()))
    except (TpOverlapError, OSError, ValueError) as error:
        print(f"bench_prefill: {error}", file=sys.stderr, flush=True)
        return 1


def measure(options: Options, command: str) -> Findings:
    """One rank's part of the work; the findings are the same on every rank. command: that made the ranks."""
    with ExitStack() as stack:
        team = Team.join(options.ranks, options.device)
        stack.callback(team.world.leave)
        trials = PrefillTrials(team, options.model, options.chunk, options.state_block, max(options.lengths))
        stack.callback(trials.close)
        # As long-running servers do: a collection would walk the whole model in the middle of a prompt.
        gc.collect()
        gc.freeze()
        arms = choose_arms(options, trials)
        warm_up(trials, arms, options.chunk)
        found = []
        for length in options.lengths:
            found.append(measure_length(options, trials, arms, length))
            if options.json and team.world.rank == 0:
                keep(options.json, options, found, command)
        ours = everything(arms)
        is_whole = options.layers == SHAPES[options.shape].num_layers
        parts = device_tables(trials, arms, options.shape, max(options.lengths)) if is_whole else []
        footprints = soak(trials, ours, options.soak, 2 * options.chunk) if options.soak else None
        return Findings(found, footprints, parts)


def keep(path: Path, options: Options, prompts: list[Measured], command: str) -> None:
    """Writes the record of what there is so far: a phase behind it may fail, or be cut short."""
    found = Findings(prompts, None, [])
    lines = [*described(options, found), "The run did not come to its end."]
    write_json(path, what=WHAT, tables=tables(found), figures=figures(found), notes=lines, command=command)


def choose_arms(options: Options, trials: PrefillTrials) -> list[PrefillArm]:
    """The arms, the same ones on every rank: rank 0 measures which attention is the fastest here."""
    times = None
    if options.device == "cuda" and trials.team.world.rank == 0:
        times = trials.attention_times(max(options.lengths) // 2)
    times = trials.team.world.share(times)
    arms = prefill_arms(
        device=options.device,
        pieces=options.pieces,
        has_turing=bool(times) and "turing" in times,
        fastest=min(times, key=times.__getitem__) if times else None,
        with_peer=options.teams == 2,
    )
    chosen = [arm for arm in arms if not options.only or arm is arms[0] or arm.name in options.only]
    unknown = set(options.only) - {arm.name for arm in arms}
    if unknown:
        raise TpOverlapError(f"--only {sorted(unknown)}: the arms are {[arm.name for arm in arms]}")
    return chosen


def warm_up(trials: PrefillTrials, arms: Sequence[PrefillArm], chunk: int) -> None:
    """Compiles everything, and checks all arms on a short prompt before anything is timed."""
    prompt = trials.prompt(2 * chunk + chunk // 3)
    for arm in arms:
        trials.check_transport(arm)
        trials.timed_prefill(arm, prompt)


def settle(trials: PrefillTrials, arms: Sequence[PrefillArm], prompt: Prompt) -> None:
    """Runs the prompt's last chunks, untimed. An executor watches the first split batch of a size for collectives of
    others, which is slow, and pins its threads from the next one on. What this leaves in the cache is overwritten."""
    for arm in arms:
        for chunk in {chunk.num_tokens: chunk for chunk in prompt.chunks}.values():
            for _ in range(_UNTIMED):
                trials.timed_chunk(arm, chunk)


def measure_length(options: Options, trials: PrefillTrials, arms: list[PrefillArm], length: int) -> Measured:
    prompt = trials.prompt(length)
    peaks = {arm.name: 0 for arm in arms}
    answers = {}
    settle(trials, arms, prompt)

    def whole(arm: PrefillArm) -> float:
        seconds, peak, answer = trials.timed_prefill(arm, prompt)
        peaks[arm.name] = max(peaks[arm.name], peak)
        answers[arm.name] = answer
        return seconds

    turns = [Arm(arm.name, _checked_before, lambda arm=arm: whole(arm)) for arm in arms]  # type: ignore[misc]
    prompts = alternate(turns, options.rounds_of(length), 0, label=f"prompts of {length}")
    chunks, accounts = time_chunks(options, trials, arms, prompt)
    if options.trace and length == options.lengths[0]:
        write_trace(options.trace, trials, arms, prompt)
    context = length // options.state_block * options.state_block
    decode = decode_times(trials, everything(arms), context, options.teams == 2, options.decode_repetitions)
    return Measured(length, arms, prompts, chunks, accounts, peaks, answers, context, decode)


def _checked_before() -> None:
    """All arms were checked on a short prompt, and each whole one is as it ends."""


def time_chunks(
    options: Options, trials: PrefillTrials, arms: Sequence[PrefillArm], prompt: Prompt
) -> tuple[Comparison, dict[str, list[ChunkAccount]]]:
    """Single chunks in all arms, on the cache that the prompts have left: reading it changes nothing, and a chunk
    writes what is there already."""
    accounts: dict[str, list[ChunkAccount]] = {arm.name: [] for arm in arms}
    places = sample(prompt.chunks, options.samples)

    def turn(arm: PrefillArm) -> float:
        chunk = places[len(accounts[arm.name])]
        seconds, stats = trials.timed_chunk(arm, chunk)
        mine = (stats.compute_s, stats.communication_s, stats.exposed_s, stats.wall_s) if stats else (0.0,) * 4
        accounts[arm.name].append(ChunkAccount(*(trials.team.largest(value) for value in mine)))
        return seconds

    turns = [Arm(arm.name, _checked_before, lambda arm=arm: turn(arm)) for arm in arms]  # type: ignore[misc]
    return alternate(turns, len(places), 0, label=f"chunks of {prompt.length}"), accounts


def write_trace(path: Path, trials: PrefillTrials, arms: Sequence[PrefillArm], prompt: Prompt) -> None:
    """A Chrome trace of a chunk in the middle of the prompt, which the cache holds: serially, then with everything."""
    shown = [arms[0], everything(list(arms))]
    chunk = sample(prompt.chunks, 1)[0]
    runs = [trials.timed_chunk(arm, chunk)[1] for arm in shown]
    of_ranks = trials.team.world.gather(runs)
    if of_ranks is not None:
        ranks = [(rank, of_ranks[rank]) for rank in trials.team.ranks]
        title = f"{chunk.num_tokens} tokens behind {chunk.seq_lens[0] - chunk.num_tokens}: " + ", then ".join(
            arm.name for arm in shown
        )
        write_chrome(Timeline.from_runs(ranks, title=title), path)  # type: ignore[arg-type]


def report(options: Options, found: Findings) -> int:
    prefills = [(one, measured_by(one, found.prompts, options.chunk, options.device)) for one in found.parts]
    made = tables(found) + ([predictions(prefills)] if prefills else [])
    print_tables(made)
    lines = described(options, found)
    if not prefills:
        lines.append("Nothing was predicted: --layers has left some of the model out.")
    if options.json:
        made += [table for one, measured in prefills for table in to_record(one, measured)]
        record = write_json(options.json, what=WHAT, tables=made, figures=figures(found), notes=lines)
        print(f"\nrecord: {options.json}")
        if options.plot:
            write_plot(options.plot, record)
            print(f"plot: {options.plot}")
    not_reached = missed(found)
    for sentence in not_reached:
        print(f"goal missed: {sentence}", file=sys.stderr)
    return 1 if options.gates and not_reached else 0


def described(options: Options, found: Findings) -> list[str]:
    """What was measured, and how."""
    shape = options.model
    weights = "FP16 activations" if options.device == "cuda" else "FP32 activations"
    lines = [
        f"{options.shape}: {shape}, random NVFP4 weights, {weights}, {options.ranks} ranks, chunks of {options.chunk} "
        f"tokens, recurrent states in blocks of {options.state_block}.",
        f"Before the run: logits behind a prompt may lie {TOLERANCE:g} (relative L2) from the serial arm's, and the "
        "first token must be its token; all arms are so, or there would be no figures. A prompt's last token was "
        "chosen such that the serial arm's best logit leads clearly: rounding does not decide the token.",
        f"Prompts: whole, {', '.join(f'{n} tokens {options.rounds_of(n)} times' for n in options.lengths)}, arms in "
        f"turn. Single chunks: {options.samples}, evenly over the prompt, arms in turn; their ratios have a spread "
        "where prompts were timed once.",
        "Compute, communication and exposed communication: means over the single chunks, of the rank that has most.",
        "Peak memory: what torch had allocated on a GPU at most, model and cache included; pinned host memory and "
        "NCCL's own buffers are not in it.",
        "Decode: the whole model, its logits and the choice of a token"
        + (", as a replayed CUDA graph, 20 in a turn." if options.device == "cuda" else ", eagerly."),
        *notes(found.prompts[0]),
    ]
    if options.teams == 1 and options.device == "cuda":
        lines.append("NCCL with peer access was not compared: left out, or these GPUs do not reach each other.")
    return lines


def load_record(path: Path) -> dict[str, Any]:
    """OSError where it cannot be read, ValueError where it is no record."""
    record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    check_record(record)
    return record


def parse_options(arguments: Sequence[str] | None = None) -> Options:
    parser = argparse.ArgumentParser(description="Time the prefill of long prompts, step by step.")
    add = parser.add_argument
    add("--device", choices=("cpu", "cuda"), default="cuda", help="where the model lies (default: cuda)")
    add("--ranks", type=int, default=2, metavar="N", help="tensor-parallel ranks, one a GPU (default: 2)")
    add("--shape", choices=tuple(SHAPES), default="qwen3.8-27b", help="default: qwen3.8-27b")
    add("--layers", type=int, metavar="N", help="default: the shape's own")
    add("--chunk", type=int, default=2048, metavar="N", help="tokens of a chunk (default: 2048)")
    add("--state-block", type=int, metavar="N", help="tokens that share a recurrent state's slot (default: a chunk)")
    add("--lengths", nargs="+", type=int, default=[29_000], metavar="N", help="tokens of prompts (default: 29000)")
    add("--pieces", type=int, choices=(2, 3, 4), default=2, help="of a chunk (default: 2)")
    add("--rounds", type=int, metavar="N", help=f"whole prompts an arm (default: 3, from {_LONG} tokens on 1)")
    add("--samples", type=int, default=20, metavar="N", help="single chunks an arm (default: 20)")
    add("--decode-repetitions", type=int, default=20, metavar="N", help="turns of decode steps (default: 20)")
    add("--only", nargs="+", default=[], metavar="ARM", help="these arms, by name, and the serial one (default: all)")
    add("--no-peer", action="store_true", help="leave NCCL with peer access out")
    add("--soak", type=int, default=0, metavar="N", help="then prefill N short prompts and watch memory")
    add("--json", type=Path, metavar="FILE", help="write the record here")
    add("--plot", type=Path, metavar="FILE", help="draw the record here")
    add("--record", type=Path, metavar="FILE", help="run nothing: draw this record, for --plot")
    add("--trace", type=Path, metavar="FILE", help="write a Chrome trace of a chunk of the first length")
    add("--gates", action="store_true", help="exit with status 1 if a goal is missed")
    given = parser.parse_args(arguments)
    if given.plot is not None and given.json is None and given.record is None:
        parser.error("--plot draws a record: give --json, or --record with one that exists")
    if given.record is not None and given.plot is None:
        parser.error("--record is drawn: give --plot")
    state_block = given.state_block or given.chunk
    if given.device == "cuda" and given.record is None and torch.cuda.device_count() < given.ranks:
        parser.error(f"{given.ranks} ranks need a GPU each, and torch sees {torch.cuda.device_count()} here")
    if not 2 <= given.ranks <= 8:
        parser.error(f"--ranks {given.ranks} is not supported: give 2 to 8")
    if state_block % BLOCK_SIZE or given.chunk % state_block:
        parser.error(
            f"--chunk {given.chunk} with --state-block {state_block} is not supported: give a chunk that is a multiple "
            f"of the state block, and that a multiple of {BLOCK_SIZE}"
        )
    if min(given.lengths) < given.chunk:
        parser.error(f"--lengths {min(given.lengths)} is not supported: give at least a chunk, {given.chunk}")
    if len(set(given.lengths)) != len(given.lengths):
        parser.error("--lengths names a length twice")
    if min(given.samples, given.decode_repetitions, given.rounds or 1, given.layers or 1) < 1 or given.soak < 0:
        parser.error("--samples, --decode-repetitions, --rounds and --layers must be at least 1, --soak at least 0")
    if 0 < given.soak <= SETTLED:
        parser.error(f"--soak {given.soak} is not supported: give more than {SETTLED}, behind which growth is counted")
    for path in (given.json, given.plot, given.trace):
        if path is not None and not path.absolute().parent.is_dir():
            parser.error(f"the folder {path.parent} of {path} does not exist: make it, or give another path")
        if path is not None and path.is_dir():
            parser.error(f"{path} is a folder: give the path of a file")
    return Options(
        device=given.device,
        ranks=given.ranks,
        teams=2 if given.device == "cuda" and not given.no_peer and peer_access(given.ranks) else 1,
        shape=given.shape,
        layers=given.layers or SHAPES[given.shape].num_layers,
        chunk=given.chunk,
        state_block=state_block,
        lengths=tuple(given.lengths),
        pieces=given.pieces,
        rounds=given.rounds,
        samples=given.samples,
        decode_repetitions=given.decode_repetitions,
        only=tuple(given.only),
        soak=given.soak,
        json=given.json,
        plot=given.plot,
        record=given.record,
        trace=given.trace,
        gates=given.gates,
    )


if __name__ == "__main__":
    sys.exit(main())
