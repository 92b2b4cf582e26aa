"""Progress of long runs: a bar on a terminal, plain lines elsewhere, both with an estimate of the time left."""

from __future__ import annotations

import os
import sys
import time
from types import TracebackType
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress


class Progress:
    """``with Progress("prefill", total=64) as progress: ... progress.advance()``.

    Writes to standard error, so that piped results stay clean; only rank 0 of a torchrun launch writes. The bar needs
    rich; without it, and where the stream is no terminal, a line comes at most every ``interval_s`` seconds.
    ValueError for a total below 1.
    """

    def __init__(self, label: str, total: int, *, stream: TextIO | None = None, interval_s: float = 5.0) -> None:
        if total < 1:
            raise ValueError(f"progress of {label!r} needs a total of 1 step or more, got {total}")
        self.label, self.total, self.done = label, total, 0
        self._stream = sys.stderr if stream is None else stream
        self._silent = os.environ.get("RANK", "0") != "0"
        self._interval_s = interval_s
        self._bar: RichProgress | None = None

    def __enter__(self) -> Progress:
        self._start_s = self._written_s = time.monotonic()
        if not self._silent and self._stream.isatty():
            self._bar = _rich_bar(self._stream)
        if self._bar is not None:
            self._bar.start()
            self._task = self._bar.add_task(self.label, total=self.total)
        elif not self._silent:
            self._write(f"{self.total} steps")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
        elif not self._silent:
            state = "done" if kind is None else f"stopped after {self.done} of {self.total}"
            self._write(f"{state}, {_clock(time.monotonic() - self._start_s)}")

    def advance(self, steps: int = 1, note: str = "") -> None:
        """Counts finished steps. note: what is under way, shown beside the label."""
        self.done += steps
        if self._bar is not None:
            self._bar.update(self._task, advance=steps, description=f"{self.label} {note}".rstrip())
            return
        now = time.monotonic()
        if self._silent or now - self._written_s < self._interval_s or not 0 < self.done < self.total:
            return
        self._written_s = now
        left_s = (now - self._start_s) / self.done * (self.total - self.done)
        self._write(
            f"{self.done} of {self.total} ({self.done / self.total:.0%}), {_clock(left_s)} left {note}".rstrip()
        )

    def _write(self, text: str) -> None:
        print(f"{self.label}: {text}", file=self._stream, flush=True)


def _rich_bar(stream: TextIO) -> RichProgress | None:
    try:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
        from rich.progress import Progress as Bar
    except ImportError:
        return None
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left", style="dim"),
        TimeRemainingColumn(),
    )
    return Bar(*columns, console=Console(file=stream))


def _clock(seconds: float) -> str:
    whole = round(seconds)
    return f"{whole // 60}:{whole % 60:02d} min" if whole >= 60 else f"{seconds:.0f} s"
