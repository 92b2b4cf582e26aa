"""Decode steps behind a prompt, in CUDA graphs: what a token costs with each transport's all-reduces in it."""

from __future__ import annotations

import gc
from collections.abc import Callable

import torch
from bench_common import Arm, Comparison, alternate
from bench_teams import HOST, PEER
from prefill_arms import BASELINE, OURS, PrefillArm
from prefill_trials import PrefillTrials

DECODE_NAMES = {
    "cuda": {(HOST, BASELINE): "NCCL", (HOST, OURS): "tpoverlap", (PEER, BASELINE): "NCCL with P2P"},
    "cpu": {(HOST, BASELINE): "gloo", (HOST, OURS): "tpoverlap"},
}
_STEPS = 20
_WARM_UP = 3


def decode_times(
    trials: PrefillTrials, like: PrefillArm, context: int, with_peer: bool, repetitions: int
) -> Comparison:
    """Seconds of a token behind ``context`` tokens, a multiple of the state block, that the cache holds.

    A step is the whole model, its logits and the choice of the token; ``like`` says how the model is configured. It is
    repeated at its place: the same state is read, and the one behind it written, again. On CPU there are no graphs.
    """
    team = trials.team
    arms = []
    for (owner, transport), name in DECODE_NAMES[team.device.type].items():
        if owner == PEER and not with_peer:
            continue
        step = _Step(trials, like, context, transport) if owner == team.name else None
        team.meet()
        check = _check(trials, f"decode, {name}", context, step)
        arms.append(Arm(name, check, team.turn(owner, step or _idle, _STEPS if team.device.type == "cuda" else 1)))
    return alternate(arms, repetitions, label=f"decode behind {context}")


class _Step:
    """A decode step of this rank on one transport, captured where there is a GPU."""

    def __init__(self, trials: PrefillTrials, like: PrefillArm, context: int, transport: int) -> None:
        self._model = trials.model
        self._configure = lambda: trials.configure_transport(like, transport)
        self._batch = trials.batch(torch.zeros(1, dtype=torch.int64, device=trials.team.device), context)
        self._metadata = self._model.metadata(self._batch)
        self._graph: torch.cuda.CUDAGraph | None = None
        if trials.team.device.type == "cuda":
            self._capture()

    def __call__(self) -> None:
        if self._graph is not None:
            self._graph.replay()
        else:
            self._configure()
            self._run()

    def logits(self) -> torch.Tensor:
        self()
        return self._logits

    def _run(self) -> None:
        hidden = self._model(self._batch, self._metadata)
        self._logits = self._model.logits(hidden)
        self.token = self._logits.argmax(dim=-1)

    def _capture(self) -> None:
        self._configure()
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(_WARM_UP):
                self._run()
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        gc.collect()  # a collection inside the capture may end it
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._run()


def _check(trials: PrefillTrials, name: str, context: int, step: _Step | None) -> Callable[[], object]:
    """The first arm's logits are what the others are compared with. Decodes are told from prompts by a negative key."""
    return lambda: trials.verify(name, -context, None if step is None else step.logits())


def _idle() -> None:
    """What a team gives for an arm that is not its own."""
