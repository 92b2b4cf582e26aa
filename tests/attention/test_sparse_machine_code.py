"""Machine code of the sparse kernels for GPUs that are not here: they compile, spill nothing, and use tensor cores.

Compiling also finds what the interpreter accepts and the compiler does not, such as a name with two types.
"""

from __future__ import annotations

import re
import subprocess
import warnings
from pathlib import Path

import pytest

triton = pytest.importorskip("triton")

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from tpoverlap.attention import topk_kernels  # noqa: E402
from tpoverlap.attention.dsa import kernels as dsa_kernels  # noqa: E402
from tpoverlap.attention.qsa import (  # noqa: E402
    compression_kernel,
    metadata_kernel,
    scoring_kernel,
    selection_kernel,
)
from tpoverlap.attention.topk import select_plan  # noqa: E402

POINTERS = {
    "*fp32": ("logits", "scores", "norm_weight", "cos_sin"),
    "*fp16": ("q", "key_cache"),
    "*i16": ("keys", "state_keys", "compressed_keys"),
    "*i64": (
        "slot_mapping",
        "logical_positions",
        "slots",
        "rope_positions",
        "state_positions",
        "state_slots",
        "compressed_slots",
    ),
    "*i32": (
        "row_starts",
        "row_ends",
        "lengths",
        "candidates",
        "words",
        "scratch",
        "out",
        "query_start_loc",
        "seq_lens",
        "block_table",
        "state_table",
        "token_to_req",
        "visible_blocks",
        "k_work",
    ),
    "fp32": ("scale", "eps"),
}
TYPES = {name: kind for kind, names in POINTERS.items() for name in names}
PLAN = select_plan(64).constants
SCORER = {"HEADS": 4, "LANES": 16, "STORAGE_BLOCK": 16, "E4M3": False, "WINDOW": 64, "STAGES": 3}
DSA = {"BLOCK": 8, "HAS_STARTS": True}
COMPRESSION = {
    "HEAD": 128,
    "HEAD_PADDED": 128,
    "HALF": 32,
    "RATIO": 4,
    "CAPACITY": 8,
    "COMPRESSED_ROWS": 4,
    "SECTION_0": 12,
    "SECTION_1": 10,
    "POSITIONS": True,
    "E4M3": False,
}
BUILD = {"CIRCULAR": False, "COMPRESSED": True, "TILE": 128, "ITEMS": 128, "REQUESTS": 32}
CASES = {
    "dsa scores": (dsa_kernels.score_blocks, DSA | {"BLOCK_PADDED": 8, "TILE": 128, "FILL": False}, 4, 75),
    "dsa mask": (dsa_kernels.mask_rows, DSA | {"TILE": 1024, "CHUNK": 1024}, 4, 75),
    "top-k maxima": (topk_kernels.group_maxima, PLAN | {"LANES": 512, "UNROLL": 8}, 4, 75),
    "top-k list": (topk_kernels.list_hits, PLAN | {"TILE": 4096, "STAGES": 3, "SKIP_NEG_INF": True}, 8, 75),
    "top-k": (topk_kernels.topk_rows, PLAN | {"SHORT": 128, "BY_SCORE": True, "SKIP_NEG_INF": True}, 8, 75),
    "qsa selection": (selection_kernel.select_positions, PLAN | {"RATIO_PADDED": 4}, 8, 75),
    "qsa compression": (compression_kernel.update_caches, COMPRESSION, 1, 75),
    "qsa metadata": (metadata_kernel.build_tiles, BUILD | {"DEPENDENT_LAUNCH": True}, 4, 90),
    "qsa paged scores": (scoring_kernel.score_segments, SCORER | {"SEGMENT": 1, "DIMS": 128}, 2, 90),
    "qsa segment scores": (scoring_kernel.score_segments, SCORER | {"SEGMENT": 4, "DIMS": 128}, 2, 90),
    "qsa scores on Turing": (scoring_kernel.score_segments, SCORER | {"SEGMENT": 4, "DIMS": 16}, 2, 75),
}


@pytest.mark.parametrize("name", CASES)
def test_kernels_compile_without_spills(tmp_path: Path, name: str) -> None:
    kernel, constants, num_warps, capability = CASES[name]
    names = kernel.arg_names
    signature = {n: "constexpr" if n in constants else TYPES.get(n, "i32") for n in names}
    source = ASTSource(
        kernel,
        signature,
        constexprs={(names.index(n),): value for n, value in constants.items()},
        attrs={(i,): [["tt.divisibility", 16]] for i, n in enumerate(names) if n.endswith("_stride") or n in TYPES},
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a notice about a coming default of fusing multiply and add
        compiled = triton.compile(
            source, target=GPUTarget("cuda", capability, 32), options={"num_warps": num_warps, "num_stages": 3}
        )
    cubin = tmp_path / "kernel.cubin"
    cubin.write_bytes(compiled.asm["cubin"])
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
    code = subprocess.run([tool, "-c", cubin], capture_output=True, text=True, check=True).stdout
    # A few words at the edge of a register budget are no spilled array.
    assert len(re.findall(r"\b(?:LDL|STL)\b", code)) <= 8
    assert ("HMMA" in code) == (name in ("qsa paged scores", "qsa segment scores"))
    if name == "qsa metadata":
        assert code.index("ACQBULK") < code.index("LDG"), "a dependent launch must wait before its first read"
