"""These tests need the libraries of requirements.txt, so they run by `make test-formats` only.

That target sets TPOVERLAP_TEST_FORMATS=1: they are then collected whatever is installed, and a missing library fails.
"""

import os
import sys
from pathlib import Path

collect_ignore_glob = [] if os.environ.get("TPOVERLAP_TEST_FORMATS") == "1" else ["test_*.py"]
for folder in ("quant", "model"):
    sys.path.insert(0, str(Path(__file__).parent.parent / folder))
