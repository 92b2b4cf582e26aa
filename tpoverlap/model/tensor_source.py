"""Where a checkpoint's tensors come from, read in slices so that a rank touches only its own part."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Protocol

import torch

from tpoverlap.errors import ConfigError


class TensorSource(Protocol):
    """Tensors by their Hugging Face names, on the CPU, in the dtype that they are stored in."""

    def shape(self, name: str) -> tuple[int, ...] | None:
        """None where the checkpoint has no such tensor."""
        ...

    def rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Entries ``start`` to ``stop`` of the first dimension. A source may permute rows inside attention heads, so
        slices of query and key projections hold whole heads."""
        ...

    def columns(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Entries ``start`` to ``stop`` of the second dimension."""
        ...


class SafetensorsSource:
    """The ``*.safetensors`` files of a folder, memory-mapped."""

    def __init__(self, folder: Path) -> None:
        from safetensors import SafetensorError, safe_open

        index = folder / "model.safetensors.index.json"
        try:
            if index.is_file():
                stored = json.loads(index.read_text())
                if not isinstance(stored, dict) or not isinstance(stored.get("weight_map"), dict):
                    raise ValueError(f"{index.name} has no weight_map")
                paths = sorted({folder / str(name) for name in stored["weight_map"].values()})
            else:
                paths = sorted(folder.glob("*.safetensors"))
            self._files: dict[str, Any] = {}
            for path in paths:
                file = safe_open(path, framework="pt", device="cpu")
                self._files.update(dict.fromkeys(file.keys(), file))
        except (OSError, ValueError, SafetensorError) as error:
            raise ConfigError(f"the weights in {folder} cannot be read: {error}") from None
        if not self._files:
            raise ConfigError(f"{folder} has no *.safetensors file: convert the checkpoint with save_pretrained")

    def shape(self, name: str) -> tuple[int, ...] | None:
        file = self._files.get(name)
        return None if file is None else tuple(file.get_slice(name).get_shape())

    def rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        return self._files[name].get_slice(name)[start:stop]

    def columns(self, name: str, start: int, stop: int) -> torch.Tensor:
        return self._files[name].get_slice(name)[:, start:stop]
