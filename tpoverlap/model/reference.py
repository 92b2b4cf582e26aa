"""The same weights in transformers' own model: what the decoder is checked against."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch

from tpoverlap.model.checkpoint import WeightFormat, check_tensors, compute_dtype, tensor_shapes
from tpoverlap.model.config import from_transformers, load_transformers_config
from tpoverlap.model.linears import Part, Span, quantize_whole, read_rows
from tpoverlap.model.nvfp4_checkpoint import NVFP4Source
from tpoverlap.model.open_source import open_source
from tpoverlap.quant import nvfp4

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@torch.no_grad()
def load_reference(path: str | Path, *, weights: WeightFormat, device: torch.device | str = "cpu") -> PreTrainedModel:
    """transformers' model of the checkpoint at ``path``, whole, with the values that ``load_decoder`` computes with.

    NVFP4 weights are quantized, unless the checkpoint stores them so, and dequantized again. Errors: as
    :func:`tpoverlap.model.checkpoint.load_decoder`.
    """
    from transformers import AutoModelForCausalLM

    stored = load_transformers_config(path)
    config = from_transformers(stored)
    device = torch.device(device)
    dtype = compute_dtype(weights, device)
    source = open_source(path)
    check_tensors(source, config, path)
    model = AutoModelForCausalLM.from_config(stored, dtype=dtype).to(device).eval()
    parameters = dict(model.named_parameters())
    for name, shape in tensor_shapes(config).items():
        if weights == "nvfp4" and not isinstance(source, NVFP4Source) and name.endswith("_proj.weight"):
            quantized = quantize_whole(source, name, dtype, device)
            parameters[name].copy_(nvfp4.dequantize(quantized, dtype)[:, : shape[1]])
        else:
            parameters[name].copy_(read_rows(source, Part(name, (Span(0, shape[0]),)), dtype, device))
    return model
