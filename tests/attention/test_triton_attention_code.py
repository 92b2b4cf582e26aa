"""Machine code of the attention kernels for GPUs that are not here: it fits, spills little, and uses tensor cores."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
import torch
from sass import disassemble

from tpoverlap.attention.triton.common import padded_dim
from tpoverlap.attention.triton.configs import decode_tiles, prefill_tiles
from tpoverlap.attention.triton.decode import in_launch_unroll

triton = pytest.importorskip("triton")

from attention_machine_code import compile_kernel  # noqa: E402

from tpoverlap.attention.triton.decode_kernel import decode_kernel  # noqa: E402
from tpoverlap.attention.triton.prefill_kernel import prefill_kernel  # noqa: E402

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
# Bytes of shared memory a program may have, and the tensor instruction; 8.6 has the least of what shares its tiles.
GPUS = {(7, 5): (65_536, None), (8, 6): (101_376, "HMMA"), (9, 0): (232_448, "HGMMA"), (10, 0): (232_448, "UTCHMMA")}
HEAD_DIMS = (64, 128, 256)
# Bytes of stack a thread may spill to: what the widest tiles do around their loops.
SPILLS = {64: 0, 128: 0, 256: 64}
# Of a prefill, whose parts are a loop around those over keys: what Triton 3.6 and 3.9 spill at most.
PREFILL_SPILLS = {
    (7, 5): {64: 0, 128: 24, 256: 0},
    (8, 6): {64: 0, 128: 16, 256: 0},
    (9, 0): {64: 16, 128: 96, 256: 192},
    (10, 0): {64: 64, 128: 32, 256: 472},
}
# Loads and stores of that in a step over keys, of several hundred instructions; others have none.
PREFILL_SPILLS_IN_A_STEP = {((9, 0), 256): 3, ((10, 0), 64): 8, ((10, 0), 256): 17}
FAST = [("prefill", (9, 0), 128), ("decode", (8, 6), 128), ("prefill", (7, 5), 64), ("prefill", (7, 5), 128)]
ALL = [(kind, gpu, dim) for kind in ("prefill", "decode") for gpu in GPUS for dim in HEAD_DIMS]
CASES = [pytest.param(*case, marks=[] if case in FAST else pytest.mark.gpu) for case in ALL]


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("kind", "capability", "head_dim"), CASES)
def test_code_of_the_tiles(tmp_path, kind, capability, head_dim):
    """Those that need no GPU but minutes of compilation are run with the GPU tests."""
    constants = {"GROUP": 6, "HEAD_DIM": head_dim, "DIM": padded_dim(head_dim), "BLOCK_SIZE": 16}
    constants |= {"WINDOW": False, "SOFTCAP": False, "STORE_LSE": False}
    if kind == "prefill":
        kernel, tiles = prefill_kernel, prefill_tiles(capability, torch.float16, head_dim)
        constants |= {"BLOCK_M": tiles.block_m, "BLOCK_N": tiles.block_n, "PART_KEYS": tiles.part_keys, "KV_HEADS": 2}
    else:
        kernel, tiles = decode_kernel, decode_tiles(capability, torch.float16, head_dim)
        constants |= {"BLOCK_N": tiles.block_n, "PART_KEYS": tiles.part_keys, "NUM_SPLITS": 16, "KV_HEADS": 2}
        constants |= {"GROUP_PAD": 16, "PREFILL_ROWS": False, "MERGE": True}
        constants |= {"MERGE_UNROLL": in_launch_unroll(6, padded_dim(head_dim), tiles)}
        constants |= {"DEPENDENT": capability >= (9, 0)}
    options = {"num_warps": tiles.num_warps, "num_stages": tiles.num_stages}
    compiled = compile_kernel(kernel, constants, capability, **options)
    cubin = tmp_path / "kernel.cubin"
    cubin.write_bytes(compiled.asm["cubin"])
    shared, instruction = GPUS[capability]
    assert compiled.metadata.shared <= shared
    usage = _tool("cuobjdump", "--dump-resource-usage", cubin)
    spilled = int(re.findall(r"STACK:(\d+)", usage)[0])
    assert spilled <= (PREFILL_SPILLS[capability] if kind == "prefill" else SPILLS)[head_dim]
    if kind == "prefill":
        product = instruction or "FFMA"
        loops = [body for body in disassemble(cubin, "prefill_kernel").loops() if _count(body, product) > 8]
        for body in sorted(loops, key=len)[:2]:
            assert _count(body, "LDL") + _count(body, "STL") <= PREFILL_SPILLS_IN_A_STEP.get((capability, head_dim), 0)
    code = _tool("nvdisasm", "-c", cubin)
    if instruction is not None and kind == "decode":
        # Its 16 rows are too few for the instructions of a whole group of warps.
        instruction = "HMMA"
    assert instruction is None or re.search(rf"\b{instruction}\b", code)
    # Keys and values come in pieces of 16 bytes.
    assert re.search(r"LDG(STS)?(\.\w+)*\.128", code)


def _count(body, name):
    return sum(i.name == name for i in body)


def _tool(name: str, *arguments: object) -> str:
    command = [TOOLS / name, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout
