"""The three reports: what a reader, a browser and Perfetto get to see."""

from __future__ import annotations

import io
import itertools
import json
import re
import sys
from collections import defaultdict
from html.parser import HTMLParser

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from two_rank_example import two_rank_example

from tpoverlap.errors import UnsupportedError
from tpoverlap.microbatch.stats import Interval, RunStats
from tpoverlap.trace import Timeline
from tpoverlap.trace.chrome import render_chrome
from tpoverlap.trace.html_report import page_data, render_html
from tpoverlap.trace.palette import EXPOSED, PIECES
from tpoverlap.trace.png_report import build_figure, render_png

HOSTILE = "</script><script>alert('x')</script>&<b>"


class Page(HTMLParser):
    """Elements, ids and texts of a page as a browser would split them."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.texts: dict[str, list[str]] = defaultdict(list)
        self._open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self._open.append(tag)
        for name, value in attrs:
            if name == "id":
                self.ids.add(value or "")
            if name in ("src", "href", "srcset", "action"):
                self.links.append(value or "")

    def handle_data(self, data: str) -> None:
        if self._open:
            self.texts[self._open[-1]].append(data)

    def handle_endtag(self, tag: str) -> None:
        while self._open and self._open.pop() != tag:
            pass


@pytest.fixture(scope="module")
def timeline() -> Timeline:
    return Timeline.from_runs(two_rank_example(11, num_layers=12), title="example", emulated=True)


def test_page_is_self_contained(timeline: Timeline) -> None:
    text = render_html(timeline)
    page = Page(text)
    assert page.links == []
    assert not re.search(r"https?:|//\w+\.\w|@import|url\(|\bfetch\(|XMLHttpRequest|\bimport\b", text)
    assert "link" not in page.tags
    assert set(re.findall(r'getElementById\("(\w+)"\)', text)) <= page.ids


def test_page_holds_every_bar(timeline: Timeline) -> None:
    data = json.loads(Page(render_html(timeline)).texts["script"][0])
    assert data == json.loads(json.dumps(page_data(timeline)))
    origin = timeline.span[0]
    for rank, shown in zip(timeline.ranks, data["ranks"], strict=True):
        bars = []
        for lane in shown["lanes"]:
            for layer in lane["layers"]:
                assert layer["start"] == sorted(layer["start"])
                columns = [layer[c] for c in ("piece", "name", "start", "end", "bytes", "index")]
                bars += [(layer["kind"], *row) for row in zip(*columns, strict=True)]
        expected = [
            (i.kind, i.piece, data["names"].index(i.name), *times_us(i, origin), i.num_bytes, i.index)
            for i in rank.intervals
        ]
        assert sorted(bars) == sorted(expected)
        exposed_us = sum(end - start for start, end in shown["exposed"])
        assert exposed_us == pytest.approx(timeline.exposed_communication_s(rank.rank) * 1e6, abs=1)


def times_us(interval: Interval, origin: float) -> tuple[float, float]:
    return round((interval.start_s - origin) * 1e6, 3), round((interval.end_s - origin) * 1e6, 3)


def test_page_says_emulated_where_it_is(timeline: Timeline) -> None:
    page = Page(render_html(timeline))
    assert page.texts["title"] == page.texts["h1"] == ["example (emulated link)"]
    assert sum("(emulated link)" in text for text in page.texts["th"]) == 2
    plain = Timeline.from_runs(two_rank_example(11, num_layers=1), title="example")
    without_script = re.sub(r"<script.*?</script>", "", render_html(plain), flags=re.S)
    assert "emulated" not in without_script
    assert page_data(plain)["emulated"] is False


def test_names_and_titles_cannot_break_out_of_the_page() -> None:
    run = RunStats(4, (4,), HOSTILE, intervals=[Interval("compute", 0, HOSTILE, 0.0, 1.0)])
    page = Page(render_html(Timeline.from_runs([(0, [run])], title=HOSTILE)))
    assert page.tags.count("script") == 2
    assert page.texts["h1"] == [HOSTILE]
    data = json.loads(page.texts["script"][0])
    assert data["names"] == [HOSTILE]


def test_page_counts_runs_that_left_no_intervals() -> None:
    runs = [(rank, [*stats, RunStats(1, (1,))]) for rank, stats in two_rank_example(1, num_layers=1)]
    assert "2 runs left no intervals" in render_html(Timeline.from_runs(runs, title="t"))


def pixels(png: bytes) -> np.ndarray:
    from matplotlib.image import imread

    return np.rint(imread(io.BytesIO(png))[..., :3] * 255).astype(int)


def count(image: np.ndarray, colour: str) -> int:
    wanted = [int(colour[i : i + 2], 16) for i in (1, 3, 5)]
    return int((np.abs(image - wanted).max(axis=-1) <= 2).sum())


def test_picture_shows_pieces_and_exposed_communication(timeline: Timeline) -> None:
    image = pixels(render_png(timeline))
    assert image.shape[1] == 1800
    assert count(image, PIECES[0][0]) > 10_000
    assert count(image, PIECES[1][0]) > 10_000
    assert count(image, EXPOSED) > 1_000


def test_picture_of_hidden_communication_has_no_red() -> None:
    run = RunStats(
        8,
        (4, 4),
        intervals=[
            Interval("compute", 0, "mlp", 0.0, 1.0),
            Interval("communication", 0, "all_reduce", 1.0, 2.0),
            Interval("compute", 1, "mlp", 1.0, 2.0),
        ],
    )
    assert count(pixels(render_png(Timeline.from_runs([(0, [run])], title="t"))), EXPOSED) == 0


def test_picture_says_emulated_and_zooms_into_long_runs(timeline: Timeline) -> None:
    figure = build_figure(timeline)
    texts = [text.get_text() for text in figure.texts]
    assert texts[0] == "example (emulated link)"
    assert [timeline.summary_line(rank) for rank in (0, 1)] == texts[-2:]
    whole, zoomed = figure.axes
    origin, end = timeline.span
    window = timeline.window()
    assert window is not None
    assert whole.get_xlim() == pytest.approx((0.0, (end - origin) * 1e3))
    assert zoomed.get_xlim() == pytest.approx([(time_s - origin) * 1e3 for time_s in window])
    short = Timeline.from_runs(two_rank_example(2, num_layers=2, num_chunks=0), title="t")
    assert len(build_figure(short).axes) == 1


def test_title_text_is_not_read_as_markup() -> None:
    title = "price $x^{2$ of a long title, " * 8
    timeline = Timeline.from_runs(two_rank_example(2, num_layers=1), title=title)
    texts = [text.get_text() for text in build_figure(timeline).texts]
    assert " ".join(texts).startswith(title.strip())
    assert render_png(timeline).startswith(b"\x89PNG")


def test_picture_without_matplotlib_says_what_to_install(timeline: Timeline, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.backends.backend_agg", None)
    with pytest.raises(UnsupportedError, match=r"needs matplotlib.*tpoverlap\[demo\]"):
        render_png(timeline)


def events_of(timeline: Timeline) -> tuple[list[dict], list[dict], dict]:
    trace = json.loads(render_chrome(timeline))
    events = trace["traceEvents"]
    return [e for e in events if e["ph"] == "M"], [e for e in events if e["ph"] == "X"], trace


def test_chrome_trace_has_a_process_a_rank_and_a_thread_a_lane(timeline: Timeline) -> None:
    metadata, events, trace = events_of(timeline)
    processes = {e["pid"]: e["args"]["name"] for e in metadata if e["name"] == "process_name"}
    assert processes == {0: "rank 0 (emulated link)", 1: "rank 1 (emulated link)"}
    threads = {(e["pid"], e["tid"]): e["args"]["name"] for e in metadata if e["name"] == "thread_name"}
    for rank in (0, 1):
        assert [name for (pid, _), name in sorted(threads.items()) if pid == rank] == [
            "piece 0",
            "piece 1",
            "collectives",
        ]
    for event in events:
        expected = "collectives" if event["cat"] == "communication" else f"piece {event['args']['piece']}"
        assert threads[event["pid"], event["tid"]] == expected
    assert trace["otherData"]["title"] == "example (emulated link)"
    assert len(events) == sum(len(rank.intervals) for rank in timeline.ranks)
    assert min(e["ts"] for e in events) == 0
    total = sum(e["dur"] for e in events if e["pid"] == 0 and e["cat"] == "communication")
    assert total == pytest.approx(timeline.summary(0).communication_s * 1e6, rel=1e-6)


@settings(max_examples=50, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["compute", "communication", "exposed", "handover"]),
            st.integers(0, 2),
            st.floats(0, 1e-3),
            st.floats(0, 1e-4),
        ),
        min_size=1,
        max_size=30,
    )
)
def test_chrome_events_of_a_thread_never_overlap(parts: list[tuple]) -> None:
    intervals = [Interval(kind, piece, "x", 5e4 + start, 5e4 + start + length) for kind, piece, start, length in parts]
    _, events, _ = events_of(Timeline.from_runs([(0, [RunStats(3, (1, 1, 1), intervals=intervals)])], title="t"))
    assert len(events) == len(intervals)
    threads = defaultdict(list)
    for event in events:
        threads[event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    for spans in threads.values():
        spans.sort()
        assert all(right[0] - left[1] > -1e-4 for left, right in itertools.pairwise(spans))
