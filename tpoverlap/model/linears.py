"""A rank's linear layers, cut out of a checkpoint: dense, or quantized to NVFP4.

Column-parallel layers are fused along their outputs (QKV, gate and up); row-parallel ones keep a range of inputs. Both
are described by spans of the checkpoint's rows or columns, so one description serves every weight format.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import nn

from tpoverlap.errors import ConfigError
from tpoverlap.model.sharding import RangeShard
from tpoverlap.model.tensor_source import TensorSource
from tpoverlap.quant import DequantWorkspace, NVFP4Linear, nvfp4
from tpoverlap.quant.nvfp4.format import GROUP


@dataclass(frozen=True)
class Span:
    """Rows or columns ``start`` to ``stop`` of a stored weight, then ``padding`` zero ones."""

    start: int
    stop: int
    padding: int = 0


@dataclass(frozen=True)
class Part:
    """Spans of the stored tensor ``name``, joined in order."""

    name: str
    spans: tuple[Span, ...]


def head_spans(heads: Sequence[int | None], head_dim: int) -> tuple[Span, ...]:
    """One span a head; None gives a zero head."""
    return tuple(
        Span(0, 0, head_dim) if head is None else Span(head * head_dim, (head + 1) * head_dim) for head in heads
    )


def range_span(shard: RangeShard) -> tuple[Span]:
    return (Span(shard.start, shard.stop, shard.size - (shard.stop - shard.start)),)


class LinearFactory(Protocol):
    """Makes the linear layers of one weight format."""

    def column_parallel(self, parts: Sequence[Part], bias: torch.Tensor | None) -> nn.Module:
        """x [tokens, in] -> [tokens, rows of all parts]."""
        ...

    def row_parallel(self, part: Part) -> nn.Module:
        """x [tokens, columns of the part] -> [tokens, out], this rank's part of the sum."""
        ...


class DenseLinear(nn.Module):
    """y = x @ weight.T + bias."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__()
        self.register_buffer("weight", weight)
        self.register_buffer("bias", bias)

    weight: torch.Tensor
    bias: torch.Tensor | None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight, self.bias)


class DenseFactory:
    """Weights in the compute dtype; only the rank's own part is read."""

    def __init__(self, source: TensorSource, dtype: torch.dtype, device: torch.device) -> None:
        self._source = source
        self._dtype = dtype
        self._device = device

    def column_parallel(self, parts: Sequence[Part], bias: torch.Tensor | None) -> nn.Module:
        rows = torch.cat([read_rows(self._source, part, self._dtype, self._device) for part in parts])
        return DenseLinear(rows, bias)

    def row_parallel(self, part: Part) -> nn.Module:
        columns = [
            F.pad(self._source.columns(part.name, span.start, span.stop), (0, span.padding)) for span in part.spans
        ]
        return DenseLinear(to_dtype(torch.cat(columns, dim=1), self._dtype, self._device, part.name), None)


class NVFP4Factory:
    """Weights quantized to NVFP4.

    Each stored tensor is quantized whole and then cut, so that its values do not depend on the number of ranks; parts
    that are fused keep their own global scales, one a row. All layers share one dequantization workspace.
    """

    def __init__(self, source: TensorSource, dtype: torch.dtype, device: torch.device) -> None:
        self._source = source
        self._dtype = dtype
        self._device = device
        self._workspace = DequantWorkspace()

    def column_parallel(self, parts: Sequence[Part], bias: torch.Tensor | None) -> nn.Module:
        blocks = []
        for part in parts:
            whole = quantize_whole(self._source, part.name, self._dtype, self._device)
            blocks += [
                whole.slice_rows(span.start, span.stop).pad(span.stop - span.start + span.padding, whole.shape[1])
                for span in part.spans
            ]
        return NVFP4Linear(nvfp4.concat_rows(blocks), bias, dtype=self._dtype, workspace=self._workspace)

    def row_parallel(self, part: Part) -> nn.Module:
        whole = quantize_whole(self._source, part.name, self._dtype, self._device)
        blocks = []
        for span in part.spans:
            width = span.stop - span.start + span.padding
            stop = -(-span.stop // GROUP) * GROUP  # quantize_whole has padded the last group with zeros
            blocks.append(whole.slice_columns(span.start, stop).pad(whole.shape[0], width))
        return NVFP4Linear(nvfp4.concat_columns(blocks), dtype=self._dtype, workspace=self._workspace)


def quantize_whole(source: TensorSource, name: str, dtype: torch.dtype, device: torch.device) -> nvfp4.NVFP4Tensor:
    """The stored weight [out, in] in NVFP4, ``in`` padded with zeros to whole groups of 16.

    Errors: ConfigError naming the tensor for non-finite values and for values that overflow ``dtype``.
    """
    shape = source.shape(name)
    assert shape is not None  # the loader has checked all shapes
    weight = source.rows(name, 0, shape[0]).to(device)
    try:
        quantized = nvfp4.quantize(F.pad(weight, (0, -shape[1] % GROUP)))
    except ValueError as error:
        raise ConfigError(f"{name}: {error}") from None
    nvfp4.check_fits(quantized, dtype, name)
    return quantized


def read_rows(source: TensorSource, part: Part, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """The part's rows (entries, for a bias) in ``dtype`` on ``device``."""
    blocks = []
    for span in part.spans:
        rows = source.rows(part.name, span.start, span.stop)
        blocks += [rows, rows.new_zeros(span.padding, *rows.shape[1:])]
    return to_dtype(torch.cat(blocks), dtype, device, part.name)


def to_dtype(tensor: torch.Tensor, dtype: torch.dtype, device: torch.device, name: str) -> torch.Tensor:
    """Errors: ConfigError naming the tensor where a finite value overflows ``dtype``."""
    cast = tensor.to(device, dtype).contiguous()
    if dtype == torch.float16 and bool((cast.isinf() & tensor.to(device).isfinite()).any()):
        raise ConfigError(f"{name} has values that overflow FP16: load this checkpoint with weights 'bf16'")
    return cast
