"""Reasons against a request that several backends have, in one wording."""

from __future__ import annotations

from tpoverlap.attention.backend import PrefillRequest


def missing_features(request: PrefillRequest) -> list[str]:
    """What the request needs that no backend here has: attention that is not causal, ALiBi, attention sinks."""
    reasons = []
    if not request.causal:
        reasons.append("it is causal only")
    if request.alibi:
        reasons.append("it has no ALiBi")
    if request.sinks:
        reasons.append("it has no attention sinks")
    return reasons


def mixed_dtypes(request: PrefillRequest) -> list[str]:
    """The reason of backends whose cache has the dtype of the query."""
    if request.paged_dtype == request.dtype:
        return []
    return [f"its cache has the dtype of the query, {request.dtype}, not {request.paged_dtype}"]


def dotted(capability: tuple[int, int]) -> str:
    """(8, 0) -> "8.0"."""
    return f"{capability[0]}.{capability[1]}"
