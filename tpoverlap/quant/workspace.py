"""Dense copies of the most recently used quantized weights, shared by the layers of a model."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import torch

from tpoverlap.errors import ConfigError
from tpoverlap.quant.nvfp4 import NVFP4Tensor, dequantize
from tpoverlap.quant.nvfp4.tiles import Tile


class _Buffer:
    """Bytes that take one dense weight at a time, and the tensors that stand for them."""

    def __init__(self, size: int, device: torch.device) -> None:
        with torch.inference_mode(False):  # an inference tensor could not be written outside inference mode
            self._bytes = torch.empty(size, dtype=torch.uint8, device=device)
        self.size = size
        self._views: dict[tuple[torch.dtype, tuple[int, int]], torch.Tensor] = {}

    def shaped(self, dtype: torch.dtype, shape: tuple[int, int]) -> torch.Tensor:
        """A model's weights have few shapes, and three views take as long as a launch."""
        view = self._views.get((dtype, shape))
        if view is None:
            with torch.inference_mode(False):
                view = self._bytes[: shape[0] * shape[1] * dtype.itemsize].view(dtype).view(shape)
            self._views[dtype, shape] = view
        return view


@dataclass(slots=True)
class _Slot:
    buffer: _Buffer
    dense: torch.Tensor
    source: NVFP4Tensor
    versions: tuple[int, ...]


class DequantWorkspace:
    """Dequantizes weights into a few reused buffers and keeps the last ``capacity`` of them.

    The pieces of a split batch take turns at every collective, so piece 1 asks for the same weights right after
    piece 0 did: the two linears of a segment (QKV and output, gate-up and down projection) with the default capacity of
    2 are dequantized once per layer and batch. ``dequantizations`` counts the calls that had to dequantize. ``tile``:
    as :func:`~tpoverlap.quant.nvfp4.dequantize` takes it.

    A tensor that :meth:`dense` returns is valid for work that its stream is given before ``capacity`` further weights
    are asked for on it; use it at once. Buffers belong to one stream each, so two streams never share one. A weight
    changed in place is noticed by its version counter, which stands still under ``torch.inference_mode``: call
    :meth:`clear` after changing one there. While a CUDA graph is captured, every call dequantizes into memory of the
    graph's own pool, since a replay would overwrite a shared buffer unseen.
    """

    def __init__(self, capacity: int = 2) -> None:
        if not isinstance(capacity, int) or isinstance(capacity, bool) or capacity < 1:
            raise ConfigError(f"capacity={capacity!r} is not supported: give an integer >= 1")
        self.capacity = capacity
        self.dequantizations = 0
        self.tile: Tile | None = None
        self._streams: dict[object, OrderedDict[tuple[int, torch.dtype], _Slot]] = {}

    def dense(self, weight: NVFP4Tensor, dtype: torch.dtype) -> torch.Tensor:
        """The weight's values [N, K] in ``dtype``, dequantized unless they are still here. Do not write to them."""
        codes = weight.codes
        if codes.is_cuda:
            if torch.cuda.is_current_stream_capturing():
                self.dequantizations += 1
                return dequantize(weight, dtype, tile=self.tile)
            ordinal = codes.get_device()
            # The stream's handle alone: its object takes ten times as long.
            stream: object = (ordinal, torch._C._cuda_getCurrentRawStream(ordinal))
        else:
            stream = codes.device
        slots = self._streams.get(stream)
        if slots is None:
            slots = self._streams[stream] = OrderedDict()
        key = (codes.data_ptr(), dtype)
        versions = _versions(weight)
        slot = slots.get(key)
        if slot is not None and slot.versions == versions and slot.source.shape == weight.shape:
            slots.move_to_end(key)
            return slot.dense
        if slot is not None:
            del slots[key]
        elif len(slots) >= self.capacity:
            _, slot = slots.popitem(last=False)
        size = weight.shape[0] * weight.shape[1] * dtype.itemsize
        if slot is not None and slot.buffer.size >= size:
            buffer = slot.buffer
        else:
            slot = None  # frees the smaller buffer before the larger one is allocated
            buffer = _Buffer(size, weight.device)
        dense = buffer.shaped(dtype, weight.shape)
        dequantize(weight, dtype, out=dense, tile=self.tile)
        slots[key] = _Slot(buffer, dense, weight, versions)
        self.dequantizations += 1
        return dense

    def clear(self) -> None:
        """Forget every weight and free the buffers."""
        self._streams.clear()

    def __reduce__(self) -> tuple[Any, ...]:
        # Copied or saved with its layers it is an empty one: dense weights would only make them larger.
        return DequantWorkspace, (self.capacity,), {"tile": self.tile}


def _versions(weight: NVFP4Tensor) -> tuple[int, ...]:
    """Identity of the bytes behind a weight: where its three tensors lie and how often each was written.

    The slot keeps the tensors alive, so an address cannot be taken by another weight while it is compared with.
    """
    codes, scales, global_scale = weight.codes, weight.scales, weight.global_scale
    return (
        codes.data_ptr(),
        scales.data_ptr(),
        global_scale.data_ptr(),
        _writes(codes),
        _writes(scales),
        _writes(global_scale),
    )


def _writes(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version
