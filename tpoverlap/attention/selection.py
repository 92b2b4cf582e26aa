"""Which backend runs a prefill or a decode, and why not the others."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar, cast

from tpoverlap.attention.backend import CAPABILITIES, PACKED_PREFILL, DecodeBackend, PrefillBackend, PrefillRequest
from tpoverlap.errors import UnsupportedError

# In the order of preference. Libraries come after our own kernels: installing one must not change a run's bits.
_PREFILL_MODULES = {
    "turing": "tpoverlap.attention.turing",
    "triton": "tpoverlap.attention.triton.prefill",
    "triton_rows": "tpoverlap.attention.triton.rows",
    "flash_attn": "tpoverlap.attention.flash_attn",
    "flashinfer": "tpoverlap.attention.flashinfer",
    "reference": "tpoverlap.attention.reference",
}
_DECODE_MODULES = {
    "triton": "tpoverlap.attention.triton.decode",
    "flash_attn": "tpoverlap.attention.flash_attn",
    "flashinfer": "tpoverlap.attention.flashinfer",
    "reference": "tpoverlap.attention.reference",
}
PREFILL_BACKENDS = tuple(_PREFILL_MODULES)
DECODE_BACKENDS = tuple(_DECODE_MODULES)

# Served only on request: who runs split, mixed or boundary batches relies on the bits of the per-row prefill unless it
# asks for the packed one.
_ON_REQUEST = {"triton": PACKED_PREFILL}


class _Backend(Protocol):
    @property
    def capabilities(self) -> frozenset[str]: ...

    def rejection_reasons(self, request: PrefillRequest, *, forced: bool = False) -> tuple[str, ...]: ...


B = TypeVar("B", bound=_Backend)


@dataclass(frozen=True)
class Selection(Generic[B]):
    """The outcome of a selection.

    name: the chosen backend. rejections: the reasons against each backend that is preferred to it, none where the
    choice was explicit. capabilities: what the chosen one has, of :data:`CAPABILITIES`. backend: what runs it.
    """

    name: str
    rejections: Mapping[str, tuple[str, ...]]
    capabilities: frozenset[str]
    backend: B = field(repr=False, compare=False)


def select_prefill_backend(
    request: PrefillRequest, *, backend: str = "auto", required: Iterable[str] = ()
) -> Selection[PrefillBackend]:
    """Choose the backend of a prefill; nothing is initialized, compiled or remembered.

    backend: ``"auto"``, or a name of :data:`PREFILL_BACKENDS`, which then is taken if it can run at all. required:
    capabilities that it must have. Triton's packed prefill is chosen by name or by requiring ``"packed_prefill"``,
    never by default. Raises ValueError for an unknown name or capability, UnsupportedError with every reason where
    nothing serves.
    """
    required = frozenset(required)
    if not required <= CAPABILITIES:
        raise ValueError(f"unknown capabilities {sorted(required - CAPABILITIES)}: give some of {sorted(CAPABILITIES)}")
    return cast(Selection[PrefillBackend], _select(_PREFILL_MODULES, _ON_REQUEST, request, backend, required))


def select_decode_backend(request: PrefillRequest, *, backend: str = "auto") -> Selection[DecodeBackend]:
    """The same for a decode; ``request`` has max_query_len 1. Names are those of :data:`DECODE_BACKENDS`."""
    return cast(Selection[DecodeBackend], _select(_DECODE_MODULES, {}, request, backend, frozenset()))


def _select(
    modules: Mapping[str, str],
    on_request: Mapping[str, str],
    request: PrefillRequest,
    backend: str,
    required: frozenset[str],
) -> Selection[_Backend]:
    if backend != "auto" and backend not in modules:
        raise ValueError(f"unknown backend {backend!r}: give 'auto' or one of {', '.join(modules)}")
    rejections: dict[str, tuple[str, ...]] = {}
    for name in modules if backend == "auto" else (backend,):
        candidate = cast(_Backend, importlib.import_module(modules[name]))
        reasons = [f"it lacks {capability}" for capability in sorted(required - candidate.capabilities)]
        if backend == "auto" and name in on_request and on_request[name] not in required:
            reasons.append(f"it is chosen by name or by requiring {on_request[name]}")
        reasons += candidate.rejection_reasons(request, forced=backend != "auto")
        if not reasons:
            return Selection(name, rejections, candidate.capabilities, candidate)
        rejections[name] = tuple(reasons)
    listed = "; ".join(f"{name}: {', '.join(reasons)}" for name, reasons in rejections.items())
    raise UnsupportedError(f"no attention backend serves {request}: {listed}")
