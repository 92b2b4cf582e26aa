"""The linear layers of a decoder without its attention: what bench_layers.py runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from tpoverlap.model.fused import add_rms_norm, rms_norm, silu_mul

Reduce = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class StackShape:
    """Features as one rank holds them. attention_in: of its QKV projection's result, gate included; attention_out: of
    the output projection's input, at most half of that; gate_up: both halves of the MLP."""

    hidden: int
    attention_in: int
    attention_out: int
    gate_up: int


SHAPES = {"27b": StackShape(5120, 7168, 3072, 17408), "tiny": StackShape(64, 96, 32, 128)}
EPS = 1e-6


class Layer:
    """One pre-norm layer on this rank. Its two parts take normalized hidden states and return what the ranks'
    all-reduce then adds up. Norms, residual sums and activations are one launch each, as in the library's decoder."""

    def __init__(self, shape: StackShape, dtype: torch.dtype, generator: torch.Generator) -> None:
        def weight(rows: int, columns: int) -> torch.Tensor:
            values = torch.randn(rows, columns, dtype=dtype, device=generator.device, generator=generator)
            return values.mul_(columns**-0.5)

        self.attention_norm, self.mlp_norm = (
            torch.ones(shape.hidden, dtype=dtype, device=generator.device) for _ in range(2)
        )
        self._attention_out = shape.attention_out
        self._attention_in = weight(shape.attention_in, shape.hidden)
        self._out = weight(shape.hidden, shape.attention_out)
        self._gate_up = weight(shape.gate_up, shape.hidden)
        self._down = weight(shape.hidden, shape.gate_up // 2)

    def attention(self, normed: torch.Tensor) -> torch.Tensor:
        """The projections around an attention; its place takes a gated product of the same size."""
        projected = F.linear(normed, self._attention_in)
        return F.linear(silu_mul(projected[:, : 2 * self._attention_out]), self._out)

    def mlp(self, normed: torch.Tensor) -> torch.Tensor:
        return F.linear(silu_mul(F.linear(normed, self._gate_up)), self._down)


class LayerStack:
    """Layers with random weights, other ones on each rank. inputs are hidden states [tokens, hidden]."""

    def __init__(self, shape: StackShape, num_layers: int, dtype: torch.dtype, device: torch.device, rank: int) -> None:
        generator = torch.Generator(device).manual_seed(1000 + rank)
        self.layers = [Layer(shape, dtype, generator) for _ in range(num_layers)]

    def forward(self, hidden: torch.Tensor, reduce: Reduce) -> torch.Tensor:
        normed = rms_norm(hidden, self.layers[0].attention_norm, EPS)
        for layer, following in zip(self.layers, [*self.layers[1:], None], strict=True):
            hidden, normed = add_rms_norm(hidden, reduce(layer.attention(normed)), layer.mlp_norm, EPS)
            update = reduce(layer.mlp(normed))
            if following is None:
                return hidden + update
            hidden, normed = add_rms_norm(hidden, update, following.attention_norm, EPS)
        return hidden

    def attention_alone(self, pieces: Sequence[torch.Tensor]) -> None:
        """What all layers compute up to their first all-reduce, piece after piece as in a split run."""
        for layer in self.layers:
            for piece in pieces:
                layer.attention(add_rms_norm(piece, piece, layer.attention_norm, EPS)[1])

    def mlp_alone(self, pieces: Sequence[torch.Tensor]) -> None:
        """The same from there up to the second."""
        for layer in self.layers:
            for piece in pieces:
                layer.mlp(add_rms_norm(piece, piece, layer.mlp_norm, EPS)[1])
