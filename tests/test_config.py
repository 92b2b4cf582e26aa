"""Every wrong value of a configuration is refused with an error that names its field."""

from __future__ import annotations

import math
from typing import Any

import pytest

from tpoverlap.config import HostReduceConfig, OverlapConfig
from tpoverlap.errors import ConfigError


@pytest.mark.parametrize(
    ("config", "field", "value"),
    [
        *((HostReduceConfig, "max_bytes", v) for v in (-16, 8, 1.5, "4", True)),
        *((HostReduceConfig, "copy_engine_max_bytes", v) for v in (-16, 262_144, 262_152, 262_145, 1e6, None)),
        *((HostReduceConfig, "copy_engine_pieces", v) for v in (0, 17, 2.0, "all", True, None)),
        *((HostReduceConfig, "timeout_s", v) for v in (0, -1, math.inf, math.nan, "30", True, 1e300)),
        *((HostReduceConfig, "wire", v) for v in ("int8", "", None)),
        *((HostReduceConfig, "peer_access", v) for v in ("off", True)),
        *((OverlapConfig, "min_tokens", v) for v in (-1, 1.0, "0", False)),
        *((OverlapConfig, "num_pieces", v) for v in (0, 1, 5, "two", True, 2.5, 2.0, None, [2])),
        *((OverlapConfig, "cut_multiple", v) for v in (0, -128, 1.0)),
    ],
)
def test_a_wrong_value_is_refused_by_name(config: type[Any], field: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"^{field}=.*is not supported: "):
        config(**{field: value})


@pytest.mark.parametrize(
    ("config", "values"),
    [
        (HostReduceConfig, {}),
        (HostReduceConfig, {"max_bytes": 0, "copy_engine_max_bytes": 0}),
        (HostReduceConfig, {"max_bytes": 16, "copy_engine_max_bytes": 32, "copy_engine_pieces": 16}),
        (HostReduceConfig, {"copy_engine_pieces": 1, "timeout_s": 1, "peer_access": "ignore", "wire": "exact"}),
        (OverlapConfig, {}),
        *((OverlapConfig, {"min_tokens": 1, "num_pieces": n, "cut_multiple": 1}) for n in (2, 3, 4, "auto")),
    ],
)
def test_right_values_are_kept(config: type[Any], values: dict[str, Any]) -> None:
    made = config(**values)
    assert {field: getattr(made, field) for field in values} == values
