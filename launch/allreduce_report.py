"""Tables, figures and the plot of bench_allreduce.py."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from allreduce_contest import ExtraMeasurement, Measurement, Ratio

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_UNITS = (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10))


def size_name(num_bytes: int) -> str:
    """1536 -> "1.5 KiB"."""
    for unit, scale in _UNITS:
        if num_bytes >= scale:
            return f"{num_bytes / scale:g} {unit}"
    return f"{num_bytes} B"


def tables(measurements: Sequence[Measurement], extras: Sequence[ExtraMeasurement] = ()) -> list[dict[str, Any]]:
    """A table for each number of ranks, a row for each payload; then one for each extra, a row for each arm."""
    of_payloads = [
        _table(f"{ranks} ranks", [one for one in measurements if one.ranks == ranks])
        for ranks in dict.fromkeys(one.ranks for one in measurements)
    ]
    return of_payloads + [_extra_table(extra) for extra in extras]


def figures(measurements: Iterable[ExtraMeasurement]) -> dict[str, float]:
    """Medians of all ratios, by ranks and payload or title."""
    return {
        f"{_key(ratio.ours)}_over_{_key(ratio.against)}_{one.ranks}_ranks_{_key(one.title)}": round(
            one.ratio(ratio).median, 4
        )
        for one in measurements
        for ratio in one.ratios
    }


def missed(measurements: Iterable[ExtraMeasurement]) -> list[str]:
    """A sentence for each goal that was not reached."""
    return [
        f"{one.ranks} ranks, {one.title}: {ratio.ours} / {ratio.against} is "
        f"{one.ratio(ratio).median:.3f}, the goal is {ratio.goal:g}"
        for one in measurements
        for ratio in one.missed()
    ]


def print_tables(tables_: Iterable[dict[str, Any]]) -> None:
    for table in tables_:
        cells = [["-" if cell is None else str(cell) for cell in row] for row in (table["columns"], *table["rows"])]
        widths = [max(len(row[i]) for row in cells) for i in range(len(cells[0]))]
        print(f"\n{table['title']}")
        for row in cells:
            print("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)))


def write_plot(path: Path, measurements: Sequence[Measurement], title: str) -> None:
    """Time (with its 10th to 90th percentile) and achieved speed over the payload, a column for each number of ranks.

    The file's suffix says the format. OSError where it cannot be written, ValueError for an unknown suffix.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    columns = list(dict.fromkeys(one.ranks for one in measurements))
    figure = Figure(figsize=(4.4 * len(columns) + 0.6, 7.2), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(2, len(columns), squeeze=False, sharex=True, sharey="row")
    for column, ranks in enumerate(columns):
        of_ranks = [one for one in measurements if one.ranks == ranks]
        _draw_arms(axes[0][column], axes[1][column], of_ranks)
        axes[0][column].set_title(f"{ranks} ranks")
        axes[1][column].set_xlabel("payload of each rank")
    axes[0][0].set_ylabel("time of an all-reduce, µs")
    axes[1][0].set_ylabel("payload / time, GB/s")
    axes[0][0].legend(frameon=False)
    figure.suptitle(title)
    figure.savefig(path, dpi=144)


def _table(title: str, measurements: Sequence[Measurement]) -> dict[str, Any]:
    arms = list(dict.fromkeys(arm for one in measurements for arm in one.slowest.turns))
    ratios = list(dict.fromkeys((ratio.ours, ratio.against) for one in measurements for ratio in one.ratios))
    columns = ["payload", *arms, *(f"{ours} / {against}" for ours, against in ratios)]
    columns += [f"{arm}, GB/s" for arm in arms]
    rows = []
    for one in measurements:
        known = {(ratio.ours, ratio.against): ratio for ratio in one.ratios}
        row: list[str | float | None] = [one.title]
        row += [one.slowest.time(arm).as_time() if arm in one.slowest.turns else None for arm in arms]
        row += [_ratio(one, known[names]) if names in known else None for names in ratios]
        row += [round(one.gb_per_s(arm), 3) if arm in one.slowest.turns else None for arm in arms]
        rows.append(row)
    return {"title": title, "columns": columns, "rows": rows}


def _ratio(one: ExtraMeasurement, ratio: Ratio) -> str:
    goal = "" if ratio.goal is None else f", goal {ratio.goal:g}"
    return one.ratio(ratio).as_ratio() + goal


def _extra_table(extra: ExtraMeasurement) -> dict[str, Any]:
    rows = []
    for arm in extra.slowest.turns:
        ratios = [f"{_ratio(extra, ratio)} (over {ratio.against})" for ratio in extra.ratios if ratio.ours == arm]
        rows.append([arm, extra.slowest.time(arm).as_time(), ", ".join(ratios) or None])
    return {"title": f"{extra.ranks} ranks: {extra.title}", "columns": ["arm", "time", "ratio"], "rows": rows}


def _draw_arms(times: Axes, speeds: Axes, measurements: Sequence[Measurement]) -> None:
    for arm in dict.fromkeys(arm for one in measurements for arm in one.slowest.turns):
        of_arm = [one for one in measurements if arm in one.slowest.turns]
        sizes = [one.num_bytes for one in of_arm]
        spreads = [one.slowest.time(arm) for one in of_arm]
        medians = [spread.median * 1e6 for spread in spreads]
        around = [
            [(spread.median - spread.low) * 1e6 for spread in spreads],
            [(spread.high - spread.median) * 1e6 for spread in spreads],
        ]
        style = "--" if any(arm in one.floors for one in of_arm) else "-"
        times.errorbar(sizes, medians, around, fmt=f"o{style}", markersize=3.5, capsize=2.5, linewidth=1.4, label=arm)
        gb_per_s = [one.gb_per_s(arm) for one in of_arm]
        speeds.plot(sizes, gb_per_s, f"o{style}", markersize=3.5, linewidth=1.4)
    sizes = [one.num_bytes for one in measurements]
    for axes in (times, speeds):
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.grid(which="major", alpha=0.3)
        axes.set_xticks(sizes, [size_name(size) for size in sizes], rotation=45, ha="right", fontsize=8)
        axes.minorticks_off()


def _key(name: str) -> str:
    return "_".join("".join(c if c.isalnum() or c == "." else " " for c in name).split())
