"""Checkpoints whose weights are stored in NVFP4, as nvidia-modelopt and llm-compressor (compressed-tensors) write them.

Only the weights' quantization is used: activations stay in the compute dtype, so the scales of inputs and caches, which
such checkpoints may carry too, are not read. A rank reads the codes and scales of its own part only.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn

from tpoverlap.errors import ConfigError, UnsupportedError
from tpoverlap.model.linears import DenseFactory, Part
from tpoverlap.model.quantized_format import Convention
from tpoverlap.model.tensor_source import SafetensorsSource
from tpoverlap.quant import DequantWorkspace, NVFP4Linear, nvfp4
from tpoverlap.quant.nvfp4.format import GROUP


class NVFP4Source(SafetensorsSource):
    """The tensors of an NVFP4 checkpoint under the names that an unquantized one has.

    Quantized weights have the shape that they were quantized from. ``rows`` and ``columns`` give their values in FP32;
    ``packed_rows`` and ``packed_columns`` give the weight as it is stored.
    """

    def __init__(self, folder: Path, convention: Convention) -> None:
        super().__init__(folder)
        self.convention = convention
        smoothed = next((name for name in self._files if name.endswith(".pre_quant_scale")), None)
        if smoothed is not None:
            raise UnsupportedError(f"{folder} has the tensor {smoothed}: scaling a layer's input is not supported")

    def is_packed(self, name: str) -> bool:
        """Whether the weight is stored in NVFP4. Errors: UnsupportedError if it is in another scaled format."""
        if self._sibling(name, self.convention.global_scale) in self._files:
            return True
        if self._sibling(name, self.convention.scale) in self._files:
            raise UnsupportedError(f"{name} is quantized, but not as NVFP4: no tensor {self.convention.global_scale}")
        return False

    def shape(self, name: str) -> tuple[int, ...] | None:
        if not self.is_packed(name):
            return super().shape(name)
        codes = super().shape(self._sibling(name, self.convention.codes))
        return None if codes is None else (*codes[:-1], 2 * codes[-1])

    def rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        if not self.is_packed(name):
            return super().rows(name, start, stop)
        return nvfp4.dequantize(self.packed_rows(name, start, stop), torch.float32)

    def columns(self, name: str, start: int, stop: int) -> torch.Tensor:
        if not self.is_packed(name):
            return super().columns(name, start, stop)
        first = start // GROUP * GROUP
        values = nvfp4.dequantize(self.packed_columns(name, first, _whole_groups(stop)), torch.float32)
        return values[:, start - first : stop - first]

    def packed_rows(self, name: str, start: int, stop: int) -> nvfp4.NVFP4Tensor:
        """Rows ``start`` to ``stop`` of a quantized weight. Errors: ConfigError for tensors that are no NVFP4."""
        return self._packed(
            name,
            super().rows(self._sibling(name, self.convention.codes), start, stop),
            super().rows(self._scale_name(name), start, stop),
            slice(start, stop),
        )

    def packed_columns(self, name: str, start: int, stop: int) -> nvfp4.NVFP4Tensor:
        """Columns ``start`` to ``stop``, both multiples of 16, of a quantized weight. Errors as :meth:`packed_rows`."""
        return self._packed(
            name,
            super().columns(self._sibling(name, self.convention.codes), start // 2, stop // 2),
            super().columns(self._scale_name(name), start // GROUP, stop // GROUP),
            slice(None),
        )

    def _packed(self, name: str, codes: torch.Tensor, scales: torch.Tensor, rows: slice) -> nvfp4.NVFP4Tensor:
        key = self._sibling(name, self.convention.global_scale)
        global_scale = self._files[key].get_tensor(key)
        weight_rows = self._weight_shape(name)[0]
        if global_scale.numel() == weight_rows:
            global_scale = global_scale.reshape(-1)[rows]
        elif global_scale.numel() != 1:
            raise self._no_weight(name, f"{key} is {list(global_scale.shape)}, not one number or [{weight_rows}]")
        try:
            return self.convention.convert(codes, scales, global_scale)
        except ValueError as error:
            raise self._no_weight(name, str(error)) from None

    def _scale_name(self, name: str) -> str:
        scale = self._sibling(name, self.convention.scale)
        shape = super().shape(scale)
        if shape is None:
            raise ConfigError(f"the checkpoint has no tensor {scale}, which {name} needs")
        rows, columns = self._weight_shape(name)
        # A slice of a tensor with other groups could have the shape that a slice of ours has.
        if shape != (rows, columns // GROUP):
            raise self._no_weight(name, f"{scale} is {list(shape)}, not {[rows, columns // GROUP]}")
        return scale

    def _weight_shape(self, name: str) -> tuple[int, int]:
        shape = self.shape(name)
        assert shape is not None  # the loader has checked all shapes
        rows, columns = shape
        return rows, columns

    def _no_weight(self, name: str, reason: str) -> ConfigError:
        return ConfigError(f"{name} is no NVFP4 weight of {self.convention.library}: {reason}")

    def _sibling(self, name: str, ending: str) -> str:
        return f"{name.removesuffix('.weight')}.{ending}"


class NVFP4CheckpointFactory:
    """Linear layers with the NVFP4 weights of the checkpoint, unchanged; fused parts keep their own global scales.

    Layers that the checkpoint leaves unquantized, wholly or in one of the parts to be fused, are dense. All layers
    share one dequantization workspace.
    """

    def __init__(self, source: NVFP4Source, dtype: torch.dtype, device: torch.device) -> None:
        self._source = source
        self._dtype = dtype
        self._device = device
        self._dense = DenseFactory(source, dtype, device)
        self._workspace = DequantWorkspace()

    def column_parallel(self, parts: Sequence[Part], bias: torch.Tensor | None) -> nn.Module:
        if not all(self._source.is_packed(part.name) for part in parts):
            return self._dense.column_parallel(parts, bias)
        blocks = []
        for part in parts:
            for span in part.spans:
                block = self._source.packed_rows(part.name, span.start, span.stop).to(self._device)
                nvfp4.check_fits(block, self._dtype, f"{part.name}[{span.start}:{span.stop}]")
                blocks.append(block.pad(block.shape[0] + span.padding, block.shape[1]))
        return NVFP4Linear(nvfp4.concat_rows(blocks), bias, dtype=self._dtype, workspace=self._workspace)

    def row_parallel(self, part: Part) -> nn.Module:
        if not self._source.is_packed(part.name):
            return self._dense.row_parallel(part)
        blocks = []
        for span in part.spans:
            block = self._source.packed_columns(part.name, span.start, span.stop).to(self._device)
            nvfp4.check_fits(block, self._dtype, f"{part.name}[:, {span.start}:{span.stop}]")
            blocks.append(block.pad(block.shape[0], block.shape[1] + span.padding))
        return NVFP4Linear(nvfp4.concat_columns(blocks), dtype=self._dtype, workspace=self._workspace)


def _whole_groups(columns: int) -> int:
    return -(-columns // GROUP) * GROUP
