"""Chrome trace event JSON (the "Trace Event Format"), which Perfetto and chrome://tracing open."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from tpoverlap.trace.lanes import Bar, pack
from tpoverlap.trace.timeline import Timeline

# Thread numbers of a lane's tracks: overlapping events of one thread must nest, so each further track is a thread.
_TRACKS_PER_LANE = 1000


def render_chrome(timeline: Timeline) -> str:
    """The trace as JSON text: a process a rank, a thread a piece and one for the collectives; microseconds.

    Time 0 is the first start of any rank. Hand-overs and waits are events of their piece's thread.
    """
    origin = timeline.span[0]
    link = " (emulated link)" if timeline.emulated else ""
    events: list[dict[str, Any]] = []
    for rank in timeline.ranks:
        events.append(_metadata(rank.rank, 0, "process_name", {"name": f"rank {rank.rank}{link}"}))
        events.append(_metadata(rank.rank, 0, "process_sort_index", {"sort_index": rank.rank}))
        for position, lane in enumerate(rank.lanes):
            events.extend(
                _lane_events(rank.rank, position * _TRACKS_PER_LANE, timeline.lane_label(lane), lane.bars, origin)
            )
    other = {
        "title": timeline.heading,
        "emulated": timeline.emulated,
        "summary": [timeline.summary_line(rank.rank) for rank in timeline.ranks],
    }
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms", "otherData": other}, allow_nan=False)


def _lane_events(
    process: int, first_thread: int, label: str, bars: Sequence[Bar], origin: float
) -> list[dict[str, Any]]:
    tracks = pack([bar.interval for bar in bars])
    events = []
    for track in range(max(tracks, default=0) + 1):
        name = label if track == 0 else f"{label} ({track + 1})"
        events.append(_metadata(process, first_thread + track, "thread_name", {"name": name}))
        events.append(
            _metadata(process, first_thread + track, "thread_sort_index", {"sort_index": first_thread + track})
        )
    for bar, track in zip(bars, tracks, strict=True):
        interval = bar.interval
        # Both ends are rounded, not the length: neighbours that touch still touch, and never overlap.
        start, end = round((interval.start_s - origin) * 1e6, 3), round((interval.end_s - origin) * 1e6, 3)
        events.append(
            {
                "name": interval.name,
                "cat": interval.kind,
                "ph": "X",
                "ts": start,
                "dur": round(end - start, 3),
                "pid": process,
                "tid": first_thread + track,
                "args": {
                    "kind": interval.kind,
                    "piece": interval.piece,
                    "index": interval.index,
                    "bytes": interval.num_bytes,
                    "run": bar.run,
                },
            }
        )
    return events


def _metadata(process: int, thread: int, name: str, args: dict[str, Any]) -> dict[str, Any]:
    return {"name": name, "ph": "M", "pid": process, "tid": thread, "args": args}
