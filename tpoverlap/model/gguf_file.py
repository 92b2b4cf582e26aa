"""Weights of a GGUF file under Hugging Face names, dequantized as they are read."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from tpoverlap.errors import ConfigError, UnsupportedError
from tpoverlap.model.architectures import check_architecture

if TYPE_CHECKING:
    from gguf import GGUFReader
    from transformers import PretrainedConfig


def read_gguf_config(path: Path) -> PretrainedConfig:
    """The configuration that the file's metadata describe.

    Made here, from the reader that the weights come from too: transformers would parse the whole vocabulary again, and
    takes Qwen3's head size to be 128.

    Errors: ConfigError where ``path`` is no GGUF file or lacks a field; UnsupportedError for an architecture that the
    decoder does not have, for experts and for scaled rotary positions.
    """
    from transformers import AutoConfig

    reader = _open(path)
    architecture = str(_field(reader, "general.architecture"))
    check_architecture(architecture)
    if _field(reader, f"{architecture}.expert_count"):
        raise UnsupportedError(f"{path} is a mixture of experts ({architecture}): only dense models are supported")
    shapes = {tensor.name: tensor.shape for tensor in reader.tensors}
    scaling = _field(reader, f"{architecture}.rope.scaling.type")
    if scaling not in (None, "none") or "rope_freqs.weight" in shapes:
        raise UnsupportedError(
            f"{path} scales its rotary positions, which is not supported in GGUF files: "
            "give the Hugging Face folder of this model"
        )

    def required(key: str) -> Any:
        value = _field(reader, f"{architecture}.{key}")
        if value is None:
            raise ConfigError(f"{path} lacks the field {architecture}.{key}: it is no complete model")
        return value

    for name in ("token_embd.weight", "blk.0.attn_q.weight"):
        if name not in shapes:
            raise ConfigError(f"{path} has no tensor {name}: it is no complete model")
    heads = required("attention.head_count")
    return AutoConfig.for_model(
        architecture,
        vocab_size=int(shapes["token_embd.weight"][-1]),
        hidden_size=required("embedding_length"),
        intermediate_size=required("feed_forward_length"),
        num_hidden_layers=required("block_count"),
        num_attention_heads=heads,
        num_key_value_heads=_field(reader, f"{architecture}.attention.head_count_kv") or heads,
        head_dim=int(shapes["blk.0.attn_q.weight"][-1]) // heads,  # the field for it is optional
        max_position_embeddings=required("context_length"),
        rms_norm_eps=required("attention.layer_norm_rms_epsilon"),
        rope_parameters={
            "rope_type": "default",
            "rope_theta": _field(reader, f"{architecture}.rope.freq_base") or 10_000.0,
        },
        tie_word_embeddings="output.weight" not in shapes,
        attention_bias="blk.0.attn_q.bias" in shapes,
    )


class GGUFSource:
    """A :class:`~tpoverlap.model.tensor_source.TensorSource` over a memory-mapped GGUF file; tensors come as FP32."""

    def __init__(self, path: Path) -> None:
        from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

        reader = _open(path)
        self._architecture = str(_field(reader, "general.architecture"))
        self._head_dim = read_gguf_config(path).head_dim if self._architecture == "llama" else 0
        arch = next(key for key, name in MODEL_ARCH_NAMES.items() if name == self._architecture)
        self._names = get_tensor_name_map(arch, int(_field(reader, f"{self._architecture}.block_count")))
        self._tensors = {tensor.name: tensor for tensor in reader.tensors}

    def shape(self, name: str) -> tuple[int, ...] | None:
        tensor = self._tensors.get(self._stored_name(name))
        return None if tensor is None else tuple(int(size) for size in reversed(tensor.shape))

    def rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        from gguf import dequantize

        stored = self._stored_name(name)
        tensor = self._tensors[stored]
        if start == stop:  # gguf cannot decode an empty slice
            return torch.zeros(0, *(int(size) for size in reversed(tensor.shape[:-1])))
        # Quantization blocks lie along a row, so a slice of rows decodes alone.
        values = torch.from_numpy(dequantize(tensor.data[start:stop], tensor.tensor_type).copy())
        if self._head_dim and stored.split(".")[-2] in ("attn_q", "attn_k"):
            return _split_rotary_halves(values, self._head_dim)
        return values

    def columns(self, name: str, start: int, stop: int) -> torch.Tensor:
        shape = self.shape(name)
        assert shape is not None
        return self.rows(name, 0, shape[0])[:, start:stop]

    def _stored_name(self, name: str) -> str:
        base, _, suffix = name.rpartition(".")
        return f"{self._names.get_name(base)}.{suffix}"


def _split_rotary_halves(rows: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Llama's GGUF files store the two partners of a rotary pair side by side, Hugging Face half a head apart."""
    pairs = rows.reshape(-1, head_dim // 2, 2, *rows.shape[1:])
    return pairs.transpose(1, 2).reshape(rows.shape)


def _field(reader: GGUFReader, name: str) -> Any:
    field = reader.fields.get(name)
    return None if field is None else field.contents()


def _open(path: Path) -> GGUFReader:
    stat = path.stat()
    return _read(path, stat.st_mtime_ns, stat.st_size)


@functools.lru_cache(maxsize=1)  # parsing the vocabulary takes seconds, and configuration and weights both need it
def _read(path: Path, _mtime_ns: int, _size: int) -> GGUFReader:
    try:
        from gguf import GGUFReader
    except ImportError:
        raise UnsupportedError(f"{path} needs the 'gguf' package to be read: pip install gguf") from None
    try:
        return GGUFReader(path)
    except (ValueError, OSError, IndexError, KeyError) as error:
        raise ConfigError(f"{path} cannot be read as a GGUF file: {' '.join(str(error).split())}") from None
