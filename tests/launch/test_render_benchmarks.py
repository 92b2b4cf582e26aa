"""docs/benchmarks.md is what its records make, and a faulty record is named."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "launch"))

from bench_common import ROOT
from render_benchmarks import main, render


def record(**changes: Any) -> dict[str, Any]:
    return {
        "what": "all_reduce",
        "date": "2026-01-31",
        "command": "torchrun launch/bench_x.py",
        "commit": "abc",
        "hardware": {"cpu": "CPU X", "cpus": 16, "gpus": ["Card", "Card"], "driver": "580.1"},
        "versions": {"python": "3.12", "torch": "2.11"},
        "notes": ["power limit 300 W"],
        "tables": [
            {
                "title": "Times",
                "columns": ["case", "ratio"],
                "rows": [["a|b\nc", 0.123456], ["large", 123456.7], ["none", None]],
            }
        ],
        "figures": {"best ratio": 0.5},
        **changes,
    }


def save(docs: Path, name: str, content: dict[str, Any] | str) -> None:
    folder = docs / "benchmarks"
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(content if isinstance(content, str) else json.dumps(content))


def test_the_committed_page_is_up_to_date() -> None:
    page = ROOT / "docs" / "benchmarks.md"
    assert page.read_text(encoding="utf-8") == render(ROOT / "docs" / "benchmarks"), (
        "stale: run python launch/render_benchmarks.py"
    )


def test_a_record_becomes_a_section(tmp_path: Path) -> None:
    save(tmp_path, "all_reduce_2xcard_2026-01-31.json", record())
    page = render(tmp_path / "benchmarks")
    for line in (
        "- [all_reduce, 2026-01-31](#all_reduce-2026-01-31): 2 x Card, driver 580.1, CPU X (16 CPUs)",
        "## all_reduce, 2026-01-31",
        "- Machine: 2 x Card, driver 580.1, CPU X (16 CPUs)",
        "- Versions: python 3.12, torch 2.11",
        "- Commit: abc",
        "- Command: `torchrun launch/bench_x.py`",
        "- power limit 300 W",
        "### Times",
        "| case | ratio |",
        "| --- | ---: |",
        "| a\\|b c | 0.1235 |",
        "| large | 123457 |",
        "| none | - |",
        "| best ratio | 0.5 |",
    ):
        assert line in page.splitlines()


def test_records_are_ordered_by_subject_and_then_newest_first(tmp_path: Path) -> None:
    for what, date in [("b", "2026-01-01"), ("a", "2026-01-01"), ("a", "2026-02-01")]:
        save(tmp_path, f"{what}_cpu_{date}.json", record(what=what, date=date))
    headings = [line for line in render(tmp_path / "benchmarks").splitlines() if line.startswith("## ")]
    assert headings == ["## a, 2026-02-01", "## a, 2026-01-01", "## b, 2026-01-01"]


def test_a_folder_without_records_says_so(tmp_path: Path) -> None:
    assert render(tmp_path).endswith("No records yet.\n")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("all_reduce_cpu_2026-01-31.json", "{", "Expecting property name"),
        ("all_reduce_cpu_2026-01-31.json", record(date="soon"), "'date' is YYYY-MM-DD"),
        ("all_reduce_cpu_2026-01-30.json", record(), "its name must be"),
        ("other_cpu_2026-01-31.json", record(), "its name must be"),
        ("2026-01-31.json", record(), "its name must be"),
    ],
)
def test_a_faulty_record_is_named(
    name: str, content: Any, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save(tmp_path, name, content)
    with pytest.raises(ValueError, match=f"^{name}: .*{message}"):
        render(tmp_path / "benchmarks")
    assert main(["--docs", str(tmp_path)]) == 1
    assert name in capsys.readouterr().err
    assert not (tmp_path / "benchmarks.md").exists()


def test_check_tells_stale_from_fresh(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(tmp_path, "all_reduce_cpu_2026-01-31.json", record())
    assert main(["--docs", str(tmp_path), "--check"]) == 1
    assert main(["--docs", str(tmp_path)]) == 0
    assert main(["--docs", str(tmp_path), "--check"]) == 0
    save(tmp_path, "all_reduce_cpu_2026-01-31.json", record(figures={"best ratio": 0.25}))
    capsys.readouterr()
    assert main(["--docs", str(tmp_path), "--check"]) == 1
    error = capsys.readouterr().err
    assert "+| best ratio | 0.25 |" in error
    assert "is stale" in error
