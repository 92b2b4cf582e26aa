"""Decoders with the shapes of real ones and random NVFP4 weights, made on the device in seconds.

Weights are drawn as codes and scales, with the variance that keeps activations of size 1: those that are added to the
residual stream are smaller by the square root of their number, so that hidden states stay finite over any depth.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from tpoverlap.errors import ConfigError
from tpoverlap.microbatch import balance_position
from tpoverlap.model.config import DecoderConfig
from tpoverlap.model.decoder import Decoder
from tpoverlap.model.layers import MLP, Attention, DecoderLayer, Group, RMSNorm, RowParallel
from tpoverlap.model.sharding import shard_range
from tpoverlap.model.token_mixer import Decay, TokenMixer
from tpoverlap.quant import DequantWorkspace, NVFP4Linear
from tpoverlap.quant.nvfp4 import NVFP4Tensor
from tpoverlap.quant.nvfp4.format import E2M1_VALUES, GROUP

# E4M3 bytes of the drawn scales: all values from 0.5 up to, but not including, 2.
_SCALE_BYTES = (0x30, 0x40)
_EPS = 1e-6
_ROPE_BASE = 1e6


@dataclass(frozen=True)
class SyntheticShape:
    """A whole model's sizes. attention_every: one layer in so many has full attention, the last of each group; the
    others have a token mixer with the same projections. gated: attention's results are scaled by a gate."""

    num_layers: int
    hidden: int
    query_heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    attention_every: int = 1
    gated: bool = False
    qk_norm: bool = True

    def with_layers(self, num_layers: int) -> SyntheticShape:
        return replace(self, num_layers=num_layers)

    @property
    def has_states(self) -> bool:
        return self.attention_every > 1

    @property
    def balance_position(self) -> float:
        """Position at which a token's attention costs as much as its linear layers; see ``split_tokens``."""
        projections = self.head_dim * ((2 + self.gated) * self.query_heads + 2 * self.kv_heads)
        weights = self.hidden * (projections + 3 * self.intermediate)
        return self.attention_every * balance_position(weights, self.query_heads, self.head_dim)

    def config(self) -> DecoderConfig:
        frequencies = [_ROPE_BASE ** (-2 * i / self.head_dim) for i in range(self.head_dim // 2)]
        return DecoderConfig(
            architecture="synthetic",
            vocab_size=self.vocab,
            hidden_size=self.hidden,
            intermediate_size=self.intermediate,
            num_layers=self.num_layers,
            num_query_heads=self.query_heads,
            num_kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            rms_norm_eps=_EPS,
            rope_inv_freq=tuple(frequencies),
            qkv_bias=False,
            o_bias=False,
            mlp_bias=False,
            qk_norm=self.qk_norm,
            tied_embeddings=False,
            max_positions=1 << 20,
        )


SHAPES = {
    "qwen3.8-27b": SyntheticShape(64, 5120, 24, 4, 256, 17408, 151936, attention_every=4, gated=True),
    "qwen3-32b": SyntheticShape(64, 5120, 64, 8, 128, 25600, 151936),
    "llama-70b": SyntheticShape(80, 8192, 64, 8, 128, 28672, 128256, qk_norm=False),
    "tiny": SyntheticShape(4, 64, 4, 2, 64, 128, 512, attention_every=2, gated=True),
}


def synthetic_decoder(
    shape: SyntheticShape,
    group: Group,
    *,
    dtype: torch.dtype,
    device: torch.device,
    state_block: int,
    progress: Callable[[], object],
) -> tuple[Decoder, DequantWorkspace]:
    """This rank's part of a model, and the workspace that its layers share. progress: called once a layer.

    Replicated tensors are the same on every rank, sharded ones differ. state_block: tokens that share a state's slot.
    Errors: ConfigError for sizes that do not divide by the number of ranks.
    """
    return _Maker(shape, group, dtype, device, state_block).decoder(progress)


class _Maker:
    def __init__(
        self, shape: SyntheticShape, group: Group, dtype: torch.dtype, device: torch.device, state_block: int
    ) -> None:
        rank, ranks = group.rank_in_group, group.world_size
        if shape.query_heads % ranks or shape.kv_heads % ranks or shape.intermediate % (GROUP * ranks):
            raise ConfigError(
                f"{shape.query_heads} query heads, {shape.kv_heads} KV heads and an MLP of {shape.intermediate} do not "
                f"divide by {ranks} ranks: start another number of them"
            )
        self.shape, self.group, self.dtype, self.device = shape, group, dtype, device
        self.rank, self.ranks = rank, ranks
        self.state_block = state_block
        self.query_heads, self.kv_heads = shape.query_heads // ranks, shape.kv_heads // ranks
        self.workspace = DequantWorkspace()
        self.shared = torch.Generator(device).manual_seed(1)
        self.own = torch.Generator(device).manual_seed(1000 + rank)
        # One factor for each key/value head of the model, as in the retention paper.
        heads = torch.arange(rank * self.kv_heads, (rank + 1) * self.kv_heads, device=device)
        self.decay = Decay(1.0 - torch.exp2(-5.0 - heads))

    def decoder(self, progress: Callable[[], object]) -> tuple[Decoder, DequantWorkspace]:
        shape = self.shape
        layers = []
        for index in range(shape.num_layers):
            layers.append(self.layer(index))
            progress()
        embedding = torch.randn(shape.vocab, shape.hidden, dtype=self.dtype, device=self.device, generator=self.shared)
        vocab = shard_range(shape.vocab, self.ranks, self.rank)
        lm_head = torch.randn(
            vocab.stop - vocab.start, shape.hidden, dtype=self.dtype, device=self.device, generator=self.own
        ).mul_(shape.hidden**-0.5)
        norm = self.norm(shape.hidden)
        return Decoder(shape.config(), self.group, embedding, layers, norm, lm_head, vocab), self.workspace

    def layer(self, index: int) -> DecoderLayer:
        hidden, intermediate = self.shape.hidden, self.shape.intermediate // self.ranks
        has_attention = index % self.shape.attention_every == self.shape.attention_every - 1
        gate_up = self.linear(2 * intermediate, hidden, self.variance(hidden))
        down = self.row_parallel(intermediate)
        return DecoderLayer(
            self.norm(hidden),
            self.attention() if has_attention else self.mixer(),
            self.norm(hidden),
            MLP(gate_up, down),
        )

    def attention(self) -> Attention:
        q_norm, k_norm = (self.norm(self.shape.head_dim) if self.shape.qk_norm else None for _ in range(2))
        return Attention(
            self.query_heads,
            self.kv_heads,
            self.shape.head_dim,
            self.projections(),
            q_norm,
            k_norm,
            self.row_parallel(self.query_heads * self.shape.head_dim),
            output_gate=self.shape.gated,
        )

    def mixer(self) -> TokenMixer:
        return TokenMixer(
            self.query_heads,
            self.kv_heads,
            self.shape.head_dim,
            self.projections(),
            self.norm(self.shape.head_dim),
            self.norm(self.shape.head_dim),
            self.row_parallel(self.query_heads * self.shape.head_dim),
            decay=self.decay,
            state_block=self.state_block,
        )

    def projections(self) -> NVFP4Linear:
        heads = (1 + self.shape.gated) * self.query_heads + 2 * self.kv_heads
        return self.linear(heads * self.shape.head_dim, self.shape.hidden, self.variance(self.shape.hidden))

    def row_parallel(self, columns: int) -> RowParallel:
        variance = self.variance(columns * self.ranks) / (2 * self.shape.num_layers)
        return RowParallel(self.linear(self.shape.hidden, columns, variance), None, self.group)

    @staticmethod
    def variance(inputs: int) -> float:
        return 1.0 / inputs

    def linear(self, rows: int, columns: int, variance: float) -> NVFP4Linear:
        def draw(low: int, high: int, *size: int) -> torch.Tensor:
            return torch.randint(low, high, size, dtype=torch.uint8, device=self.device, generator=self.own)

        scales = draw(*_SCALE_BYTES, rows, columns // GROUP).view(torch.float8_e4m3fn)
        global_scale = torch.tensor(math.sqrt(variance / _mean_square()), device=self.device)
        weight = NVFP4Tensor(draw(0, 256, rows, columns // 2), scales, global_scale, (rows, columns))
        return NVFP4Linear(weight, dtype=self.dtype, workspace=self.workspace)

    def norm(self, size: int) -> RMSNorm:
        return RMSNorm(torch.ones(size, dtype=self.dtype, device=self.device), _EPS)


def _mean_square() -> float:
    """Of a drawn code times a drawn scale."""
    scales = torch.arange(*_SCALE_BYTES, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    return float(torch.tensor(E2M1_VALUES).square().mean() * scales.square().mean())
