"""The timeline as a picture: the whole run above, a few of its layers below."""

from __future__ import annotations

import io
import textwrap
from collections import defaultdict
from typing import TYPE_CHECKING, Any

from tpoverlap.errors import UnsupportedError
from tpoverlap.microbatch.stats import Interval
from tpoverlap.trace.exposed import Span
from tpoverlap.trace.lanes import Lane, RankLanes, pack
from tpoverlap.trace.palette import EXPOSED, HANDOVER, ink_on_piece, piece_colour
from tpoverlap.trace.timeline import Timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

# Inches, except where a name says otherwise. Lanes are one unit of the y axis apart.
_WIDTH, _DPI = 12.0, 150
_LEFT, _RIGHT, _AXIS = 1.45, 0.2, 0.52
_DETAIL_LANE, _DETAIL_LANE_MIN, _DETAIL_TARGET = 0.34, 0.22, 6.0
_OVERVIEW_LANE, _OVERVIEW_LANE_MIN, _OVERVIEW_TARGET = 0.2, 0.06, 2.0
_TITLE_LINE, _TEXT_LINE = 0.3, 0.23
_BAR_UNITS, _EXPOSED_UNITS, _RANK_GAP_UNITS = 0.78, 0.2, 0.6
_TITLE_CHARACTERS, _LEGEND_COLUMNS = 95, 7
_INK, _FAINT, _GROUND, _WAIT = "#1f2328", "#59636e", "#f6f8fa", "#fbe3e6"
_READING = (
    "A hatched collective is hidden while another piece's solid bar runs at the same time. "
    "Red: a collective is under way and nothing computes."
)


class _TimeAxis:
    """Seconds on the intervals' clock to the panel's numbers: since the timeline's start, in a unit that suits."""

    def __init__(self, timeline: Timeline, shown: Span) -> None:
        self.origin = timeline.span[0]
        self.shown = shown
        length = shown[1] - shown[0]
        self.scale, self.unit = (1e6, "us") if length < 2e-3 else (1e3, "ms") if length < 2.0 else (1.0, "s")

    def x(self, time_s: float) -> float:
        return (time_s - self.origin) * self.scale

    def bar(self, start_s: float, end_s: float) -> tuple[float, float]:
        return self.x(start_s), (end_s - start_s) * self.scale


def render_png(timeline: Timeline) -> bytes:
    """PNG bytes, 1800 pixels wide. UnsupportedError where matplotlib is not installed."""
    buffer = io.BytesIO()
    build_figure(timeline).savefig(buffer, format="png")
    return buffer.getvalue()


def build_figure(timeline: Timeline) -> Figure:
    """The picture as a matplotlib figure on an Agg canvas; pyplot and its global state stay out of it."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UnsupportedError(
            "a PNG timeline needs matplotlib, which is not installed: pip install 'tpoverlap[demo]', or write HTML"
        ) from error

    title = textwrap.wrap(timeline.heading, _TITLE_CHARACTERS) or [""]
    legend = _legend_handles(timeline)
    legend_rows = -(-len(legend) // _LEGEND_COLUMNS)
    header = 0.2 + _TITLE_LINE * len(title) + _TEXT_LINE * (1 + len(timeline.ranks) + legend_rows) + 0.1
    units = sum(len(rank.lanes) + _RANK_GAP_UNITS for rank in timeline.ranks)
    detail = units * min(_DETAIL_LANE, max(_DETAIL_LANE_MIN, _DETAIL_TARGET / units))
    overview = units * min(_OVERVIEW_LANE, max(_OVERVIEW_LANE_MIN, _OVERVIEW_TARGET / units))
    window = timeline.window()
    total = header + detail + _AXIS + (overview + _AXIS if window else 0.0)

    figure = Figure(figsize=(_WIDTH, total), dpi=_DPI, facecolor="white")
    FigureCanvasAgg(figure)
    _draw_header(figure, timeline, title, legend, total)

    def add_axes(top: float, height: float) -> Axes:
        width = _WIDTH - _LEFT - _RIGHT
        return figure.add_axes((_LEFT / _WIDTH, (total - top - height) / total, width / _WIDTH, height / total))

    if window is None:
        _draw_panel(add_axes(header, detail), timeline, timeline.span, detailed=True)
    else:
        whole, zoomed = add_axes(header, overview), add_axes(header + overview + _AXIS, detail)
        _draw_panel(whole, timeline, timeline.span, detailed=False)
        _draw_panel(zoomed, timeline, window, detailed=True)
        _connect(figure, whole, zoomed, timeline, window)
    return figure


def _draw_header(figure: Figure, timeline: Timeline, title: list[str], legend: list[Patch], total: float) -> None:
    def write(inches_from_top: float, text: str, **style: Any) -> None:
        figure.text(0.2 / _WIDTH, 1 - inches_from_top / total, text, va="top", parse_math=False, **style)

    position = 0.14
    for line in title:
        write(position, line, fontsize=15, fontweight="bold", color=_INK)
        position += _TITLE_LINE
    write(position, _READING, fontsize=10.5, color=_FAINT)
    for rank in timeline.ranks:
        position += _TEXT_LINE
        write(position, timeline.summary_line(rank.rank), fontsize=10.5, color=_INK)
    figure.legend(
        handles=legend,
        loc="upper left",
        bbox_to_anchor=(0.12 / _WIDTH, 1 - (position + _TEXT_LINE) / total),
        ncols=_LEGEND_COLUMNS,
        fontsize=9.5,
        frameon=False,
        handlelength=1.5,
        columnspacing=1.1,
        handletextpad=0.5,
        borderpad=0.2,
    )


def _legend_handles(timeline: Timeline) -> list[Patch]:
    from matplotlib.patches import Patch

    handles = []
    kinds = {(i.kind, i.piece) for rank in timeline.ranks for i in rank.intervals}
    for piece in range(timeline.num_pieces):
        colour = piece_colour(piece)
        handles.append(Patch(facecolor=colour, label=f"{timeline.piece_name(piece)} computes"))
        if ("communication", piece) in kinds:
            handles.append(Patch(label=f"collective of {timeline.piece_name(piece)}", **_hatched(colour)))
    if any(kind == "exposed" for kind, _ in kinds):
        handles.append(Patch(facecolor=_WAIT, edgecolor=EXPOSED, label="waits for its collective"))
    if any(rank.exposed for rank in timeline.ranks):
        handles.append(Patch(facecolor=EXPOSED, label="exposed communication"))
    if any(kind == "handover" for kind, _ in kinds):
        handles.append(Patch(facecolor=HANDOVER, label="hand-over"))
    return handles


def _connect(figure: Figure, whole: Axes, zoomed: Axes, timeline: Timeline, window: Span) -> None:
    """Marks in the overview what the panel below it shows."""
    from matplotlib.patches import ConnectionPatch

    axis = _TimeAxis(timeline, timeline.span)
    low, high = (axis.x(time_s) for time_s in window)
    whole.axvspan(low, high, facecolor=_INK, alpha=0.12, edgecolor="none", zorder=7)
    for overview_x, panel_x in ((low, 0.0), (high, 1.0)):
        whole.axvline(overview_x, color=_INK, linewidth=0.8, zorder=8)
        line = ConnectionPatch(
            (overview_x, 0.0),
            (panel_x, 1.0),
            coordsA=whole.get_xaxis_transform(),
            coordsB=zoomed.transAxes,
            color=_INK,
            linewidth=0.8,
            linestyle=(0, (4, 3)),
        )
        figure.add_artist(line)


def _draw_panel(axes: Axes, timeline: Timeline, shown: Span, *, detailed: bool) -> None:
    axis = _TimeAxis(timeline, shown)
    axes.set_xlim(axis.x(shown[0]), axis.x(shown[1]))
    ticks: list[tuple[float, str]] = []
    top = 0.0
    for rank in timeline.ranks:
        height = len(rank.lanes)
        axes.axhspan(top, top + height, color=_GROUND, linewidth=0, zorder=0)
        _draw_exposed(axes, axis, rank, top)
        for number, lane in enumerate(rank.lanes):
            row = top + 0.5 + number
            _draw_lane(axes, axis, lane, row, detailed)
            if detailed:
                ticks.append((row, timeline.lane_label(lane)))
        place: dict[str, Any] = {"x": -0.012, "ha": "right"}
        if detailed:
            place = {"x": -0.092, "ha": "center", "rotation": 90}
        axes.text(
            y=top + height / 2,
            s=f"rank {rank.rank}",
            transform=axes.get_yaxis_transform(),
            fontsize=11 if detailed else 10,
            fontweight="bold",
            color=_INK,
            va="center",
            **place,
        )
        top += height + _RANK_GAP_UNITS
    axes.set_ylim(top - _RANK_GAP_UNITS + 0.1, -0.1)
    axes.set_yticks([row for row, _ in ticks], [label for _, label in ticks])
    axes.tick_params(axis="y", length=0, labelsize=10, labelcolor=_INK)
    axes.tick_params(axis="x", labelsize=9.5, labelcolor=_FAINT, color=_FAINT)
    axes.ticklabel_format(axis="x", useOffset=False, style="plain")
    axes.set_xlabel(f"time since the first start, {axis.unit}", fontsize=9.5, color=_FAINT, labelpad=2)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(_FAINT)


def _draw_exposed(axes: Axes, axis: _TimeAxis, rank: RankLanes, top: float) -> None:
    """A red strip under the collectives, and a faint band through all lanes, where nothing hides them."""
    spans = [axis.bar(start, end) for start, end in rank.exposed]
    height = len(rank.lanes)
    axes.broken_barh(spans, (top, height), facecolor=EXPOSED, alpha=0.1, linewidth=0, zorder=1)
    axes.broken_barh(spans, (top + height - _EXPOSED_UNITS, _EXPOSED_UNITS), facecolor=EXPOSED, linewidth=0, zorder=5)


def _draw_lane(axes: Axes, axis: _TimeAxis, lane: Lane, row: float, detailed: bool) -> None:
    first, last = axis.shown
    visible = [b.interval for b in lane.bars if b.interval.end_s >= first and b.interval.start_s <= last]
    tracks = pack(visible) if lane.piece is None else [0] * len(visible)
    height = _BAR_UNITS / (1 + max(tracks, default=0))
    groups: dict[tuple[str, int, int], list[tuple[float, float]]] = defaultdict(list)
    for interval, track in zip(visible, tracks, strict=True):
        groups[interval.kind, interval.piece, track].append(axis.bar(interval.start_s, interval.end_s))
        if detailed and interval.kind != "handover":
            label = "wait" if interval.kind == "exposed" else interval.name
            bottom = row - _BAR_UNITS / 2 + track * height
            _label_bar(axes, axis, label, interval, bottom + height / 2)
    for (kind, piece, track), spans in groups.items():
        bottom = row - _BAR_UNITS / 2 + track * height
        colour = piece_colour(piece)
        if kind == "communication":
            axes.broken_barh(spans, (bottom, height), zorder=3, **(_hatched(colour) if detailed else _tinted(colour)))
        elif kind == "compute":
            width = 0.4 if detailed else 0.0
            axes.broken_barh(spans, (bottom, height), facecolor=colour, edgecolor="white", linewidth=width, zorder=3)
        elif kind == "exposed":
            edge = {"edgecolor": EXPOSED, "linewidth": 0.9} if detailed else {"linewidth": 0}
            axes.broken_barh(spans, (bottom, height), facecolor=_WAIT, zorder=2, **edge)
        else:
            thin = height * 0.35
            axes.broken_barh(spans, (bottom + height - thin, thin), facecolor=HANDOVER, linewidth=0, zorder=4)


def _label_bar(axes: Axes, axis: _TimeAxis, label: str, interval: Interval, middle: float) -> None:
    """The name inside the bar's visible part, where it fits; hatching is kept away from the letters."""
    first, last = axis.shown
    start, end = max(interval.start_s, first), min(interval.end_s, last)
    inches = (end - start) / (last - first) * (_WIDTH - _LEFT - _RIGHT)
    if inches < 0.078 * len(label) + 0.08:
        return
    style: dict[str, Any] = {"color": ink_on_piece(interval.piece), "fontweight": "bold"}
    if interval.kind == "communication":
        style = {"color": _INK, "bbox": {"facecolor": "white", "edgecolor": "none", "pad": 1.0}}
    elif interval.kind == "exposed":
        style = {"color": EXPOSED}
    x = axis.x((start + end) / 2)
    axes.text(x, middle, label, ha="center", va="center", fontsize=9, zorder=6, parse_math=False, **style)


def _hatched(colour: str) -> dict[str, Any]:
    return {"facecolor": "white", "edgecolor": colour, "hatch": "//////", "linewidth": 0.9}


def _tinted(colour: str) -> dict[str, Any]:
    return {"facecolor": colour, "alpha": 0.5, "linewidth": 0}
