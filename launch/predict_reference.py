"""The reference: two Quadro RTX 8000 without peer access, a 27B NVFP4 model in chunks of 1600 tokens.

Everything here but one number follows from figures that were reported for that machine:

- 150k tokens run serially took, per card: attention 47 s, from which a key in a wave of attention blocks; NCCL 96.4 s,
  an all-reduce of a chunk (16,384,000 B); other kernels 64.0 s, the projections and what goes with them, after
  dequantization is taken off.
- 8,192,000 B, half a chunk, take 3.15 ms by copy engines and 3.93 ms by NCCL.
- Attention blocks hold 128 query rows, one block fills one of 72 multiprocessors, and split-KV cuts the keys into 1 to
  4 parts.
- Dequantization takes 0.230, 0.075, 0.496 and 0.250 ms for a layer's four matrices; it ran at 200 GB/s before its tile
  was chosen.
- Beside NCCL dequantization takes 7 to 37 % longer (middle: 22), a GEMM loop 18.2 %, and so then does attention; beside
  copy engines dequantization 4 to 11 % (middle: 7.5), the largest GEMM 0.3 %, and so attention.
- A hand-over takes 10 to 36 us (middle: 23).

Assumed, because no figure says so: NCCL beside compute is slower by as much as it slows GEMMs (both use the same
multiprocessors); every piece dequantizes anew; "other kernels" are proportional to the projections' weights.

**The free parameter** is what smaller projections cost: a projection of n tokens takes as long as n +
``half_tokens`` tokens at full speed (Hockney's half-performance length). It is fitted on one figure of
:data:`MEASURED_S`, :data:`FITTED`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Literal

from predict_model import SHAPES, Prediction, Predictor, chunks
from predict_tables import Curve, Dequantization, DeviceTables, Transport, WaveAttention

NAME, SHAPE, RANKS, CHUNK = "quadro-rtx-8000", "qwen3.8-27b", 2, 1600
NCCL, COPY_ENGINES = "NCCL", "copy engines"

# Where the time of a serial prefill of 150k tokens went.
ACCOUNTED_TOKENS, ATTENTION_S, NCCL_S, OTHER_S = 150_000, 47.0, 96.4, 64.0
HALF_CHUNK_BYTES, HALF_NCCL_S, HALF_COPY_ENGINES_S = 8_192_000, 3.93e-3, 3.15e-3
SLOTS, BLOCK_ROWS, MAX_SPLITS = 72, 128, 4
DEQUANTIZATION_S = ((0.230 + 0.075) * 1e-3, (0.496 + 0.250) * 1e-3)  # of a layer's mixer and MLP
# 0.5625 bytes in and 2 out for each weight, at 200 GB/s.
UNTUNED_DEQUANTIZATION_S = ((8192 + 2560) * 5120 * 2.5625 / 200e9, (17408 + 8704) * 5120 * 2.5625 / 200e9)
GEMM_BESIDE_NCCL = 0.182
PEAK_FLOPS = 130.5e12  # dense FP16 products

# Seconds of a prefill, by prompt length. A range that was given counts with its middle.
LENGTHS = (29_000, 184_000, 250_000)
MEASURED_S = {
    "serial": (33.0, 269.05, 402.27),
    "+ overlap on NCCL": ((28.5 + 29.0) / 2, 260.28, 400.14),
    "+ copy engines": ((21.7 + 21.9) / 2, 216.81, 341.66),
    "+ split-KV attention": ((21.1 + 21.2) / 2, 185.25, 283.50),
    "+ dequantization tile": ((19.1 + 19.3) / 2, 174.34, 269.06),
}
FITTED = ("+ dequantization tile", 29_000)


@dataclass(frozen=True)
class Assumed:
    """What no figure says. nccl_beside_compute: factor on an all-reduce's time. dequantized_per: piece or chunk."""

    nccl_beside_compute: float = 1 + GEMM_BESIDE_NCCL
    dequantized_per: Literal["piece", "chunk"] = "piece"


@dataclass(frozen=True)
class Step:
    """One row of the table: what runs."""

    name: str
    tables: DeviceTables
    transport: str
    num_pieces: int

    def predict(self, tokens: int) -> Prediction:
        predictor = Predictor(SHAPES[SHAPE], self.tables, RANKS)
        return predictor.prefill(self.transport, tokens, CHUNK, self.num_pieces)


def steps(tables: DeviceTables) -> list[Step]:
    """The steps of the table, whose last one has everything that ``tables``, from :func:`tables_with`, say."""
    assert isinstance(tables.attention, WaveAttention)  # as tables_with makes it
    assert tables.dequantization is not None
    untuned = replace(tables, dequantization=Dequantization(*UNTUNED_DEQUANTIZATION_S, tables.dequantization.per))
    unsplit = replace(untuned, attention=replace(tables.attention, max_splits=1))
    runs = [
        (unsplit, NCCL, 1),
        (unsplit, NCCL, 2),
        (unsplit, COPY_ENGINES, 2),
        (untuned, COPY_ENGINES, 2),
        (tables, COPY_ENGINES, 2),
    ]
    return [Step(name, *run) for name, run in zip(MEASURED_S, runs, strict=True)]


@dataclass(frozen=True)
class Figure:
    """One figure of :data:`MEASURED_S` and what is predicted for it, in seconds."""

    step: str
    tokens: int
    measured_s: float
    predicted_s: float

    @property
    def error(self) -> float:
        """0.1: predicted 10 % longer than measured."""
        return self.predicted_s / self.measured_s - 1


@dataclass(frozen=True)
class Fit:
    """The parameter's value, and the tables with it. on: the figure that it was fitted on."""

    on: tuple[str, int]
    half_tokens: float
    tables: DeviceTables

    @cached_property
    def figures(self) -> list[Figure]:
        """All of them, the fitted one too."""
        return [
            Figure(step.name, tokens, measured_s, step.predict(tokens).seconds)
            for step in steps(self.tables)
            for tokens, measured_s in zip(LENGTHS, MEASURED_S[step.name], strict=True)
        ]

    @property
    def others(self) -> list[Figure]:
        return [figure for figure in self.figures if (figure.step, figure.tokens) != self.on]

    @property
    def full_speed_flops(self) -> float:
        """What the projections reach on one card with ever more tokens. Above :data:`PEAK_FLOPS` no card could."""
        shape, tables = SHAPES[SHAPE], self.tables
        seconds = sum(part.at(2 * CHUNK) - part.at(CHUNK) for part in (tables.mixer, tables.mlp))
        return 2 * (shape.mixer_weights + shape.mlp_weights) / RANKS * CHUNK / seconds


@lru_cache
def fitted(step: str = FITTED[0], tokens: int = FITTED[1], assumed: Assumed = Assumed()) -> Fit:
    """With the ``half_tokens`` that make the prediction of one figure exact.

    step: one that overlaps; the serial one does not depend on the parameter. ValueError for that one, and where no
    value from 0 to 16 chunks gives the figure.
    """
    measured_s = MEASURED_S[step][LENGTHS.index(tokens)]
    at = list(MEASURED_S).index(step)

    def error_s(half_tokens: float) -> float:
        return steps(tables_with(half_tokens, assumed))[at].predict(tokens).seconds - measured_s

    low, high = 0.0, 16.0 * CHUNK
    if steps(tables_with(0, assumed))[at].num_pieces == 1 or error_s(low) > 0 or error_s(high) < 0:
        raise ValueError(f"no cost of smaller projections explains {measured_s} s for {step!r} at {tokens} tokens")
    while high - low > 0.5:  # half a token: 1e-4 of the time
        middle = (low + high) / 2
        low, high = (middle, high) if error_s(middle) < 0 else (low, middle)
    return Fit((step, tokens), low, tables_with(low, assumed))


def tables_with(half_tokens: float, assumed: Assumed = Assumed()) -> DeviceTables:
    """The card's tables; the arguments are what the figures do not say."""
    shape = SHAPES[SHAPE]
    accounted = list(chunks(ACCOUNTED_TOKENS, CHUNK))
    whole_chunks = ACCOUNTED_TOKENS / CHUNK
    attending = sum(shape.has_attention(layer) for layer in range(shape.layers))
    group = shape.q_heads // shape.kv_heads
    waves_keys = sum(
        math.ceil(math.ceil(tokens * group / BLOCK_ROWS) * shape.kv_heads / RANKS / SLOTS) * (context + tokens / 2)
        for context, tokens in accounted
    )
    linear_s = (OTHER_S / shape.layers - len(accounted) * sum(UNTUNED_DEQUANTIZATION_S)) / whole_chunks
    layer_weights = shape.mixer_weights + shape.mlp_weights

    def projections(weights: int) -> Curve:
        chunk_s = linear_s * weights / layer_weights
        twice_s = chunk_s * (2 * CHUNK + half_tokens) / (CHUNK + half_tokens)
        return Curve(((CHUNK, chunk_s), (2 * CHUNK, twice_s)))

    return DeviceTables(
        name=NAME,
        sources=("reported figures of two Quadro RTX 8000: see launch/predict_reference.py",),
        shape=SHAPE,
        ranks=RANKS,
        mixer=projections(shape.mixer_weights),
        mlp=projections(shape.mlp_weights),
        dequantization=Dequantization(*DEQUANTIZATION_S, assumed.dequantized_per),
        attention=WaveAttention(SLOTS, BLOCK_ROWS, MAX_SPLITS, ATTENTION_S / attending / waves_keys),
        transports={
            NCCL: Transport(
                all_reduce=Curve(
                    (
                        (HALF_CHUNK_BYTES, HALF_NCCL_S),
                        (2 * HALF_CHUNK_BYTES, NCCL_S / (2 * shape.layers) / whole_chunks),
                    )
                ),
                beside_compute=assumed.nccl_beside_compute,
                slowdown={
                    "linear": GEMM_BESIDE_NCCL,
                    "dequantization": (0.07 + 0.37) / 2,
                    "attention": GEMM_BESIDE_NCCL,
                },
            ),
            COPY_ENGINES: Transport(
                all_reduce=Curve(((HALF_CHUNK_BYTES, HALF_COPY_ENGINES_S),)),
                beside_compute=1.0,
                slowdown={"linear": 0.003, "dequantization": (0.04 + 0.11) / 2, "attention": 0.003},
            ),
        },
        hand_over=23e-6,
    )
