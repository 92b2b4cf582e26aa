"""The fused product's host side and machine code, without a GPU."""

import re
import subprocess
from pathlib import Path

import pytest
import torch
from nvfp4_reference import random_weight

from tpoverlap.cuda.nvrtc import compile_cuda
from tpoverlap.quant.nvfp4 import small_batch
from tpoverlap.quant.nvfp4.small_batch import (
    FEW_ROWS,
    MANY_ROWS,
    SOME_ROWS,
    Blocks,
    blocks_for,
    compile_options,
)


def test_cpu_inputs_are_rejected_with_the_reason() -> None:
    reason = small_batch.rejection(torch.ones(1, 32, dtype=torch.float16), random_weight(4, 32, seed=1))
    assert reason == "x is on cpu, not on a CUDA device"


@pytest.mark.parametrize(
    ("n", "num_sms", "blocks"),
    [
        (1, 132, FEW_ROWS),
        (5120, 132, FEW_ROWS),
        (3 * 16 * 132, 132, FEW_ROWS),
        (3 * 16 * 132 + 1, 132, SOME_ROWS),
        (8192, 132, SOME_ROWS),
        (4 * 16 * 132 + 1, 132, MANY_ROWS),
        (17408, 132, MANY_ROWS),
        (9 * 16 * 132 + 1, 132, SOME_ROWS),
        (151_936, 132, SOME_ROWS),
        (5120, 72, MANY_ROWS),
    ],
)
def test_blocks_that_all_run_at_once_where_they_can(n: int, num_sms: int, blocks: Blocks) -> None:
    assert blocks_for(n, num_sms, (9, 0)) == blocks
    # There a block of MANY_ROWS too many would not fit.
    assert blocks_for(n, num_sms, (7, 5)) == (SOME_ROWS if blocks == MANY_ROWS else blocks)


# Bytes a thread may spill: four warps nine times on an SM were faster with these than eight warps four times without.
SPILLS = {MANY_ROWS: 24}


@pytest.mark.parametrize(
    ("arch", "dtype", "blocks"),
    [("sm_75", torch.float16, blocks) for blocks in (FEW_ROWS, SOME_ROWS)]
    + [
        (arch, dtype, blocks)
        for arch in ("sm_80", "sm_90")
        for dtype in (torch.float16, torch.bfloat16)
        for blocks in (FEW_ROWS, SOME_ROWS, MANY_ROWS)
    ],
    ids=str,
)
def test_machine_code_has_tensor_instructions_wide_loads_and_few_spills(
    tmp_path: Path, arch: str, dtype: torch.dtype, blocks: Blocks
) -> None:
    triton = pytest.importorskip("triton", reason="its package carries the disassembler")
    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    cubin = tmp_path / "small_batch.cubin"
    options = compile_options(dtype, blocks)
    cubin.write_bytes(compile_cuda(small_batch.source(), name="small_batch.cu", arch=arch, options=options))

    def tool(*command: str) -> str:
        return subprocess.run(
            [tools / command[0], *command[1:], cubin], capture_output=True, text=True, check=True
        ).stdout

    usage = tool("cuobjdump", "-res-usage")
    registers, stack = (int(re.search(rf"{name}:(\d+)", usage)[1]) for name in ("REG", "STACK"))  # type: ignore[index]
    assert stack <= SPILLS.get(blocks, 0)
    assert registers * 32 * blocks.warps * blocks.per_sm <= 65_536
    code = tool("nvdisasm", "-c")
    assert re.search(r"HMMA\.16816" if arch != "sm_75" else r"HMMA\.1688", code)
    assert "LDG.E.128" in code
    if blocks not in SPILLS:
        assert not re.search(r"\b(LDL|STL)\b", code)
