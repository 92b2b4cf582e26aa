"""Shapes and constants of a dense decoder, taken from a transformers configuration."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from tpoverlap.errors import ConfigError, UnsupportedError
from tpoverlap.model.architectures import SUPPORTED_ARCHITECTURES, check_architecture
from tpoverlap.model.quantized_format import find_convention

if TYPE_CHECKING:
    from transformers import PretrainedConfig


@dataclass(frozen=True)
class DecoderConfig:
    """A dense decoder-only transformer with RMSNorm, rotary positions, grouped-query attention and a SiLU-gated MLP.

    rope_inv_freq: head_dim / 2 inverse frequencies in radians a position, scaling already in them. qkv_bias, o_bias,
    mlp_bias: which linear layers add one. qk_norm: RMSNorm over each query and key head before the rotation.
    tied_embeddings: the output projection is the embedding table. max_positions: longest sequence that the model was
    made for, in tokens.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_query_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_inv_freq: tuple[float, ...]
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    tied_embeddings: bool
    max_positions: int

    @property
    def linear_weights_per_layer(self) -> int:
        """Elements of a layer's projections."""
        attention = 2 * self.head_dim * (self.num_query_heads + self.num_kv_heads)
        return self.hidden_size * (attention + 3 * self.intermediate_size)


def load_config(path: str | Path) -> DecoderConfig:
    """Reads the configuration of a checkpoint: a Hugging Face folder (config.json) or a GGUF file.

    Errors: ConfigError where ``path`` is neither; UnsupportedError as :func:`from_transformers`, and for GGUF files
    that store scaled rotary positions or experts.
    """
    return from_transformers(load_transformers_config(path))


def load_transformers_config(path: str | Path) -> PretrainedConfig:
    """The checkpoint's configuration as transformers has it; errors as :func:`load_config`, but for its features."""
    path = Path(path)
    is_gguf = path.is_file() and path.suffix == ".gguf"
    if not is_gguf and not (path / "config.json").is_file():
        raise ConfigError(
            f"no model at {path}: give a Hugging Face folder (config.json and *.safetensors) or a .gguf file"
        )
    from huggingface_hub.errors import StrictDataclassError  # how transformers rejects field types and values

    from tpoverlap.model.gguf_file import read_gguf_config

    try:
        return read_gguf_config(path) if is_gguf else _read_folder(path)
    except ConfigError:
        raise
    except (StrictDataclassError, ValueError, TypeError, KeyError, AttributeError, ArithmeticError) as error:
        raise ConfigError(f"transformers rejects the configuration of {path}: {' '.join(str(error).split())}") from None


def _read_folder(path: Path) -> PretrainedConfig:
    try:
        stored = json.loads((path / "config.json").read_text(encoding="utf-8"))
        model_type = str(stored["model_type"])
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{path / 'config.json'} is no model configuration ({type(error).__name__}: {error}): give a folder as "
            "Hugging Face's save_pretrained writes it, with config.json, a tokenizer and *.safetensors, or a GGUF file"
        ) from None
    check_architecture(model_type)
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(path)


def from_transformers(config: PretrainedConfig) -> DecoderConfig:
    """Translates a transformers configuration.

    Errors: ConfigError for sizes and constants that no model can have; UnsupportedError for another architecture than
    Llama, Qwen2 and Qwen3, and for what the decoder does not compute: sliding-window layers, activations other than
    SiLU, quantization other than NVFP4, rotary scaling other than ``default``, ``linear`` and ``llama3``, partial
    rotation, an odd head size.
    """
    check_architecture(config.model_type)
    name = SUPPORTED_ARCHITECTURES[config.model_type]
    _check_features(name, config)
    _check_values(name, config)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if head_dim % 2:
        raise UnsupportedError(f"{name} with head_dim={head_dim} is not supported: rotary positions need an even one")
    is_qwen2 = config.model_type == "qwen2"
    attention_bias = bool(getattr(config, "attention_bias", False))
    return DecoderConfig(
        architecture=name,
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_layers=config.num_hidden_layers,
        num_query_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=head_dim,
        rms_norm_eps=config.rms_norm_eps,
        rope_inv_freq=_rope_inv_freq(name, config, head_dim),
        qkv_bias=is_qwen2 or attention_bias,
        o_bias=attention_bias and not is_qwen2,
        mlp_bias=bool(getattr(config, "mlp_bias", False)),
        qk_norm=config.model_type == "qwen3",
        tied_embeddings=bool(config.tie_word_embeddings),
        max_positions=config.max_position_embeddings,
    )


def _check_features(name: str, config: PretrainedConfig) -> None:
    windowed = sum(kind != "full_attention" for kind in getattr(config, "layer_types", None) or ())
    if windowed:
        raise UnsupportedError(
            f"{name} with {windowed} sliding-window layers is not supported: all layers need full attention"
        )
    if config.hidden_act != "silu":
        raise UnsupportedError(f"{name} with hidden_act={config.hidden_act!r} is not supported: 'silu' is")
    if getattr(config, "quantization_config", None):
        find_convention(config.quantization_config)


def _check_values(name: str, config: PretrainedConfig) -> None:
    for field in (
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "max_position_embeddings",
    ):
        if getattr(config, field) < 1:
            raise ConfigError(f"{name} with {field}={getattr(config, field)} is not supported: at least 1 is")
    if config.num_attention_heads % config.num_key_value_heads:
        raise ConfigError(
            f"{name} with num_attention_heads={config.num_attention_heads} is not supported: a multiple of "
            f"num_key_value_heads={config.num_key_value_heads} is"
        )
    if not 0 <= config.rms_norm_eps < math.inf:
        raise ConfigError(f"{name} with rms_norm_eps={config.rms_norm_eps} is not supported: 0 or more is")
    for field in ("rope_theta", "factor"):
        value = config.rope_parameters.get(field, 1.0)
        if not isinstance(value, (int, float)) or not 0 < value < math.inf:
            raise ConfigError(f"{name} with {field}={value!r} of its rotary positions is not supported: above 0 is")


def _rope_inv_freq(name: str, config: PretrainedConfig, head_dim: int) -> tuple[float, ...]:
    """Rotary position embedding, Su et al. 2021; scaled ones as transformers computes them."""
    rope = config.rope_parameters
    kind = rope.get("rope_type")
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise UnsupportedError(f"{name} with partial_rotary_factor={rope['partial_rotary_factor']} is not supported")
    if kind == "default":
        exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
        return tuple((1.0 / rope["rope_theta"] ** exponents).tolist())
    if kind not in ("linear", "llama3"):
        raise UnsupportedError(
            f"{name} with rotary scaling {kind!r} is not supported: 'default', 'linear' and 'llama3' are"
        )
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    inv_freq, _ = ROPE_INIT_FUNCTIONS[kind](config, device=torch.device("cpu"))
    return tuple(inv_freq.tolist())
