"""Dense copies of the most recently used quantized weights, shared by the layers of a model."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

import torch

from tpoverlap.errors import ConfigError
from tpoverlap.quant.nvfp4 import NVFP4Tensor, dequantize
from tpoverlap.quant.nvfp4.tiles import Tile


@dataclass
class _Slot:
    storage: torch.Tensor
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
        if weight.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            self.dequantizations += 1
            return dequantize(weight, dtype, tile=self.tile)
        slots = self._streams.setdefault(_stream_key(weight.device), OrderedDict())
        key = (weight.codes.data_ptr(), dtype)
        versions = _versions(weight)
        slot = slots.get(key)
        if slot is not None and slot.source.shape == weight.shape and slot.versions == versions:
            slots.move_to_end(key)
            return slot.dense
        if slot is not None:
            del slots[key]
        elif len(slots) >= self.capacity:
            _, slot = slots.popitem(last=False)
        count = weight.shape[0] * weight.shape[1]
        size = count * dtype.itemsize
        if slot is not None and slot.storage.numel() >= size:
            storage = slot.storage
        else:
            slot = None  # frees the smaller buffer before the larger one is allocated
            with torch.inference_mode(False):  # an inference tensor could not be written outside inference mode
                storage = torch.empty(size, dtype=torch.uint8, device=weight.device)
        dense = storage[:size].view(dtype).view(weight.shape)
        dequantize(weight, dtype, out=dense, tile=self.tile)
        slots[key] = _Slot(storage, dense, weight, versions)
        self.dequantizations += 1
        return dense

    def clear(self) -> None:
        """Forget every weight and free the buffers."""
        self._streams.clear()


def _stream_key(device: torch.device) -> object:
    # The stream's handle alone: its object takes ten times as long.
    return (device, torch._C._cuda_getCurrentRawStream(device.index)) if device.type == "cuda" else device


def _versions(weight: NVFP4Tensor) -> tuple[int, ...]:
    """Identity of the bytes behind a weight: where its three tensors lie and how often each was written.

    The slot keeps the tensors alive, so an address cannot be taken by another weight while it is compared with.
    """
    parts = (weight.codes, weight.scales, weight.global_scale)
    return tuple(x for t in parts for x in (t.data_ptr(), 0 if t.is_inference() else t._version))
