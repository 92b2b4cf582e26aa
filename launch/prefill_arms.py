"""The arms of bench_prefill.py: each step adds one thing to the one before it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from bench_teams import HOST, PEER

from tpoverlap.quant.nvfp4.tiles import Tile

BASELINE, OURS = 0, 1
"""Transports: torch.distributed (NCCL, gloo), and ours (copy engines, the channel of CPU ranks)."""

SERIAL, HALVES, SPLIT_KV, TILE = "serial", "+ halves", "+ split-KV attention", "+ dequantization tile"
BEST_SERIAL, PEER_SERIAL, BEST_PEER_SERIAL = (
    "serial, best kernels",
    "serial with P2P",
    "serial with P2P, best kernels",
)
# What the kernel took before tiles were measured on each card.
UNTUNED_TILE = Tile(256, 4)


@dataclass(frozen=True)
class PrefillArm:
    """A way to prefill. team: of the ranks that run it. pieces: of a chunk, 1: serial. backend, num_splits: of the
    attention. tile: of the dequantization, None: the device's own. is_step: it adds to the arm before it."""

    name: str
    team: str
    transport: int
    pieces: int
    backend: str
    num_splits: int | None
    tile: Tile | None
    is_step: bool


def prefill_arms(
    *, device: str, pieces: int, has_turing: bool, fastest: str | None, with_peer: bool
) -> list[PrefillArm]:
    """has_turing: whether the Turing kernel serves the model's attention. fastest: the attention backend that was
    measured to be the fastest here; None: there is no choice. with_peer: NCCL with peer access is compared."""
    cuda = device == "cuda"
    backend = "turing" if has_turing else fastest or "auto"
    serial = PrefillArm(
        SERIAL, HOST, BASELINE, 1, backend, 1 if has_turing else None, UNTUNED_TILE if cuda else None, True
    )
    steps = [serial, replace(serial, name=HALVES, pieces=pieces)]
    steps.append(replace(steps[-1], name=transport_step(device), transport=OURS))
    if has_turing:
        steps.append(replace(steps[-1], name=SPLIT_KV, num_splits=None))
    if cuda:
        steps.append(replace(steps[-1], name=TILE, tile=None))
    everything = steps[-1]
    others = []
    if with_peer:
        serially = replace(everything, team=PEER, transport=BASELINE, pieces=1, is_step=False)
        others.append(replace(serially, name=PEER_SERIAL))
    if has_turing and fastest not in (None, "turing"):
        assert fastest is not None
        best = replace(everything, name=f"+ {fastest} attention", backend=fastest)
        steps.append(best)
        others.append(replace(best, name=BEST_SERIAL, transport=BASELINE, pieces=1, is_step=False))
        if with_peer:
            others.append(replace(others[0], name=BEST_PEER_SERIAL, backend=fastest))
    return steps + others


def transport_step(device: str) -> str:
    return "+ copy engines" if device == "cuda" else "+ channel"


def everything(arms: list[PrefillArm]) -> PrefillArm:
    """The step that has all of ours on the kernels that the first one has too."""
    return [arm for arm in arms if arm.is_step and arm.backend == arms[0].backend][-1]
