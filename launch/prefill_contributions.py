"""Tables, figures, goals and the plot of bench_prefill.py."""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench_common import Comparison
from predict_records import Measured as MeasuredPrefill
from predict_records import predicted_s
from predict_tables import DeviceTables
from prefill_arms import BEST_PEER_SERIAL, BEST_SERIAL, PEER_SERIAL, SERIAL, PrefillArm, everything, transport_step
from prefill_soak import LENGTHS, SETTLED, Footprint, growth
from prefill_trials import Answer

WHAT = "prefill"
_MIB = 1 << 20
_COLUMNS = [
    "arm",
    "prefill",
    "/ serial",
    "/ step before",
    "exposed, ms a chunk",
    "communication, ms a chunk",
    "compute, ms a chunk",
    "chunk, ms",
    "peak memory over serial, MiB",
    "first token",
    "logits' distance",
]
# A soak's growth that is none: the allocator's smallest segment, and pages that the process touches late.
_GROWTH_GOAL = Footprint(allocated=_MIB, reserved=2 * _MIB, resident=16 * _MIB)


@dataclass(frozen=True)
class ChunkAccount:
    """Seconds of one chunk on the slowest rank: computing, communicating, waiting for communication, all."""

    compute_s: float
    communication_s: float
    exposed_s: float
    wall_s: float


@dataclass(frozen=True)
class Measured:
    """What one length of prompt gave. whole: seconds of prompts; chunks: of single chunks, evenly over the prompt, with
    accounts; peak_bytes, answers: of the prompts, by arm; decode: seconds of a token behind ``context`` tokens."""

    length: int
    arms: list[PrefillArm]
    whole: Comparison
    chunks: Comparison
    accounts: dict[str, list[ChunkAccount]]
    peak_bytes: dict[str, int]
    answers: dict[str, Answer]
    context: int
    decode: Comparison

    def typical(self, arm: str) -> ChunkAccount:
        """The mean over the sampled chunks, which stand for the prompt."""
        return ChunkAccount(
            *(
                statistics.fmean(getattr(account, field) for account in self.accounts[arm])
                for field in ("compute_s", "communication_s", "exposed_s", "wall_s")
            )
        )

    def ratios(self) -> Iterator[tuple[str, str, float | None]]:
        """(arm, the one that it is compared with, goal)."""
        steps = [arm.name for arm in self.arms if arm.is_step]
        others = {arm.name for arm in self.arms} - set(steps)
        best = everything(self.arms).name
        # The goals are those of GPUs.
        has_goals = best != SERIAL and transport_step("cuda") in steps
        for step in steps[1:]:
            yield step, SERIAL, (0.62 if self.length < 100_000 else 0.75) if step == best and has_goals else None
        if PEER_SERIAL in others:
            yield best, PEER_SERIAL, 1.05 if has_goals else None
        for other in (BEST_SERIAL, BEST_PEER_SERIAL):
            if other in others:
                yield steps[-1], other, None


@dataclass(frozen=True)
class Findings:
    """All that was measured. soak: None where it was not asked for. parts: tables for each choice of kernels; empty
    where the model was not whole."""

    prompts: list[Measured]
    soak: list[Footprint] | None
    parts: list[DeviceTables] = field(default_factory=list)


def tables(found: Findings) -> list[dict[str, Any]]:
    made = [table for one in found.prompts for table in (_contributions(one), _ratios(one), _decode(one))]
    return made + ([_soak(found.soak)] if found.soak else [])


def predictions(prefills: Iterable[tuple[DeviceTables, Sequence[MeasuredPrefill]]]) -> dict[str, Any]:
    """Prefills beside what the tables of their kernels predict for them."""
    rows: list[list[str | int | float | None]] = []
    for kernels, measured in prefills:
        for one in measured:
            seconds = predicted_s(kernels, one)
            error = f"{seconds / one.seconds - 1:+.1%}"
            rows.append([kernels.name, one.transport, one.pieces, one.tokens, one.seconds, seconds, error])
    columns = ["kernels", "transport", "pieces", "tokens", "measured, s", "predicted, s", "error"]
    return {"title": "Predicted from parts timed alone", "columns": columns, "rows": rows}


def figures(found: Findings) -> dict[str, float | int | str]:
    made: dict[str, float | int | str] = {}
    for one in found.prompts:
        length = _short(one.length)
        for arm, over, _ in one.ratios():
            made[f"{_key(arm)}_over_{_key(over)}_{length}"] = round(one.whole.ratio(arm, over).median, 4)
            made[f"{_key(arm)}_over_{_key(over)}_{length}_chunks"] = round(one.chunks.ratio(arm, over).median, 4)
        for arm in one.whole.turns:
            made[f"{_key(arm)}_{length}_s"] = round(one.whole.time(arm).median, 4)
        for name in one.decode.turns:
            made[f"decode_{_key(name)}_{length}_ms"] = round(one.decode.time(name).median * 1e3, 4)
        extra = one.peak_bytes[everything(one.arms).name] - one.peak_bytes[SERIAL]
        made[f"peak_memory_difference_{length}_mib"] = round(extra / _MIB, 1)
    if found.soak and len(found.soak) > SETTLED:
        grown = growth(found.soak)
        made |= {f"soak_growth_{name}_mib": round(value / _MIB, 2) for name, value in vars(grown).items()}
    return made


def missed(found: Findings) -> list[str]:
    """A sentence for each goal that was not reached, with what bounds the time."""
    sentences = []
    for one in found.prompts:
        for arm, over, goal in one.ratios():
            ratio = one.whole.ratio(arm, over).median
            if goal is not None and ratio > goal:
                sentences.append(
                    f"{one.length} tokens: {arm} / {over} is {ratio:.3f}, the goal is {goal:g}; {bound_by(one, arm)}"
                )
        baseline, ours = list(one.decode.turns)[:2]
        ratio = one.decode.ratio(ours, baseline).median
        if ratio > 1.0:
            sentences.append(f"decode behind {one.context}: {ours} / {baseline} is {ratio:.3f}, the goal is 1")
    if found.soak and len(found.soak) > SETTLED:
        for name, grown in vars(growth(found.soak)).items():
            if grown > getattr(_GROWTH_GOAL, name):
                sentences.append(f"soak: {name} memory grew by {grown / _MIB:.1f} MiB over {len(found.soak)} prompts")
    return sentences


def bound_by(one: Measured, arm: str) -> str:
    """Which resource a chunk's time goes to."""
    account = one.typical(arm)
    compute, communication = account.compute_s / account.wall_s, account.communication_s / account.wall_s
    shares = f"compute takes {compute:.0%} of a chunk's time, communication {communication:.0%}"
    if max(compute, communication) < 0.9:
        return f"{shares}: neither is full, the rest is waiting of one for the other, or for the host"
    return f"{shares}: {'compute' if compute >= communication else 'communication'} bounds it"


def notes(one: Measured) -> list[str]:
    steps = [arm for arm in one.arms if arm.is_step]
    spelled = [
        f"{arm.name}: {arm.pieces} piece{'s' * (arm.pieces > 1)}, attention {arm.backend}"
        + (f" in {arm.num_splits} part" if arm.num_splits else "")
        + (f", dequantization tile {arm.tile}" if arm.tile else ", the device's own dequantization tile")
        for arm in one.arms
    ]
    return [
        f"Steps add up: each has all that the ones before it have, from {steps[0].name!r} on.",
        *spelled,
    ]


def write_plot(path: Path, record: Mapping[str, Any]) -> None:
    """Draws the prefill time of each arm over the serial one's, a group of bars a length, from a record of a run.

    OSError where the file cannot be written; ValueError for a record of another benchmark.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    contributions = [table for table in record["tables"] if table["columns"] == _COLUMNS]
    if record["what"] != WHAT or not contributions:
        raise ValueError(f"the record is of {record['what']!r}, not of {WHAT!r}, or has no prompts")
    figure = Figure(figsize=(2.2 + 3.6 * len(contributions), 4.8), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, len(contributions), squeeze=False, sharey=True)[0]
    for axis, table in zip(axes, contributions, strict=True):
        names = [row[0] for row in table["rows"]]
        spreads = [[float(number) for number in re.findall(r"[\d.]+", row[2])] for row in table["rows"]]
        medians = [median for median, _, _ in spreads]
        around = [[median - low for median, low, _ in spreads], [high - median for median, _, high in spreads]]
        # A step's ratio to the one before it is given; the other arms are there for comparison.
        colors = ["#b0b0b0" if row[3] is None else "#2f6f8f" for row in table["rows"]]
        bars = axis.bar(range(len(names)), medians, yerr=around, color=colors, capsize=2.5)
        axis.bar_label(bars, [row[1].split(" (")[0] for row in table["rows"]], fontsize=7, padding=2)
        axis.set_xticks(range(len(names)), names, rotation=40, ha="right", fontsize=8)
        axis.set_title(table["title"])
        axis.grid(axis="y", alpha=0.3)
    axes[0].set_ylabel("prefill time / serial")
    gpus = record["hardware"]["gpus"]
    machine = f"{len(gpus)} x {gpus[0]}" if gpus else record["hardware"]["cpu"]
    figure.suptitle(f"Prefill, {machine}, {record['date']}")
    figure.savefig(path, dpi=144)


def _contributions(one: Measured) -> dict[str, Any]:
    rows, before = [], SERIAL
    for arm in one.arms:
        account, answer = one.typical(arm.name), one.answers[arm.name]
        row: list[str | int | float | None] = [arm.name, one.whole.time(arm.name).as_time()]
        row.append(one.whole.ratio(arm.name, SERIAL).as_ratio())
        row.append(one.whole.ratio(arm.name, before).as_ratio() if arm.is_step else None)
        parts = (account.exposed_s, account.communication_s, account.compute_s, account.wall_s)
        row += [round(seconds * 1e3, 2) for seconds in parts]
        row.append(round((one.peak_bytes[arm.name] - one.peak_bytes[SERIAL]) / _MIB, 1))
        rows.append([*row, answer.token, float(f"{answer.distance:.2e}")])
        before = arm.name if arm.is_step else before
    return {"title": f"{one.length} tokens", "columns": _COLUMNS, "rows": rows}


def _ratios(one: Measured) -> dict[str, Any]:
    rows = [
        [arm, over, *(times.ratio(arm, over).as_ratio() for times in (one.whole, one.chunks)), goal, bound_by(one, arm)]
        for arm, over, goal in one.ratios()
    ]
    columns = ["arm", "over", "prompts", "single chunks", "goal", "where a chunk's time goes"]
    return {"title": f"{one.length} tokens: ratios", "columns": columns, "rows": rows}


def _decode(one: Measured) -> dict[str, Any]:
    first = next(iter(one.decode.turns))
    rows = [
        [name, one.decode.time(name).as_time(), one.decode.ratio(name, first).as_ratio()] for name in one.decode.turns
    ]
    return {
        "title": f"Decode of a token behind {one.context} tokens",
        "columns": ["all-reduces", "time of a token", f"/ {first}"],
        "rows": rows,
    }


def _soak(found: Sequence[Footprint]) -> dict[str, Any]:
    shown = [i for i in range(len(found)) if i == 0 or (i + 1) % LENGTHS == 0 or i == len(found) - 1]
    columns = ["prompts", "allocated, MiB", "reserved, MiB", "resident, MiB"]
    rows = [[i + 1, *(round(value / _MIB, 1) for value in vars(found[i]).values())] for i in shown]
    return {"title": "Memory over short prompts", "columns": columns, "rows": rows}


def _short(length: int) -> str:
    return f"{length // 1000}k" if length >= 1000 else str(length)


def _key(name: str) -> str:
    return "_".join("".join(c.lower() if c.isalnum() else " " for c in name).split())
