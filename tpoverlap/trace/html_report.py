"""The timeline as one page that needs nothing else: a template filled with the bars, drawn on a canvas."""

from __future__ import annotations

from typing import Any

from tpoverlap.microbatch.stats import Interval
from tpoverlap.trace.lanes import Lane, RankLanes, pack
from tpoverlap.trace.palette import EXPOSED, HANDOVER, PIECES
from tpoverlap.trace.timeline import Timeline, duration

# Drawn in this order, so that a hand-over stays visible on top of what it touches.
_DRAWING_ORDER = ("exposed", "compute", "communication", "handover")


def render_html(timeline: Timeline) -> str:
    """The page as text. Its data is JSON inside the page, with every character escaped that could end the element."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("tpoverlap.trace", package_path="."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["duration"] = duration
    return environment.get_template("timeline.html.j2").render(
        heading=timeline.heading,
        emulated=timeline.emulated,
        summaries=[timeline.summary(rank.rank) for rank in timeline.ranks],
        lines=[timeline.summary_line(rank.rank) for rank in timeline.ranks],
        pieces=[(timeline.piece_name(piece), PIECES[piece % len(PIECES)][0]) for piece in range(timeline.num_pieces)],
        kinds={interval.kind for rank in timeline.ranks for interval in rank.intervals},
        num_unrecorded=sum(rank.num_unrecorded for rank in timeline.ranks),
        colours={"exposed": EXPOSED, "handover": HANDOVER},
        data=page_data(timeline),
    )


def page_data(timeline: Timeline) -> dict[str, Any]:
    """What the page's script draws, JSON-ready. Times: microseconds since the timeline's start.

    Bars are columns (one list a field), in order of their start, a list of columns a kind: thousands of bars stay
    small and the script finds the visible ones by bisection.
    """
    origin, end = timeline.span
    window = timeline.window()
    names = sorted({interval.name for rank in timeline.ranks for interval in rank.intervals})
    return {
        "emulated": timeline.emulated,
        "end": _microseconds(end, origin),
        "window": None if window is None else [_microseconds(time_s, origin) for time_s in window],
        "names": names,
        "pieces": [
            {"name": timeline.piece_name(piece), "fill": fill, "ink": ink}
            for piece in range(timeline.num_pieces)
            for fill, ink in (PIECES[piece % len(PIECES)],)
        ],
        "ranks": [_rank_data(timeline, rank, origin, names) for rank in timeline.ranks],
    }


def _rank_data(timeline: Timeline, rank: RankLanes, origin: float, names: list[str]) -> dict[str, Any]:
    number_of = {name: number for number, name in enumerate(names)}
    return {
        "rank": rank.rank,
        "exposed": [[_microseconds(time_s, origin) for time_s in span] for span in rank.exposed],
        "runs": {run.number: {"label": run.label, "start": _microseconds(run.span[0], origin)} for run in rank.runs},
        "lanes": [
            {
                "label": timeline.lane_label(lane),
                "collectives": lane.piece is None,
                "layers": _layers(lane, origin, number_of),
            }
            for lane in rank.lanes
        ],
    }


def _layers(lane: Lane, origin: float, number_of: dict[str, int]) -> list[dict[str, Any]]:
    layers = []
    for kind in _DRAWING_ORDER:
        bars = [bar for bar in lane.bars if bar.interval.kind == kind]
        if not bars:
            continue
        intervals: list[Interval] = [bar.interval for bar in bars]
        tracks = pack(intervals)
        layers.append(
            {
                "kind": kind,
                "tracks": 1 + max(tracks),
                "track": tracks,
                "start": [_microseconds(i.start_s, origin) for i in intervals],
                "end": [_microseconds(i.end_s, origin) for i in intervals],
                "piece": [i.piece for i in intervals],
                "name": [number_of[i.name] for i in intervals],
                "bytes": [i.num_bytes for i in intervals],
                "index": [i.index for i in intervals],
                "run": [bar.run for bar in bars],
            }
        )
    return layers


def _microseconds(time_s: float, origin: float) -> float:
    return round((time_s - origin) * 1e6, 3)
