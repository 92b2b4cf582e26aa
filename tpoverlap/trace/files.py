"""Timelines as files."""

from __future__ import annotations

import os
from pathlib import Path

from tpoverlap.trace.chrome import render_chrome
from tpoverlap.trace.html_report import render_html
from tpoverlap.trace.png_report import render_png
from tpoverlap.trace.timeline import Timeline


def write_html(timeline: Timeline, path: str | os.PathLike[str]) -> None:
    """One self-contained page that opens from disk. OSError where it cannot be written."""
    Path(path).write_bytes(render_html(timeline).encode())


def write_png(timeline: Timeline, path: str | os.PathLike[str]) -> None:
    """A picture of the whole run and of a few of its layers.

    Needs matplotlib (UnsupportedError where it is missing). OSError where the file cannot be written.
    """
    Path(path).write_bytes(render_png(timeline))


def write_chrome(timeline: Timeline, path: str | os.PathLike[str]) -> None:
    """Chrome trace event JSON, which Perfetto opens. OSError where it cannot be written."""
    Path(path).write_bytes(render_chrome(timeline).encode())
