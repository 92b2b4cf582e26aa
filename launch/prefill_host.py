"""Times what the host needs to issue the parts of bench_prefill.py's model, where a device runs them.

The device is idle when a turn begins and its queue long enough for all that a turn issues, so that nothing holds the
host up.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from bench_teams import HOST
from predict_tables import Host
from prefill_arms import PrefillArm
from prefill_trials import PrefillTrials
from torch import nn

_TURNS = 5
# The first batches of a size are watched, or compile.
_WARM_UP = 2
_PIECES = 2


@contextlib.contextmanager
def with_layers(model: Any, layers: Iterable[nn.Module]) -> Iterator[None]:
    """The decoder with these layers alone."""
    own = model.layers
    model.layers = nn.ModuleList(layers)
    try:
        yield
    finally:
        model.layers = own


class HostTimes:
    """All ranks of all teams call the same methods; the host team's slowest rank counts. layers: as large a share of
    them has attention as of all of the model's."""

    def __init__(self, trials: PrefillTrials, layers: Sequence[Any]) -> None:
        self._trials = trials
        self._layers = layers
        attentions = {id(attention) for attention in trials.attentions}
        self._attending = [layer for layer in layers if id(layer.attention) in attentions]
        self._plain = [layer for layer in layers if id(layer.attention) not in attentions]

    def of_segments(self, mixers: Callable[[Sequence[Any]], Callable[[], object]], mlps: Callable[[], object]) -> Host:
        """mixers: makes what runs those of some layers; mlps: runs those of all layers; both of a piece, silent."""
        mixer, attention = (
            self._seconds(mixers(layers)) / len(layers) if layers else 0.0 for layers in (self._plain, self._attending)
        )
        return Host(mixer, attention, self._seconds(mlps) / len(self._layers))

    def of_all_reduce(self, arm: PrefillArm, transport: int, host: Host) -> float:
        """Of one all-reduce and its hand-over: what pieces take beyond their segments."""
        trials = self._trials
        batch = trials.make_prompt(trials.chunk_tokens).chunks[0]

        def run() -> None:
            trials.configure(replace(arm, transport=transport, pieces=_PIECES)).run(trials.model, batch)

        with with_layers(trials.model, self._layers):
            seconds = self._seconds(run)
        with with_layers(trials.model, []):
            seconds -= self._seconds(run)
        of_segments = len(self._plain) * host.mixer + len(self._attending) * host.attention
        of_segments += len(self._layers) * host.mlp
        return max(0.0, seconds / _PIECES - of_segments) / (2 * len(self._layers))

    def _seconds(self, work: Callable[[], object]) -> float:
        turns = []
        for _ in range(_WARM_UP + _TURNS):
            self._trials.team.meet()
            started_s = time.perf_counter()
            if self._trials.team.name == HOST:
                work()
            turns.append(self._trials.team.largest(time.perf_counter() - started_s))
        return statistics.median(turns[_WARM_UP:])
