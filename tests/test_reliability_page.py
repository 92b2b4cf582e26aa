"""docs/reliability.md lists no fault without a test, and no test that does not exist."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "reliability.md").read_text()


def test_every_fault_names_tests_that_exist() -> None:
    rows = [line for line in PAGE.splitlines() if line.startswith("| ") and line.count("|") >= 4]
    faults = [r for r in rows if not r.startswith(("| fault ", "| error ", "|---")) and not r.startswith("| `")]
    assert len(faults) > 40
    for row in faults:
        cited = re.findall(r"`([\w/]+\.py)::(test_\w+)`", row)
        assert cited or "the same test" in row, row
        for file, name in cited:
            assert re.search(rf"^def {name}\(", (ROOT / "tests" / file).read_text(), re.MULTILINE), (file, name)
