"""Whether the results hold: against transformers' own forward, and between two ways of running the job."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from job_world import World
from prefill_passes import Gap, Pass
from prefill_setup import Request

from tpoverlap.attention import BlockTables
from tpoverlap.errors import TpOverlapError
from tpoverlap.model.checkpoint import WeightFormat
from tpoverlap.model.decoder import Decoder
from tpoverlap.model.reference import load_reference
from tpoverlap.model.runner import Runner

_CHECKED_TOKENS = 512
_BLOCK = 128


class CheckFailedError(TpOverlapError):
    """Results differ by more than rounding explains."""


def tolerance(dtype: torch.dtype, largest_logit: float) -> float:
    """How far two logits may lie apart that were computed in ``dtype`` in different orders.

    FP32: 1e-3. The others: a part of the largest logit, three to four times what SmolLM2-135M shows (0.3 % in FP16,
    4 % in BF16, whose steps at its largest logits are 0.25).
    """
    return {torch.float32: 1e-3, torch.float16: 0.01 * largest_logit, torch.bfloat16: 0.15 * largest_logit}[dtype]


def check_against_transformers(
    world: World, model: Decoder, tables: BlockTables, request: Request, weights: WeightFormat
) -> str:
    """Compares the logits of the prompt's first tokens with those that transformers computes on rank 0.

    Returns the finding as a sentence. Errors: CheckFailedError on rank 0, which the other ranks see as JobError.
    """
    ids = request.prompt[:_CHECKED_TOKENS]

    def reference() -> torch.Tensor:
        with torch.inference_mode():
            whole = load_reference(request.model, weights=weights, device=model.device)
            return whole(torch.tensor([ids], device=model.device)).logits[0].float()

    expected = world.on_first(reference)
    runner = Runner(model, tables, [ids])
    blocks = [model.logits(rows) for chunk in runner.prefill(len(ids)) for rows in chunk.hidden.split(_BLOCK)]
    runner.free()

    def compare() -> str:
        assert expected is not None  # rank 0 has it
        gaps = [(a.float() - b).abs().max() for a, b in zip(blocks, expected.split(_BLOCK), strict=True)]
        allowed = tolerance(model.dtype, float(expected.abs().max()))
        finding = (
            f"logits of {len(ids)} tokens differ from transformers' by at most {float(torch.stack(gaps).max()):.2g} "
            f"({weights}, tolerance {allowed:.2g})"
        )
        if not torch.stack(gaps).max() <= allowed:  # a NaN is no agreement
            raise CheckFailedError(f"check failed: {finding}")
        return finding

    return world.share(world.on_first(compare))


def check_numbers(world: World, passes: Sequence[Pass]) -> None:
    """Whether every pass gave logits that are numbers. Errors: as :func:`check_against_transformers`."""

    def check() -> None:
        broken = [one.name for one in passes if math.isnan(one.perplexity)]
        if broken:
            raise CheckFailedError(
                f"the logits of {' and '.join(broken)} are not numbers: the weights are damaged, or too large for "
                "their dtype; try --weights bf16 or fp32"
            )

    world.on_first(check)


def check_agreement(world: World, passes: Sequence[Pass], gap: Gap, dtype: torch.dtype) -> str:
    """Whether both ways of running the job gave the same logits, with this rank's ``gap``, and the same tokens.

    Returns the finding as a sentence. Errors: as :func:`check_against_transformers`. Tokens that differ are an error
    in FP32 only: candidates closer than half precision resolves may change places.
    """
    gaps = world.gather(gap)

    def compare() -> str:
        assert gaps is not None  # rank 0 has them
        difference = max(part.difference for part in gaps)
        allowed = tolerance(dtype, max(part.magnitude for part in gaps))
        same_tokens = passes[0].generated == passes[1].generated
        finding = (
            f"{passes[0].name} and {passes[1].name}: logits differ by at most {difference:.2g} "
            f"(tolerance {allowed:.2g}), generated tokens are {'the same' if same_tokens else 'not the same'}"
        )
        if not difference <= allowed or (dtype == torch.float32 and not same_tokens):
            raise CheckFailedError(f"comparison failed: {finding}")
        return finding

    return world.share(world.on_first(compare))
