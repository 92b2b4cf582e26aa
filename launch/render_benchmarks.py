"""Makes docs/benchmarks.md from the records in docs/benchmarks; with --check, says whether it is up to date."""

from __future__ import annotations

import argparse
import difflib
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench_common import ROOT, check_record
from predict_records import MEASURED_TITLE, TABLES_TITLE

HEADER = """# Benchmarks

Made from the records in [docs/benchmarks](benchmarks) by `python launch/render_benchmarks.py`; do not edit by hand.
Times are medians with their 10th to 90th percentile where a range is given. Speeds are ratios of arms that ran in turn
in one launch; a ratio of times below 1 means that the first is faster.
"""


def render(folder: Path) -> str:
    """The page for all ``*.json`` of the folder, by subject and then newest first.

    ValueError that names the file whose record or name is not as it should be.
    """
    records = [load(path) for path in sorted(folder.glob("*.json"))]
    if not records:
        return HEADER + "\nNo records yet.\n"
    records.sort(key=lambda record: record["date"], reverse=True)
    records.sort(key=lambda record: record["what"])
    contents = [
        f"- [{_title(record)}](#{_anchor(_title(record))}): {_machine(record['hardware'])}" for record in records
    ]
    return "\n".join([HEADER, *contents, "", *(_section(record) for record in records)])


def load(path: Path) -> dict[str, Any]:
    """A checked record whose file is named <what>_<hardware>_<date>.json. ValueError otherwise."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        check_record(record)
        parts = path.stem.rsplit("_", 2)
        if len(parts) != 3 or (parts[0], parts[2]) != (record["what"], record["date"]):
            raise ValueError(f"its name must be {record['what']}_<hardware>_{record['date']}.json, as its record says")
    except ValueError as error:
        raise ValueError(f"{path.name}: {error}") from error
    return record


def _section(record: dict[str, Any]) -> str:
    lines = [
        f"## {_title(record)}",
        "",
        f"- Machine: {_machine(record['hardware'])}",
        f"- Versions: {', '.join(f'{name} {version}' for name, version in record['versions'].items())}",
        f"- Commit: {record['commit']}",
        f"- Command: `{record['command']}`",
        *(f"- {note}" for note in record["notes"]),
        "",
    ]
    for table in record["tables"]:
        if table["title"].startswith((f"{TABLES_TITLE}: ", f"{MEASURED_TITLE}: ")):
            continue  # for predict.py, hundreds of points
        lines += [f"### {table['title']}", "", *_table(table["columns"], table["rows"]), ""]
    if record["figures"]:
        # Nearly all of them stand in the tables too: a reader of the page seldom needs them.
        figures = _table(["figure", "value"], list(record["figures"].items()))
        lines += ["<details><summary>Figures by name</summary>", "", *figures, "", "</details>", ""]
    return "\n".join(lines)


def _title(record: dict[str, Any]) -> str:
    return f"{record['what']}, {record['date']}"


def _anchor(title: str) -> str:
    """As GitHub derives it from a heading."""
    return re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-")


def _machine(hardware: dict[str, Any]) -> str:
    known = {"cpu", "cpus", "gpus", "driver"}
    gpus = hardware.get("gpus", [])
    parts = [f"{gpus.count(name)} x {name}" for name in dict.fromkeys(gpus)] or ["no GPU"]
    if hardware.get("driver"):
        parts.append(f"driver {hardware['driver']}")
    parts.append(f"{hardware.get('cpu', 'unknown CPU')} ({hardware.get('cpus', '?')} CPUs)")
    parts += [f"{name}: {value}" for name, value in hardware.items() if name not in known]
    return ", ".join(parts)


def _table(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> list[str]:
    numeric = [
        all(isinstance(row[i], int | float) or row[i] is None for row in rows) and bool(rows)
        for i in range(len(columns))
    ]
    rule = ["---:" if is_numeric else "---" for is_numeric in numeric]
    return [_line(columns), _line(rule), *(_line(row) for row in rows)]


def _line(cells: Sequence[Any]) -> str:
    return "| " + " | ".join(_cell(cell) for cell in cells) + " |"


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1e4 else f"{value:.0f}"
    return " ".join(str(value).replace("|", "\\|").split())


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing; status 1 and the difference if stale")
    parser.add_argument("--docs", type=Path, default=ROOT / "docs", help="the folder that holds benchmarks/")
    options = parser.parse_args(arguments)
    page = options.docs / "benchmarks.md"
    try:
        wanted = render(options.docs / "benchmarks")
        if not options.check:
            page.write_text(wanted, encoding="utf-8")
            return 0
        found = page.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        print(f"benchmarks page: {error}", file=sys.stderr)
        return 1
    if found == wanted:
        return 0
    difference = difflib.unified_diff(found.splitlines(), wanted.splitlines(), "benchmarks.md", "expected", lineterm="")
    print("\n".join([*difference, "", f"{page} is stale: run python launch/render_benchmarks.py"]), file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
