"""The architectures that the decoder has."""

from __future__ import annotations

from tpoverlap.errors import UnsupportedError

SUPPORTED_ARCHITECTURES = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3"}


def check_architecture(model_type: str) -> None:
    """Errors: UnsupportedError naming ``model_type`` and what is supported."""
    if model_type not in SUPPORTED_ARCHITECTURES:
        raise UnsupportedError(
            f"architecture {model_type!r} is not supported: "
            f"dense {', '.join(SUPPORTED_ARCHITECTURES.values())} models are ({', '.join(SUPPORTED_ARCHITECTURES)})"
        )
