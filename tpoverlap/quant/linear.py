"""A linear layer with an NVFP4 weight."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tpoverlap.quant.nvfp4 import NVFP4Tensor, dequantize, small_batch
from tpoverlap.quant.nvfp4.dispatch import DTYPES
from tpoverlap.quant.workspace import DequantWorkspace

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


class NVFP4Linear(nn.Module):
    """y = x @ W.T + bias with W [N, K] held in NVFP4, for inference.

    x: [..., K] in the compute dtype ``dtype`` (FP16, BF16 or FP32). bias: [N] or None, kept in ``dtype``. The weight is
    dequantized into ``workspace``, which the layers of a model share, and the dense GEMM runs on it; layers given no
    workspace make their own. On CUDA, inputs of up to 8 rows take a kernel that reads the 4-bit weight once instead
    (:mod:`tpoverlap.quant.nvfp4.small_batch`), where it supports them. Where x requires a gradient, and in a
    torch.compile'd model, the weight is dequantized into a tensor of its own.

    Buffers: codes, scales, global_scale and bias. Moving the module moves them; ``half()``, ``to(dtype)`` and the like
    leave their dtypes alone, since the format fixes them. Shard by slicing the weight: :meth:`shard_rows` and
    :meth:`shard_columns`.

    Raises ValueError for a bias, an input or a dtype that does not fit.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    global_scale: torch.Tensor
    bias: torch.Tensor | None

    def __init__(
        self,
        weight: NVFP4Tensor,
        bias: torch.Tensor | None = None,
        *,
        dtype: torch.dtype = torch.float16,
        workspace: DequantWorkspace | None = None,
    ) -> None:
        super().__init__()
        if dtype not in DTYPES:
            raise ValueError(f"compute dtype {dtype} is not supported: give one of {', '.join(map(str, DTYPES))}")
        if bias is not None and tuple(bias.shape) != weight.shape[:1]:
            raise ValueError(f"bias is {list(bias.shape)}; a weight {list(weight.shape)} takes [{weight.shape[0]}]")
        self.out_features, self.in_features = weight.shape
        self.dtype = dtype
        self.workspace = workspace if workspace is not None else DequantWorkspace()
        self._weight: tuple[torch.Tensor, torch.Tensor, torch.Tensor, NVFP4Tensor] | None = None
        self.register_buffer("codes", weight.codes)
        self.register_buffer("scales", weight.scales)
        self.register_buffer("global_scale", weight.global_scale)
        self.register_buffer("bias", None if bias is None else bias.detach().to(weight.device, dtype))

    @property
    def weight(self) -> NVFP4Tensor:
        """The quantized weight; shares the buffers."""
        # A module's attributes take ten times as long.
        held: dict[str, Any] = self._buffers
        codes, scales, global_scale = held["codes"], held["scales"], held["global_scale"]
        known = self._weight
        if known is None or known[0] is not codes or known[1] is not scales or known[2] is not global_scale:
            weight = NVFP4Tensor(codes, scales, global_scale, (self.out_features, self.in_features))
            known = self._weight = (codes, scales, global_scale, weight)
        return known[3]

    def shard_rows(self, start: int, stop: int) -> NVFP4Linear:
        """The layer that computes outputs [start, stop) (column-parallel): those rows of the weight and of the bias."""
        bias = None if self.bias is None else self.bias[start:stop]
        return NVFP4Linear(self.weight.slice_rows(start, stop), bias, dtype=self.dtype, workspace=self.workspace)

    def shard_columns(self, start: int, stop: int) -> NVFP4Linear:
        """The layer that takes inputs [start, stop) and gives partial sums to be all-reduced (row-parallel).

        Cut on group borders, at multiples of 16. The bias belongs to the sum, so only the shard from column 0 keeps it.
        """
        bias = self.bias if start == 0 else None
        return NVFP4Linear(self.weight.slice_columns(start, stop), bias, dtype=self.dtype, workspace=self.workspace)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.dtype != self.dtype or x.shape[-1:] != (self.in_features,):
            raise ValueError(
                f"input is {x.dtype} {list(x.shape)}; this layer takes {self.dtype} [..., {self.in_features}]"
            )
        if torch.compiler.is_compiling():
            # What the workspace holds is no part of a traced graph, so a graph must not depend on it.
            weight = NVFP4Tensor(self.codes, self.scales, self.global_scale, (self.out_features, self.in_features))
            return nn.functional.linear(x, dequantize(weight, self.dtype), self.bias)
        weight = self.weight
        if torch.is_grad_enabled() and x.requires_grad:
            dense = dequantize(weight, self.dtype)  # backward reads it after the workspace has moved on
        elif x.numel() <= small_batch.MAX_ROWS * self.in_features and small_batch.rejection(x, weight) is None:
            return small_batch.linear(x, weight, self.bias)
        else:
            dense = self.workspace.dense(weight, self.dtype)
        return nn.functional.linear(x, dense, self._buffers["bias"])

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={self.bias is not None}, dtype={self.dtype}"
        )

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> NVFP4Linear:
        self._weight = None  # it would keep the memory that a move leaves
        # As integers the buffers pass through dtype casts unchanged, and through device moves like any other.
        return super()._apply(lambda t: fn(t.view(_BITS[t.element_size()])).view(t.dtype), recurse)
