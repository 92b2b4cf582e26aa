"""What prefill.py tells: a table, findings, the generated text, and the files of the timeline."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from job_world import World
from prefill_options import Options
from prefill_passes import Pass
from prefill_setup import Found, output_files

from tpoverlap.errors import ConfigError
from tpoverlap.microbatch import RunStats
from tpoverlap.trace import Timeline, write_chrome, write_html, write_png

# Columns where the output is no terminal: wide enough that no cell is broken.
_WIDTH = 160


@dataclass(frozen=True)
class RankRecord:
    """What one rank measured in one pass."""

    prefill_runs: list[RunStats]
    decode_runs: list[RunStats]
    choice_s: float
    decode_s: float


@dataclass(frozen=True)
class PassReport:
    """One pass over all ranks. Times in seconds; those of ranks that differ are the largest."""

    name: str
    ranks: list[RankRecord]
    prefill_tokens: int
    perplexity: float
    generated: list[int]

    @property
    def prefill_s(self) -> float:
        return max(sum(run.wall_s for run in rank.prefill_runs) for rank in self.ranks)

    @property
    def prefill_rate(self) -> float:
        """Tokens a second."""
        return self.prefill_tokens / self.prefill_s

    @property
    def first_token_s(self) -> float | None:
        """From the start of the prefill to the first token, without the losses; None where none was generated."""
        return self.prefill_s + max(rank.choice_s for rank in self.ranks) if self.generated else None

    @property
    def token_s(self) -> float | None:
        """Of each token after the first; None where there is none."""
        steps = len(self.ranks[0].decode_runs)
        return max(rank.decode_s for rank in self.ranks) / steps if steps else None

    @property
    def communication_s(self) -> float:
        return max(sum(run.communication_s for run in rank.prefill_runs) for rank in self.ranks)

    @property
    def reduced_bytes(self) -> int:
        """Payload that each rank brought into the prefill's collectives."""
        return sum(run.collective_bytes for run in self.ranks[0].prefill_runs)

    @property
    def bypasses(self) -> Counter[str]:
        """Batches that ran whole, by reason; the same on every rank."""
        runs = self.ranks[0].prefill_runs + self.ranks[0].decode_runs
        return Counter(run.bypass_reason for run in runs if run.bypass_reason is not None)

    def timeline(self, title: str, emulated: bool) -> Timeline:
        runs = [(rank, record.prefill_runs) for rank, record in enumerate(self.ranks)]
        return Timeline.from_runs(runs, title=title, emulated=emulated)

    @property
    def exposed_s(self) -> float:
        timeline = self.timeline(self.name, emulated=False)
        return max(timeline.exposed_communication_s(rank) for rank in range(len(self.ranks)))


def collect(world: World, one: Pass) -> PassReport | None:
    """The pass's report on rank 0; None elsewhere."""
    ranks = world.gather(RankRecord(one.prefill_runs, one.decode_runs, one.choice_s, one.decode_s))
    if ranks is None:
        return None
    tokens = sum(run.num_tokens for run in one.prefill_runs)
    return PassReport(one.name, ranks, tokens, one.perplexity, one.generated)


def report(
    options: Options, world: World, found: Found | None, reports: Sequence[PassReport | None], served: dict[str, int]
) -> None:
    """Prints the table and the generated text, and writes the timeline's files; for rank 0."""
    mine = [one for one in reports if one is not None]
    assert found is not None  # rank 0 has it
    emulated = options.emulate_link_gbps is not None and world.size > 1
    model, ranks = found.request.model.absolute().name, f"{world.size} rank{'s' * (world.size > 1)}"
    title = f"{model}: prefill of {len(found.request.prompt)} tokens, {options.weights} weights, {ranks}"
    if emulated:
        title += f", emulated link of {options.emulate_link_gbps:g} GB/s"
    try:
        print(title)
        _print_table(mine, served, emulated)
        if mine[-1].generated:
            print(f"generated after the text:\n{found.tokenizer.decode(mine[-1].generated)}\n", flush=True)
    except OSError as error:
        raise ConfigError(f"the results cannot be printed ({error.strerror or error})") from None
    print(_write_timeline(mine, title, emulated, options.timeline, options.trace), flush=True)


def _print_table(reports: Sequence[PassReport], served: dict[str, int], emulated: bool) -> None:
    """A column a pass, and where there are two, what the second takes of the first's time."""
    from rich.console import Console
    from rich.table import Table

    mark = " (emulated)" if emulated else ""
    rows = [
        (f"prefill, tokens/s{mark}", [f"{r.prefill_rate:,.1f}" for r in reports]),
        (f"prefill, s{mark}", [f"{r.prefill_s:.2f}" for r in reports]),
        (f"first token, s{mark}", [_number(r.first_token_s, "{:.2f}") for r in reports]),
        (f"decode, ms/token{mark}", [_number(r.token_s and r.token_s * 1e3, "{:,.2f}") for r in reports]),
        (f"decode, tokens/s{mark}", [_number(r.token_s and 1 / r.token_s, "{:,.1f}") for r in reports]),
        ("perplexity", [f"{r.perplexity:.4f}" for r in reports]),
        ("reduced, MB per rank", [f"{r.reduced_bytes / 1e6:,.1f}" for r in reports]),
        (f"communication, s{mark}", [f"{r.communication_s:.2f}" for r in reports]),
        (f"exposed communication, s{mark}", [f"{r.exposed_s:.2f}" for r in reports]),
        ("pieces of a chunk", [_pieces(r) for r in reports]),
        ("ran whole because", [_counts(r.bypasses) for r in reports]),
        ("collectives served by", [_counts(served)] * len(reports)),
    ]
    if len(reports) == 2:
        ratio = reports[1].prefill_s / reports[0].prefill_s
        rows.insert(2, (f"{reports[1].name} / {reports[0].name}{mark}", ["", f"{ratio:.3f}"]))
    table = Table("", *[report.name for report in reports])
    for column in table.columns[1:]:
        column.justify = "right"
    for label, values in rows:
        table.add_row(label, *values)
    console = Console()
    (console if console.is_terminal else Console(width=_WIDTH)).print(table)


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)


def _pieces(report: PassReport) -> str:
    return ", ".join(dict.fromkeys("+".join(map(str, run.piece_tokens)) for run in report.ranks[0].prefill_runs))


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{name} ({count})" for name, count in counts.items()) or "-"


def _write_timeline(reports: Sequence[PassReport], title: str, emulated: bool, prefix: Path, trace: Path | None) -> str:
    """Writes ``prefix``.html and .png, and ``trace`` unless it is None; all passes on one time axis.

    Returns a sentence that names the files.
    """
    runs = [
        (rank, sorted((run for report in reports for run in report.ranks[rank].prefill_runs), key=_start_s))
        for rank in range(len(reports[0].ranks))
    ]
    timeline = Timeline.from_runs(runs, title=title, emulated=emulated)
    html, png = output_files(prefix, None)
    writers = {html: write_html, png: write_png}
    if trace is not None:
        writers[trace] = write_chrome
    for path, write in writers.items():
        try:
            write(timeline, path)
        except OSError as error:
            raise ConfigError(f"{path} cannot be written ({error.strerror or error}): give another path") from None
    return f"timeline: {html}, {png}" + (f"; Chrome trace: {trace}" if trace is not None else "")


def _start_s(run: RunStats) -> float:
    return run.intervals[0].start_s
