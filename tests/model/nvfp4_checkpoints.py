"""Tiny checkpoints in NVFP4, written by the conventions of nvidia-modelopt and of compressed-tensors."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import torch
from safetensors.torch import load_file, save_file
from tiny_models import make_model

from tpoverlap.quant import nvfp4

Library = Literal["modelopt", "compressed-tensors"]

_WEIGHTS = {"num_bits": 4, "type": "float", "group_size": 16, "dynamic": False}
QUANTIZATION: dict[Library, dict[str, object]] = {
    "modelopt": {
        "quant_method": "modelopt",
        "quant_algo": "NVFP4",
        "config_groups": {"group_0": {"weights": _WEIGHTS, "input_activations": _WEIGHTS, "targets": ["Linear"]}},
        "ignore": ["lm_head"],
        "producer": {"name": "modelopt", "version": "0.47.0"},
    },
    "compressed-tensors": {
        "quant_method": "compressed-tensors",
        "format": "nvfp4-pack-quantized",
        "config_groups": {
            "group_0": {"weights": _WEIGHTS | {"strategy": "tensor_group", "symmetric": True}, "targets": ["Linear"]}
        },
        "ignore": ["lm_head"],
        "quantization_status": "compressed",
    },
}


def save_nvfp4_model(
    folder: Path,
    library: Library,
    family: str,
    seed: int,
    *,
    quantized: Callable[[str], bool] = lambda name: name.endswith("_proj.weight"),
    **overrides: object,
) -> torch.nn.Module:
    """Saves a tiny model whose ``quantized`` weights are in NVFP4; returns it with the values that these stand for.

    Global scales of parts that are fused at load differ, and so does a wrong use of them.
    """
    model = make_model(family, seed, **overrides)
    model.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    parameters = dict(model.named_parameters())
    for index, name in enumerate(sorted(filter(quantized, tensors))):
        parts = nvfp4.quantize(tensors.pop(name) * (1 + index % 5))
        prefix = name.removesuffix(".weight")
        if library == "modelopt":
            stored = {"weight": parts.codes, "weight_scale_2": parts.global_scale, "input_scale": torch.tensor(0.01)}
            values = parts
        else:
            inverse = parts.global_scale.reciprocal().reshape(1)
            stored = {"weight_packed": parts.codes, "weight_global_scale": inverse, "input_global_scale": torch.ones(1)}
            values = nvfp4.NVFP4Tensor(parts.codes, parts.scales, inverse.reciprocal().reshape(()), parts.shape)
        tensors |= {f"{prefix}.{ending}": tensor for ending, tensor in stored.items()}
        tensors[f"{prefix}.weight_scale"] = parts.scales
        with torch.no_grad():
            parameters[name].copy_(nvfp4.dequantize(values, torch.float32))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    edit_config(folder, lambda config: config.update(quantization_config=QUANTIZATION[library]))
    return model


def edit_config(folder: Path, edit: Callable[[dict[str, object]], object]) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text())
    edit(config)
    path.write_text(json.dumps(config))
