"""Loading one rank's part of a decoder from a checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Literal, get_args

import torch

from tpoverlap.errors import ConfigError, UnsupportedError
from tpoverlap.model.config import DecoderConfig, load_config
from tpoverlap.model.decoder import Decoder
from tpoverlap.model.layers import MLP, Attention, DecoderLayer, Group, RMSNorm, RowParallel
from tpoverlap.model.linears import (
    DenseFactory,
    LinearFactory,
    NVFP4Factory,
    Part,
    Span,
    head_spans,
    range_span,
    read_rows,
)
from tpoverlap.model.nvfp4_checkpoint import NVFP4CheckpointFactory, NVFP4Source
from tpoverlap.model.open_source import open_source
from tpoverlap.model.sharding import INTERMEDIATE_MULTIPLE, shard_heads, shard_range
from tpoverlap.model.tensor_source import TensorSource
from tpoverlap.quant.nvfp4.format import GROUP

WeightFormat = Literal["fp32", "bf16", "fp16", "nvfp4"]

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def load_decoder(
    path: str | Path,
    *,
    weights: WeightFormat = "nvfp4",
    group: Group | None = None,
    device: torch.device | str = "cpu",
    config: DecoderConfig | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Decoder:
    """Loads this rank's part of the model at ``path``, a Hugging Face folder (safetensors) or a GGUF file.

    weights: the dtype to load in, or ``"nvfp4"``: the linear layers of attention and MLP are quantized, embeddings,
    norms and the output projection stay in the compute dtype (see :func:`compute_dtype`). Of a checkpoint that stores
    weights in NVFP4 (nvidia-modelopt, compressed-tensors), ``"nvfp4"`` takes them as they are and leaves the others
    dense, and a dtype dequantizes them. group: the ranks that share the model; None: this process has it all.
    config: that of the checkpoint, where the caller has read it already.
    progress: called with layers done and layers in all. No collective: ranks may load at their own pace.

    Errors: ConfigError for a path, a tensor or a value that does not fit; UnsupportedError as
    :func:`tpoverlap.model.config.load_config`, and for NVFP4 where hidden or head sizes are no multiples of 16.
    """
    if weights not in get_args(WeightFormat):
        raise ConfigError(f"weights={weights!r} is not supported: give one of {', '.join(get_args(WeightFormat))}")
    config = config or load_config(path)
    if weights == "nvfp4" and (config.hidden_size % GROUP or config.head_dim % GROUP):
        raise UnsupportedError(
            f"NVFP4 with hidden_size={config.hidden_size} and head_dim={config.head_dim} is not supported: "
            f"both must be multiples of {GROUP}; load the weights as fp32, bf16 or fp16"
        )
    source = open_source(path)
    check_tensors(source, config, path)
    device = torch.device(device)
    dtype = compute_dtype(weights, device)
    factory: LinearFactory
    if weights != "nvfp4":
        factory = DenseFactory(source, dtype, device)
    elif isinstance(source, NVFP4Source):
        factory = NVFP4CheckpointFactory(source, dtype, device)
    else:
        factory = NVFP4Factory(source, dtype, device)
    return _Loader(config, source, factory, group, dtype, device).decoder(progress or (lambda done, total: None))


def compute_dtype(weights: WeightFormat, device: torch.device) -> torch.dtype:
    """What activations are computed in. NVFP4: FP32 on CPUs, BF16 on GPUs that have it (8.0 and newer), else FP16."""
    if weights != "nvfp4":
        return _DTYPES[weights]
    if device.type == "cpu":
        return torch.float32
    return torch.bfloat16 if torch.cuda.get_device_capability(device) >= (8, 0) else torch.float16


class _Loader:
    """Reads the tensors of one rank, layer by layer."""

    def __init__(
        self,
        config: DecoderConfig,
        source: TensorSource,
        factory: LinearFactory,
        group: Group | None,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        rank, ranks = (0, 1) if group is None else (group.rank_in_group, group.world_size)
        self.config = config
        self.source = source
        self.factory = factory
        self.group = group if ranks > 1 else None
        self.dtype = dtype
        self.device = device
        self.heads = shard_heads(config.num_query_heads, config.num_kv_heads, ranks)[rank]
        self.intermediate = shard_range(config.intermediate_size, ranks, rank, multiple=INTERMEDIATE_MULTIPLE)
        self.vocab = shard_range(config.vocab_size, ranks, rank)

    def decoder(self, progress: Callable[[int, int], None]) -> Decoder:
        layers = []
        for index in range(self.config.num_layers):
            progress(index, self.config.num_layers)
            layers.append(self.layer(f"model.layers.{index}"))
        embedding = self.whole("model.embed_tokens.weight")
        vocab = slice(self.vocab.start, self.vocab.stop)
        if self.config.tied_embeddings:
            lm_head = embedding[vocab]
        else:
            span = Span(self.vocab.start, self.vocab.stop)
            lm_head = read_rows(self.source, Part("lm_head.weight", (span,)), self.dtype, self.device)
        norm = self.norm("model.norm")
        progress(self.config.num_layers, self.config.num_layers)
        return Decoder(self.config, self.group, embedding, layers, norm, lm_head, self.vocab)

    def layer(self, prefix: str) -> DecoderLayer:
        return DecoderLayer(
            self.norm(f"{prefix}.input_layernorm"),
            self.attention(f"{prefix}.self_attn"),
            self.norm(f"{prefix}.post_attention_layernorm"),
            self.mlp(f"{prefix}.mlp"),
        )

    def attention(self, prefix: str) -> Attention:
        config, heads = self.config, self.heads
        query_rows = head_spans(heads.query_heads, config.head_dim)
        kv_rows = head_spans(heads.kv_heads, config.head_dim)
        qkv = {f"{prefix}.q_proj": query_rows, f"{prefix}.k_proj": kv_rows, f"{prefix}.v_proj": kv_rows}
        o = self.factory.row_parallel(Part(f"{prefix}.o_proj.weight", query_rows))
        return Attention(
            len(heads.query_heads),
            len(heads.kv_heads),
            config.head_dim,
            qkv=self.column_parallel(qkv, config.qkv_bias),
            q_norm=self.norm(f"{prefix}.q_norm") if config.qk_norm else None,
            k_norm=self.norm(f"{prefix}.k_norm") if config.qk_norm else None,
            o=RowParallel(o, self.whole(f"{prefix}.o_proj.bias") if config.o_bias else None, self.group),
        )

    def mlp(self, prefix: str) -> MLP:
        rows = range_span(self.intermediate)
        down = self.factory.row_parallel(Part(f"{prefix}.down_proj.weight", rows))
        return MLP(
            gate_up=self.column_parallel(
                {f"{prefix}.gate_proj": rows, f"{prefix}.up_proj": rows}, self.config.mlp_bias
            ),
            down=RowParallel(
                down, self.whole(f"{prefix}.down_proj.bias") if self.config.mlp_bias else None, self.group
            ),
        )

    def column_parallel(self, rows: dict[str, tuple[Span, ...]], has_bias: bool) -> torch.nn.Module:
        bias = None
        if has_bias:
            parts = [Part(f"{name}.bias", spans) for name, spans in rows.items()]
            bias = torch.cat([read_rows(self.source, part, self.dtype, self.device) for part in parts])
        return self.factory.column_parallel([Part(f"{name}.weight", spans) for name, spans in rows.items()], bias)

    def norm(self, prefix: str) -> RMSNorm:
        return RMSNorm(self.whole(f"{prefix}.weight"), self.config.rms_norm_eps)

    def whole(self, name: str) -> torch.Tensor:
        shape = self.source.shape(name)
        assert shape is not None  # check_tensors has seen it
        return read_rows(self.source, Part(name, (Span(0, shape[0]),)), self.dtype, self.device)


def check_tensors(source: TensorSource, config: DecoderConfig, path: str | Path) -> None:
    """Errors: ConfigError for the first tensor that is missing or does not fit the configuration."""
    for name, expected in tensor_shapes(config).items():
        shape = source.shape(name)
        if shape is None:
            raise ConfigError(f"{path} has no tensor {name}, which a {config.architecture} model needs")
        if shape != expected:
            raise ConfigError(f"{path}: tensor {name} is {list(shape)}, its configuration says {list(expected)}")


def tensor_shapes(config: DecoderConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor that a checkpoint of ``config`` holds."""
    hidden, intermediate = config.hidden_size, config.intermediate_size
    query, kv = config.num_query_heads * config.head_dim, config.num_kv_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocab_size, hidden)}

    def linear(name: str, rows: int, columns: int, bias: bool) -> None:
        shapes[f"{name}.weight"] = (rows, columns)
        if bias:
            shapes[f"{name}.bias"] = (rows,)

    for layer in (f"model.layers.{index}" for index in range(config.num_layers)):
        shapes[f"{layer}.input_layernorm.weight"] = (hidden,)
        linear(f"{layer}.self_attn.q_proj", query, hidden, config.qkv_bias)
        linear(f"{layer}.self_attn.k_proj", kv, hidden, config.qkv_bias)
        linear(f"{layer}.self_attn.v_proj", kv, hidden, config.qkv_bias)
        linear(f"{layer}.self_attn.o_proj", hidden, query, config.o_bias)
        if config.qk_norm:
            shapes[f"{layer}.self_attn.q_norm.weight"] = (config.head_dim,)
            shapes[f"{layer}.self_attn.k_norm.weight"] = (config.head_dim,)
        shapes[f"{layer}.post_attention_layernorm.weight"] = (hidden,)
        linear(f"{layer}.mlp.gate_proj", intermediate, hidden, config.mlp_bias)
        linear(f"{layer}.mlp.up_proj", intermediate, hidden, config.mlp_bias)
        linear(f"{layer}.mlp.down_proj", hidden, intermediate, config.mlp_bias)
    shapes["model.norm.weight"] = (hidden,)
    if not config.tied_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    return shapes
