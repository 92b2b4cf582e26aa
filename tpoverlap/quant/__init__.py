"""Quantized weights: the NVFP4 format and the linear layer that computes with it."""

from tpoverlap.quant import nvfp4
from tpoverlap.quant.linear import NVFP4Linear
from tpoverlap.quant.workspace import DequantWorkspace

__all__ = ["DequantWorkspace", "NVFP4Linear", "nvfp4"]
