"""What every benchmark shares: arms timed in turn, after their results were checked, and one JSON record of the run.

A record holds {"what", "date", "command", "commit", "hardware", "versions", "notes", "tables": [{"title", "columns",
"rows"}], "figures"}; launch/render_benchmarks.py makes docs/benchmarks.md from the records in docs/benchmarks.
"""

from __future__ import annotations

import datetime
import gc
import importlib.metadata
import json
import math
import os
import platform
import re
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from progress_bar import Progress

from tpoverlap.cuda.device import device_count, device_facts
from tpoverlap.trace.timeline import duration

ROOT = Path(__file__).resolve().parent.parent
LIBRARIES = ("torch", "triton", "cuda-python", "nvidia-nccl-cu12", "nvidia-nccl-cu13", "numpy", "transformers", "vllm")


@dataclass(frozen=True)
class Arm:
    """One thing to be timed. check: raises unless the arm's result is right. run: one turn, returns its seconds (a
    list where a turn yields several samples), measured by :func:`on_host`, :func:`on_gpu` or the arm itself."""

    name: str
    check: Callable[[], object]
    run: Callable[[], float | Sequence[float]]


@dataclass(frozen=True)
class Spread:
    """A median with the 10th and 90th percentile around it; seconds, or a ratio."""

    median: float
    low: float
    high: float
    repetitions: int

    @classmethod
    def of(cls, samples: Sequence[float]) -> Spread:
        """ValueError for no samples, or one that is not finite."""
        if not samples or not all(math.isfinite(sample) for sample in samples):
            raise ValueError(f"a spread needs finite samples, got {list(samples)[:10]}")
        if len(samples) == 1:
            return cls(samples[0], samples[0], samples[0], 1)
        deciles = statistics.quantiles(samples, n=10, method="inclusive")
        median = statistics.median(samples)
        return cls(median, min(deciles[0], median), max(deciles[-1], median), len(samples))

    def as_time(self) -> str:
        return f"{duration(self.median)} ({duration(self.low)} to {duration(self.high)})"

    def as_ratio(self) -> str:
        return f"{self.median:.3f} ({self.low:.3f} to {self.high:.3f})"


@dataclass(frozen=True)
class Comparison:
    """Seconds of each arm's turns, in the order in which they ran: turn i of all arms ran one after the other."""

    turns: Mapping[str, tuple[float, ...]]

    def time(self, arm: str) -> Spread:
        return Spread.of(self.turns[arm])

    def ratio(self, arm: str, over: str) -> Spread:
        """Time of one arm over another's, turn by turn, so that a drift of the machine's speed cancels."""
        return Spread.of([a / b for a, b in zip(self.turns[arm], self.turns[over], strict=True)])


def alternate(arms: Sequence[Arm], repetitions: int = 20, warmup: int = 3, *, label: str = "benchmark") -> Comparison:
    """Checks every arm, warms all up, then times them in turn: A B A B ...

    No arm is timed before all have passed their check, whose error reaches the caller. A figure that is quoted needs
    at least 20 repetitions. A turn with several samples counts as their median. ValueError for no arms, equal names,
    no repetition, or a time that is not positive.
    """
    names = [arm.name for arm in arms]
    if not arms or len(set(names)) != len(names):
        raise ValueError(f"a comparison needs arms with different names, got {names}")
    if repetitions < 1 or warmup < 0:
        raise ValueError(f"needs repetitions >= 1 and warmup >= 0, got {repetitions} and {warmup}")
    for arm in arms:
        arm.check()
    # What lives as long as the run is no work for the collector, whose pauses fall on whichever arm is at work.
    gc.collect()
    gc.freeze()
    turns: dict[str, list[float]] = {name: [] for name in names}
    with Progress(label, (warmup + repetitions) * len(arms)) as progress:
        for round_number in range(warmup + repetitions):
            for arm in arms:
                result = arm.run()
                seconds = statistics.median(result) if isinstance(result, Sequence) else float(result)
                if not (math.isfinite(seconds) and seconds > 0):
                    raise ValueError(f"arm {arm.name!r} returned {seconds!r}: a turn's time in seconds is positive")
                if round_number >= warmup:
                    turns[arm.name].append(seconds)
                progress.advance(note=arm.name)
    return Comparison({name: tuple(seconds) for name, seconds in turns.items()})


def on_host(function: Callable[[], object]) -> Callable[[], float]:
    """A turn that times one call by the host's clock."""

    def run() -> float:
        start_s = time.perf_counter()
        function()
        return time.perf_counter() - start_s

    return run


def on_gpu(
    function: Callable[[], object], calls: int = 1, *, first: Callable[[], object] = lambda: None
) -> Callable[[], float]:
    """A turn that times ``calls`` calls on the current CUDA stream by events, and returns the seconds of one.

    first: puts work on the stream behind which the clock starts, such as a collective that brings the ranks together.
    """

    def run() -> float:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        first()
        start.record()
        for _ in range(calls):
            function()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) * 1e-3 / calls

    return run


def write_json(
    path: str | os.PathLike[str],
    *,
    what: str,
    tables: Sequence[Mapping[str, Any]],
    figures: Mapping[str, float | int | str],
    notes: Sequence[str] = (),
    command: str | None = None,
) -> dict[str, Any]:
    """Writes the record of a run, with the machine, the versions, the commit and the command line; returns it.

    command: None: that of this process. A file that is there is replaced as a whole.

    A record worth keeping is docs/benchmarks/<what>_<hardware>_<date>.json. ValueError where :func:`check_record`
    finds a fault; OSError where the file cannot be written.
    """
    record = {
        "what": what,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "command": command or command_line(),
        "commit": commit(),
        "hardware": hardware(),
        "versions": versions(),
        "notes": list(notes),
        "tables": [dict(table) for table in tables],
        "figures": dict(figures),
    }
    check_record(record)
    text = json.dumps(record, indent=1, ensure_ascii=False, allow_nan=False) + "\n"
    target = Path(path).resolve()
    if target.exists() and not target.is_file():  # a device, such as /dev/stdout
        target.write_text(text, encoding="utf-8")
    else:
        unfinished = target.with_name(f"{target.name}.part")
        unfinished.write_text(text, encoding="utf-8")
        unfinished.replace(target)
    return record


def check_record(record: Any) -> None:
    """ValueError that names the first field which is missing or not as the schema says."""
    kinds = {"what": str, "date": str, "command": str, "commit": str, "hardware": dict, "versions": dict}
    kinds |= {"notes": list, "tables": list, "figures": dict}
    if not isinstance(record, dict) or record.keys() != kinds.keys():
        found = sorted(record) if isinstance(record, dict) else type(record).__name__
        raise ValueError(f"a record has exactly the fields {sorted(kinds)}, got {found}")
    for name, kind in kinds.items():
        if not isinstance(record[name], kind):
            raise ValueError(f"field {name!r} must be a {kind.__name__}, got {record[name]!r}")
    if not re.fullmatch(r"[a-z0-9]+([-_][a-z0-9]+)*", record["what"]):
        raise ValueError(f"'what' is a name of lower-case letters, digits, - and _, got {record['what']!r}")
    try:
        datetime.date.fromisoformat(record["date"])
    except ValueError as error:
        raise ValueError(f"'date' is YYYY-MM-DD, got {record['date']!r}") from error
    for name, value in record["figures"].items():
        if not _is_cell(value) or value is None:
            raise ValueError(f"figure {name!r} must be a finite number or a string, got {value!r}")
    for number, table in enumerate(record["tables"]):
        _check_table(number, table)


def _check_table(number: int, table: Any) -> None:
    if not isinstance(table, dict) or table.keys() != {"title", "columns", "rows"}:
        raise ValueError(f"table {number} must have exactly the fields title, columns and rows, got {table!r}")
    width = len(table["columns"])
    if not width or not all(isinstance(column, str) for column in table["columns"]):
        raise ValueError(f"table {table['title']!r} needs column names, got {table['columns']!r}")
    for row in table["rows"]:
        if len(row) != width or not all(_is_cell(cell) for cell in row):
            raise ValueError(
                f"table {table['title']!r} needs rows of {width} strings, finite numbers or None, got {row!r}"
            )


def _is_cell(value: Any) -> bool:
    if isinstance(value, float):
        return math.isfinite(value)
    return value is None or isinstance(value, str | int)


def hardware() -> dict[str, Any]:
    """CPU model and count, GPU names and the driver's release (None without one); creates no CUDA context."""
    gpus = [device_facts(ordinal).name for ordinal in range(device_count())]
    if not gpus and torch.cuda.is_available():
        gpus = [torch.cuda.get_device_name(ordinal) for ordinal in range(torch.cuda.device_count())]
    return {"cpu": _cpu_model(), "cpus": len(os.sched_getaffinity(0)), "gpus": gpus, "driver": _driver_release()}


def versions() -> dict[str, str]:
    """Versions of Python, the CUDA that torch was built for, and the installed libraries that matter here."""
    found = {"python": platform.python_version(), "cuda": torch.version.cuda or "none"}
    for library in LIBRARIES:
        try:
            found[library] = importlib.metadata.version(library)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def commit() -> str:
    """The checkout's commit, with "+changes" where tracked files differ from it; "unknown" without git metadata.

    TPOVERLAP_COMMIT, where it is set, takes its place: for a copy of a tree, whose metadata may be of another commit.
    """
    if given := os.environ.get("TPOVERLAP_COMMIT"):
        return given
    try:
        if Path(_git("rev-parse", "--show-toplevel")) == ROOT:
            return _git("rev-parse", "HEAD") + ("+changes" if _git("status", "--porcelain", "-uno") else "")
    except (OSError, subprocess.SubprocessError):
        pass
    return "unknown"


def command_line() -> str:
    """How to run this again: paths inside the checkout relative to it, others by their last part only."""
    words = [_portable(word) for word in sys.argv]
    if "LOCAL_WORLD_SIZE" in os.environ:
        return shlex.join(["torchrun", "--standalone", "--nproc-per-node", os.environ["LOCAL_WORLD_SIZE"], *words])
    return shlex.join(["python", *words])


def _portable(word: str) -> str:
    option, separator, value = word.rpartition("=") if word.startswith("--") else ("", "", word)
    path = Path(value)
    if not path.is_absolute():
        return word
    return option + separator + (str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else path.name)


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=True, timeout=30)
    return done.stdout.strip()


def _cpu_model() -> str:
    try:
        match = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), flags=re.M)
    except OSError:
        match = None
    return match[1].strip() if match else platform.processor() or platform.machine()


def _driver_release() -> str | None:
    try:
        match = re.search(r"Kernel Module.*?(\d+\.\d+(\.\d+)?)", Path("/proc/driver/nvidia/version").read_text())
    except OSError:
        return None
    return match[1] if match else None
