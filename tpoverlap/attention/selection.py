"""Which backend runs a prefill, and why not the others."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import cast

from tpoverlap.attention.backend import CAPABILITIES, PrefillBackend, PrefillRequest
from tpoverlap.errors import UnsupportedError

# In the order of preference.
_PREFILL_MODULES = {
    "reference": "tpoverlap.attention.reference",
}
PREFILL_BACKENDS = tuple(_PREFILL_MODULES)


@dataclass(frozen=True)
class Selection:
    """The outcome of a selection.

    name: the chosen backend. rejections: reasons against each backend that was preferred to it and cannot serve
    (against every other one, where the choice was explicit: none). capabilities: what the chosen one has.
    """

    name: str
    rejections: Mapping[str, tuple[str, ...]]
    capabilities: frozenset[str]
    backend: PrefillBackend = field(repr=False, compare=False)


def select_prefill_backend(
    request: PrefillRequest, *, backend: str = "auto", required: Iterable[str] = ()
) -> Selection:
    """Choose the backend of a prefill; nothing is initialized, compiled or remembered.

    backend: ``"auto"``, or a name of :data:`PREFILL_BACKENDS`, which then is taken if it can run at all. required:
    capabilities that it must have. Raises ValueError for an unknown name or capability, UnsupportedError with every
    reason where nothing serves.
    """
    required = frozenset(required)
    if not required <= CAPABILITIES:
        raise ValueError(f"unknown capabilities {sorted(required - CAPABILITIES)}: give some of {sorted(CAPABILITIES)}")
    if backend != "auto" and backend not in _PREFILL_MODULES:
        raise ValueError(f"unknown prefill backend {backend!r}: give 'auto' or one of {', '.join(PREFILL_BACKENDS)}")
    rejections: dict[str, tuple[str, ...]] = {}
    for name in PREFILL_BACKENDS if backend == "auto" else (backend,):
        candidate = cast(PrefillBackend, importlib.import_module(_PREFILL_MODULES[name]))
        reasons = tuple(f"it lacks {capability}" for capability in sorted(required - candidate.capabilities))
        reasons += candidate.rejection_reasons(request, forced=backend != "auto")
        if not reasons:
            return Selection(name, rejections, candidate.capabilities, candidate)
        rejections[name] = reasons
    listed = "; ".join(f"{name}: {', '.join(reasons)}" for name, reasons in rejections.items())
    raise UnsupportedError(f"no prefill backend serves {request}: {listed}")
