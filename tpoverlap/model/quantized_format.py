"""Which quantized format a checkpoint's configuration names, and how that format means its tensors."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tpoverlap.errors import ConfigError, UnsupportedError
from tpoverlap.quant import nvfp4
from tpoverlap.quant.nvfp4.format import GROUP


@dataclass(frozen=True)
class Convention:
    """Names that a library gives the three tensors of a linear layer's weight, and how it means them."""

    library: str
    codes: str
    scale: str
    global_scale: str
    convert: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], nvfp4.NVFP4Tensor]


MODELOPT = Convention("nvidia-modelopt", "weight", "weight_scale", "weight_scale_2", nvfp4.from_modelopt)
COMPRESSED_TENSORS = Convention(
    "compressed-tensors", "weight_packed", "weight_scale", "weight_global_scale", nvfp4.from_compressed_tensors
)


def find_convention(quantization: Mapping[str, Any]) -> Convention:
    """The convention of a checkpoint with this ``quantization_config``.

    Errors: UnsupportedError for any quantization but NVFP4 with groups of 16, naming it.
    """
    method = quantization.get("quant_method", "modelopt" if "quant_algo" in quantization else None)
    if method == "modelopt":
        found, convention = quantization.get("quant_algo"), MODELOPT
        supported = found == "NVFP4"
    elif method == "compressed-tensors":
        found, convention = quantization.get("format"), COMPRESSED_TENSORS
        supported = found == "nvfp4-pack-quantized"
        if (quantization.get("transform_config") or {}).get("config_groups"):
            raise _unsupported(f"{method!r} and transforms of the weights")
    else:
        raise _unsupported(f"{method!r}")
    if not supported:
        raise _unsupported(f"{method!r} as {found!r}")
    sizes = {quantization.get("group_size", GROUP)}
    for group in (quantization.get("config_groups") or {}).values():
        sizes.add((group.get("weights") or {}).get("group_size", GROUP))
    if sizes != {GROUP}:
        raise _unsupported(f"{method!r} in groups of {', '.join(sorted(map(str, sizes)))}")
    return convention


def _unsupported(what: str) -> UnsupportedError:
    return UnsupportedError(
        f"a checkpoint quantized with {what} is not supported: NVFP4 in groups of {GROUP} is, by modelopt (quant_algo "
        "NVFP4) or compressed-tensors (format nvfp4-pack-quantized); or give the unquantized checkpoint, which can be "
        "quantized to NVFP4 at load"
    )


def read_quantization(folder: Path) -> Mapping[str, Any] | None:
    """The quantization that a checkpoint's configuration declares; None for an unquantized one.

    It stands in config.json, or, as older versions of nvidia-modelopt write it, in hf_quant_config.json alone.
    Errors: ConfigError for a file that cannot be read as that.
    """
    for name, key in (("config.json", "quantization_config"), ("hf_quant_config.json", "quantization")):
        path = folder / name
        if not path.is_file():
            continue
        try:
            found = json.loads(path.read_text(encoding="utf-8")).get(key)
        except (ValueError, AttributeError) as error:
            raise ConfigError(f"{path} is no configuration: {error!r}") from None
        if found:
            if not isinstance(found, dict):
                raise ConfigError(f"{path}: {key} must be an object, got {found!r}")
            return found
    return None
