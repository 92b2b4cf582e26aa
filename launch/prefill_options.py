"""The command line of prefill.py."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NoReturn, get_args

from tpoverlap.config import MAX_TIMEOUT_S
from tpoverlap.model.checkpoint import WeightFormat

EPILOG = """examples:
  torchrun --standalone --nproc-per-node 2 launch/prefill.py
  torchrun --standalone --nproc-per-node 2 launch/prefill.py --weights fp32 --compare --emulate-link 0.2
  torchrun --standalone --nproc-per-node 2 launch/prefill.py --model DIR --text - < book.txt
  python launch/prefill.py --tokens 512"""


@dataclass(frozen=True)
class Options:
    """Fields are those of ``--help``; model None: the default one. passes: which ways to run."""

    model: Path | None
    weights: WeightFormat
    text: str | None
    tokens: int
    chunk: int
    generate: int
    passes: tuple[Literal["whole", "overlapped"], ...]
    overlap_min_tokens: int
    num_pieces: int | Literal["auto"]
    emulate_link_gbps: float | None
    check: bool
    trace: Path | None
    timeline: Path
    timeout_s: float
    device: Literal["auto", "cpu", "cuda"]
    threads: int | None


def parse_options(arguments: Sequence[str] | None = None) -> Options:
    """Reads the command line. Mistakes end the process with status 2; only rank 0 tells the user."""
    parser = _Parser(
        description="Prefill a text with a tensor-parallel model, its chunks in overlapping pieces, and generate.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--model", type=Path, metavar="PATH", help="a Hugging Face folder or a GGUF file (default: SmolLM2-135M)")
    add("--weights", choices=get_args(WeightFormat), default="nvfp4", help="default: nvfp4, quantized at load")
    add("--text", metavar="FILE", help="the text; - for stdin (default: Python's own language reference)")
    add("--tokens", type=_at_least(2), default=4096, metavar="N", help="prefill that many (default: 4096)")
    add("--chunk", type=_at_least(1), default=2048, metavar="N", help="in chunks of that many (default: 2048)")
    add("--generate", type=_at_least(0), default=32, metavar="N", help="then generate that many (default: 32)")
    ways = parser.add_mutually_exclusive_group()
    ways.add_argument("--no-overlap", action="store_true", help="run each chunk whole")
    ways.add_argument("--compare", action="store_true", help="run each chunk both ways and compare them")
    add("--overlap-min-tokens", type=_at_least(1), default=256, metavar="N", help="split from there on (default: 256)")
    add("--num-pieces", choices=("2", "3", "4", "auto"), default="auto", help="pieces of a split chunk (default: auto)")
    add("--emulate-link", type=_positive(), metavar="GB/S", help="slow the ranks' link to that speed (CPU only)")
    add("--check", action="store_true", help="compare logits with transformers' own forward first")
    add("--trace", type=Path, metavar="FILE", help="also write a Chrome trace")
    add("--timeline", type=Path, default=Path("timeline"), metavar="PREFIX", help="of .html and .png, or a folder")
    add(
        "--timeout-s",
        type=_positive(MAX_TIMEOUT_S),
        default=30.0,
        metavar="S",
        help="a collective waits that long (default: 30)",
    )
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="default: GPUs where each rank has one")
    add(
        "--threads",
        type=_at_least(1, os.cpu_count()),
        metavar="N",
        help="of each rank (default: its share of the cores)",
    )
    given = parser.parse_args(arguments)
    return Options(
        model=given.model,
        weights=given.weights,
        text=given.text,
        tokens=given.tokens,
        chunk=given.chunk,
        generate=given.generate,
        passes=("whole", "overlapped") if given.compare else ("whole",) if given.no_overlap else ("overlapped",),
        overlap_min_tokens=given.overlap_min_tokens,
        num_pieces="auto" if given.num_pieces == "auto" else int(given.num_pieces),
        emulate_link_gbps=given.emulate_link,
        check=given.check,
        trace=given.trace,
        timeline=given.timeline / "timeline" if os.path.isdir(given.timeline) else given.timeline,
        timeout_s=given.timeout_s,
        device=given.device,
        threads=given.threads,
    )


class _Parser(argparse.ArgumentParser):
    """Every rank parses the same command line; one of them prints."""

    def print_help(self, file: object = None) -> None:
        if _is_first_rank():
            super().print_help()

    def error(self, message: str) -> NoReturn:
        if _is_first_rank():
            print(f"prefill: {message} (--help lists all options)", file=sys.stderr)
        sys.exit(2)


def _is_first_rank() -> bool:
    return os.environ.get("RANK", "0") == "0"


def _at_least(low: int, high: int | None = None) -> Callable[[str], int]:
    def convert(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = low - 1
        if value < low or (high is not None and value > high):
            limits = f"an integer >= {low}" if high is None else f"an integer from {low} to {high}"
            raise argparse.ArgumentTypeError(f"{text[:40]} is not supported: give {limits}")
        return value

    return convert


def _positive(high: float = sys.float_info.max) -> Callable[[str], float]:
    def convert(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = 0.0
        if not 0 < value <= high:
            limit = "" if high == sys.float_info.max else f", {high:,} at most"
            raise argparse.ArgumentTypeError(f"{text[:40]} is not supported: give a positive number{limit}")
        return value

    return convert
