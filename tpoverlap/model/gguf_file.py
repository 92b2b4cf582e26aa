"""Weights of a GGUF file under Hugging Face names, dequantized as they are read."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from tpoverlap.errors import ConfigError, UnsupportedError
from tpoverlap.model.config import check_architecture

if TYPE_CHECKING:
    from gguf import GGUFReader


def check_gguf(path: Path) -> None:
    """Errors: ConfigError where ``path`` is no GGUF file; UnsupportedError for an architecture that the decoder does
    not have, for experts, and for scaled rotary positions, which transformers does not read from GGUF files."""
    reader = _open(path)
    architecture = _field(reader, "general.architecture")
    check_architecture(str(architecture))
    if _field(reader, f"{architecture}.expert_count"):
        raise UnsupportedError(f"{path} is a mixture of experts ({architecture}): only dense models are supported")
    scaling = _field(reader, f"{architecture}.rope.scaling.type")
    if scaling not in (None, "none") or any(tensor.name == "rope_freqs.weight" for tensor in reader.tensors):
        raise UnsupportedError(
            f"{path} scales its rotary positions, which is not supported in GGUF files: "
            "give the Hugging Face folder of this model"
        )


class GGUFSource:
    """A :class:`~tpoverlap.model.tensor_source.TensorSource` over a memory-mapped GGUF file; tensors come as FP32."""

    def __init__(self, path: Path) -> None:
        from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

        reader = _open(path)
        self._architecture = str(_field(reader, "general.architecture"))
        self._head_counts = {
            "attn_q": int(_field(reader, f"{self._architecture}.attention.head_count")),
            "attn_k": int(
                _field(reader, f"{self._architecture}.attention.head_count_kv")
                or _field(reader, f"{self._architecture}.attention.head_count")
            ),
        }
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
        # Quantization blocks lie along a row, so a slice of rows decodes alone.
        values = torch.from_numpy(dequantize(tensor.data[start:stop], tensor.tensor_type).copy())
        heads = self._head_counts.get(stored.split(".")[-2]) if self._architecture == "llama" else None
        return values if heads is None else _split_rotary_halves(values, int(tensor.shape[-1]) // heads)

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
