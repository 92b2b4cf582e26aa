"""The linear layers of a decoder without its attention: what bench_layers.py runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

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
    """One pre-norm layer on this rank. Its two parts return what the ranks' all-reduce then adds up."""

    def __init__(self, shape: StackShape, dtype: torch.dtype, generator: torch.Generator) -> None:
        def weight(rows: int, columns: int) -> torch.Tensor:
            values = torch.randn(rows, columns, dtype=dtype, device=generator.device, generator=generator)
            return values.mul_(columns**-0.5)

        self._attention_out = shape.attention_out
        self._norms = [torch.ones(shape.hidden, dtype=dtype, device=generator.device) for _ in range(2)]
        self._attention_in = weight(shape.attention_in, shape.hidden)
        self._out = weight(shape.hidden, shape.attention_out)
        self._gate_up = weight(shape.gate_up, shape.hidden)
        self._down = weight(shape.hidden, shape.gate_up // 2)

    def attention(self, hidden: torch.Tensor) -> torch.Tensor:
        """The projections around an attention; its place takes a gated product of the same size."""
        projected = F.linear(_norm(hidden, self._norms[0]), self._attention_in)
        size = self._attention_out
        return F.linear(F.silu(projected[:, size : 2 * size]) * projected[:, :size], self._out)

    def mlp(self, hidden: torch.Tensor) -> torch.Tensor:
        gate, up = F.linear(_norm(hidden, self._norms[1]), self._gate_up).chunk(2, dim=-1)
        return F.linear(F.silu(gate) * up, self._down)


class LayerStack:
    """Layers with random weights, other ones on each rank. inputs are hidden states [tokens, hidden]."""

    def __init__(self, shape: StackShape, num_layers: int, dtype: torch.dtype, device: torch.device, rank: int) -> None:
        generator = torch.Generator(device).manual_seed(1000 + rank)
        self.layers = [Layer(shape, dtype, generator) for _ in range(num_layers)]

    def forward(self, hidden: torch.Tensor, reduce: Reduce) -> torch.Tensor:
        for layer in self.layers:
            hidden = hidden + reduce(layer.attention(hidden))
            hidden = hidden + reduce(layer.mlp(hidden))
        return hidden

    def attention_alone(self, pieces: Sequence[torch.Tensor]) -> None:
        """What all layers compute up to their first all-reduce, piece after piece as in a split run."""
        for layer in self.layers:
            for piece in pieces:
                piece + layer.attention(piece)

    def mlp_alone(self, pieces: Sequence[torch.Tensor]) -> None:
        """The same from there up to the second."""
        for layer in self.layers:
            for piece in pieces:
                piece + layer.mlp(piece)


def _norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return F.rms_norm(x, x.shape[-1:], weight, EPS)
