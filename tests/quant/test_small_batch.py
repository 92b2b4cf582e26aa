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
    for capability in ((8, 0), (9, 0), (10, 0), (12, 0)):
        assert blocks_for(n, num_sms, capability) == blocks
    # There nine blocks of MANY_ROWS would not fit, or leave too few registers.
    for capability in ((7, 5), (8, 6), (8, 7), (8, 9)):
        assert blocks_for(n, num_sms, capability) == (SOME_ROWS if blocks == MANY_ROWS else blocks)


# Bytes a thread may spill: on 9.0 four warps nine times on an SM were faster with 16 than eight warps four times
# without.
SPILLS = {MANY_ROWS: 16}


def blocks_of(capability: tuple[int, int]) -> list[Blocks]:
    """All that some number of rows is given."""
    return list(dict.fromkeys(blocks_for(16 * 132 * on_sm, 132, capability) for on_sm in range(1, 12)))


@pytest.mark.parametrize(
    ("arch", "dtype", "blocks"),
    [
        (f"sm_{major}{minor}", dtype, blocks)
        for major, minor in ((7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0))
        for dtype in (torch.float16, torch.bfloat16)
        for blocks in blocks_of((major, minor))
        if (major, dtype) != (7, torch.bfloat16)
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
