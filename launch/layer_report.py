"""Tables, figures and goals of bench_layers.py."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from bench_common import Comparison, Spread
from layer_trials import PEER_NCCL, PIECES, HostCosts

from tpoverlap.microbatch.bound import Segment, overlapped_time


@dataclass(frozen=True)
class Ratio:
    """Time of one arm over another's. name: of the figure. goal: what the median should not exceed, if anything."""

    name: str
    ours: str
    over: str
    goal: float | None


@dataclass(frozen=True)
class Measured:
    """What one number of tokens gave. served: the baseline's transport and ours."""

    tokens: int
    layers: int
    served: tuple[str, str]
    times: Comparison
    host: list[HostCosts]

    @cached_property
    def with_bounds(self) -> Comparison:
        """The times, with the best possible ones of each turn added as if they were arms."""
        turns = dict(self.times.turns)
        for transport in self.served:
            for count in PIECES:
                turns[f"bound, {count} pieces, {transport}"] = tuple(
                    self._bound(count, *parts)
                    for parts in zip(
                        turns[f"attention compute, {count} pieces"],
                        turns[f"mlp compute, {count} pieces"],
                        turns[f"communication, {count} pieces, {transport}"],
                        strict=True,
                    )
                )
        return Comparison(turns)

    def _bound(self, count: int, attention_s: float, mlp_s: float, communication_s: float) -> float:
        collective_s = communication_s / (2 * self.layers)
        layer = [Segment(attention_s / self.layers, collective_s), Segment(mlp_s / self.layers, collective_s)]
        return overlapped_time(layer * self.layers, count)

    @property
    def best(self) -> str:
        """Our arm of 2, 3 or 4 pieces with the least median."""
        return min((f"{n} pieces, {self.served[1]}" for n in PIECES), key=lambda arm: self.times.time(arm).median)

    def ratios(self) -> list[Ratio]:
        baseline, ours = self.served
        serial, large = f"serial, {baseline}", self.tokens >= 2048
        found = [
            Ratio("best_over_serial", self.best, serial, 0.60 if large else None),
            Ratio("two_pieces_over_bound", f"2 pieces, {ours}", f"bound, 2 pieces, {ours}", 1.05),
            Ratio("auto_over_best", f"auto, {ours}", self.best, 1.03),
            Ratio("serial_over_serial", f"serial, {ours}", serial, None),
            Ratio("two_pieces_of_baseline_over_its_serial", f"2 pieces, {baseline}", serial, None),
        ]
        peer = f"serial, {PEER_NCCL}"
        if peer in self.times.turns:
            found.append(Ratio("best_over_serial_with_peer_access", self.best, peer, 1.10))
        return found

    def ratio(self, ratio: Ratio) -> Spread:
        return self.with_bounds.ratio(ratio.ours, ratio.over)


def tables(found: Sequence[Measured]) -> list[dict[str, Any]]:
    return [table for one in found for table in (_times(one), _host(one))] + [_ratios(found)]


def figures(found: Sequence[Measured]) -> dict[str, float | str]:
    """Medians of the ratios, by name and tokens, and which number of pieces was best and which one chosen."""
    made: dict[str, float | str] = {}
    for one in found:
        for ratio in one.ratios():
            made[f"{ratio.name}_{one.tokens}"] = round(one.ratio(ratio).median, 4)
        made[f"best_pieces_{one.tokens}"] = one.best.split()[0]
        chosen = next(costs.pieces for costs in one.host if costs.way == f"auto, {one.served[1]}")
        made[f"auto_pieces_{one.tokens}"] = chosen
    return made


def missed(found: Sequence[Measured]) -> list[str]:
    """A sentence for each goal that was not reached."""
    return [
        f"{one.tokens} tokens: {ratio.ours} / {ratio.over} is {one.ratio(ratio).median:.3f}, the goal is {ratio.goal:g}"
        for one in found
        for ratio in one.ratios()
        if ratio.goal is not None and one.ratio(ratio).median > ratio.goal
    ]


def _times(one: Measured) -> dict[str, Any]:
    serial = f"serial, {one.served[0]}"
    rows = [
        [arm, one.with_bounds.time(arm).as_time(), one.with_bounds.ratio(arm, serial).as_ratio()]
        for arm in one.with_bounds.turns
    ]
    return {"title": f"{one.tokens} tokens", "columns": ["arm", "time", f"/ {serial}"], "rows": rows}


def _host(one: Measured) -> dict[str, Any]:
    rows: list[list[str | int | float | None]] = [
        [
            costs.way,
            costs.pieces,
            round(costs.issue_s * 1e3, 3),
            None if costs.handover_s is None else round(costs.handover_s * 1e6, 1),
            None if costs.handover_s is None else round(costs.exposed_s * 1e3, 3),
        ]
        for costs in one.host
    ]
    columns = ["arm", "pieces", "host time of a pass, ms", "hand-over, us", "exposed communication, ms"]
    return {"title": f"{one.tokens} tokens: host", "columns": columns, "rows": rows}


def _ratios(found: Sequence[Measured]) -> dict[str, Any]:
    rows = [
        [one.tokens, ratio.ours, ratio.over, one.ratio(ratio).as_ratio(), ratio.goal]
        for one in found
        for ratio in one.ratios()
    ]
    return {"title": "Ratios", "columns": ["tokens", "arm", "over", "ratio", "goal"], "rows": rows}
