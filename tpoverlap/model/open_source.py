"""Opens a checkpoint, whatever it is stored as."""

from __future__ import annotations

from pathlib import Path

from tpoverlap.model.gguf_file import GGUFSource
from tpoverlap.model.nvfp4_checkpoint import NVFP4Source
from tpoverlap.model.quantized_format import find_convention, read_quantization
from tpoverlap.model.tensor_source import SafetensorsSource, TensorSource


def open_source(path: str | Path) -> TensorSource:
    """The tensors of a GGUF file or of a folder with safetensors files, which may hold weights in NVFP4.

    Errors: ConfigError where there are none, or where a file cannot be read as what its name says; UnsupportedError for
    a folder in another quantized format.
    """
    path = Path(path)
    if path.suffix == ".gguf":
        return GGUFSource(path)
    quantization = read_quantization(path)
    if quantization is not None:
        return NVFP4Source(path, find_convention(quantization))
    return SafetensorsSource(path)
