"""The model against loops of layers on two H200 without peer access, in milliseconds of one run.

16 layers of a 27B-class decoder's GEMMs, no attention. Given: the compute of the halves alone, the copy engines'
all-reduces of the halves alone, and NCCL's by bytes. Predicted: two halves on the copy engines, with nothing fitted,
and on NCCL, with one number fitted on the first loop: the factor on NCCL's all-reduces beside compute.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from predict_model import SHAPES, VALUE_BYTES, Predictor
from predict_tables import Curve, DeviceTables, PointAttention, Transport

LAYERS, PIECES, MIXER_SHARE = 16, 2, 0.28
NCCL, COPY_ENGINES = "NCCL", "copy engines"
NCCL_POINTS = ((8_192_000.0, 308e-6), (16_384_000.0, 591e-6), (float(32 << 20), 1180e-6))
GEMM_BESIDE_NCCL = 0.116


@dataclass(frozen=True)
class Loop:
    """Milliseconds. compute, communication: of the halves, each alone; the latter on copy engines."""

    tokens: int
    compute: float
    communication: float
    halves_on_nccl: float
    halves_on_copy_engines: float


LOOPS = (
    Loop(1600, 14.7, 17.5, 26.1, 19.6),
    Loop(2048, 17.9, 21.3, 34.0, 23.9),
    Loop(4096, 36.1, 38.1, 67.0, 45.8),
)
_SHAPE = replace(SHAPES["qwen3.8-27b"], layers=LAYERS, attention_every=0)


def tables(nccl_beside_compute: float) -> DeviceTables:
    """What the loops' parts give. Hand-overs are none: the compute of the halves was timed with them apart."""
    parts = PIECES * LAYERS * 1e3

    def compute(share: float) -> Curve:
        return Curve(tuple((loop.tokens / PIECES, loop.compute * share / parts) for loop in LOOPS))

    copies = Curve(
        tuple((loop.tokens / PIECES * _SHAPE.hidden * VALUE_BYTES, loop.communication / (2 * parts)) for loop in LOOPS)
    )
    return DeviceTables(
        name="h200-without-peer-access",
        sources=("loops of 16 layers on two H200: see launch/predict_h200.py",),
        shape="qwen3.8-27b",
        ranks=2,
        mixer=compute(MIXER_SHARE),
        mlp=compute(1 - MIXER_SHARE),
        dequantization=None,
        attention=PointAttention(((2048, 150_000, 15.5e-3),)),  # FlashAttention-2; no layer of the loops has any
        transports={
            NCCL: Transport(
                Curve(NCCL_POINTS),
                nccl_beside_compute,
                {"linear": GEMM_BESIDE_NCCL, "dequantization": GEMM_BESIDE_NCCL, "attention": GEMM_BESIDE_NCCL},
            ),
            COPY_ENGINES: Transport(copies, 1.0, {"linear": 0.0, "dequantization": 0.0, "attention": 0.0}),
        },
        hand_over=0.0,
    )


def predicted_ms(loop: Loop, transport: str, nccl_beside_compute: float = 1.0) -> float:
    predictor = Predictor(_SHAPE, tables(nccl_beside_compute))
    return predictor.prefill(transport, loop.tokens, loop.tokens, PIECES).seconds * 1e3


def fitted_nccl() -> float:
    """The factor with which the first loop's halves on NCCL take as long as they did."""
    low, high = 1.0, 2.0
    while high - low > 1e-4:
        middle = (low + high) / 2
        slower = predicted_ms(LOOPS[0], NCCL, middle) < LOOPS[0].halves_on_nccl
        low, high = (middle, high) if slower else (low, middle)
    return low
