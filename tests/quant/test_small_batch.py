"""The fused product's host side and machine code, without a GPU."""

import re
import subprocess
from pathlib import Path

import pytest
import torch
from nvfp4_reference import random_weight

from tpoverlap.cuda.device import DeviceFacts
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
from tpoverlap.quant.nvfp4.small_batch_bulk import THREADS, Plan, plan_for


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


def machine_code(folder: Path, arch: str, source: str, options: tuple[str, ...]) -> tuple[str, str]:
    """What the kernel uses, and its code."""
    triton = pytest.importorskip("triton", reason="its package carries the disassembler")
    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    cubin = folder / "kernel.cubin"
    cubin.write_bytes(compile_cuda(source, name="kernel.cu", arch=arch, options=options))

    def tool(*command: str) -> str:
        return subprocess.run(
            [tools / command[0], *command[1:], cubin], capture_output=True, text=True, check=True
        ).stdout

    return tool("cuobjdump", "-res-usage"), tool("nvdisasm", "-c")


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
    usage, code = machine_code(tmp_path, arch, small_batch.source(), compile_options(dtype, blocks))
    registers, stack = (int(re.search(rf"{name}:(\d+)", usage)[1]) for name in ("REG", "STACK"))  # type: ignore[index]
    assert stack <= SPILLS.get(blocks, 0)
    assert registers * 32 * blocks.warps * blocks.per_sm <= 65_536
    assert re.search(r"HMMA\.16816" if arch != "sm_75" else r"HMMA\.1688", code)
    assert "LDG.E.128" in code
    if blocks not in SPILLS:
        assert not re.search(r"\b(LDL|STL)\b", code)


H200 = DeviceFacts(0, "H200", (9, 0), 132, 232_448, 60 << 20)


@pytest.mark.parametrize(
    ("n", "k", "plan"),
    [
        (17408, 5120, Plan(132, 132, 15, slots=3, steps=4, shared_bytes=151_424)),
        (5120, 8704, Plan(132, 39, 13, slots=2, steps=6, shared_bytes=147_904)),
        (5120, 2560, Plan(132, 39, 13, slots=3, steps=2, shared_bytes=77_600)),
        (1, 256, Plan(1, 1, 1, slots=2, steps=1, shared_bytes=19_360)),
        (100, 9216, Plan(13, 8, 8, slots=2, steps=6, shared_bytes=102_912)),
        (5120, 8704 + 128, None),
        (5120, 9216 + 256, None),
    ],
)
def test_layouts_where_bulk_copies_bring_the_weight(n: int, k: int, plan: Plan | None) -> None:
    assert plan_for(n, k, H200) == plan


@pytest.mark.parametrize(
    ("n", "k", "pays"), [(17408, 5120, True), (5120, 2560, True), (8192, 5120, False), (5120, 8704, False)]
)
def test_bulk_copies_serve_weights_of_many_or_short_tiles(n: int, k: int, pays: bool) -> None:
    plan = plan_for(n, k, H200)
    assert plan
    assert plan.pays is pays


@pytest.mark.parametrize("shared_bytes", [101_376, 166_912, 232_448])
@pytest.mark.parametrize("num_sms", [1, 84, 132, 148])
def test_layouts_cover_the_weight_and_fit(num_sms: int, shared_bytes: int) -> None:
    facts = DeviceFacts(0, "a device", (9, 0), num_sms, shared_bytes, 0)
    for n in (1, 7, 100, 2112, 5120, 8192, 17408, 151_936):
        for k in range(256, 9472, 256):
            plan = plan_for(n, k, facts)
            if plan is None:
                assert k > 4096
                assert shared_bytes < 200_000 or k > 9216
                continue
            assert plan.blocks <= num_sms
            assert (plan.blocks - 1) * plan.block_rows < n <= plan.blocks * plan.block_rows
            assert 1 <= plan.tile_rows <= 16
            assert 2 <= plan.slots <= 16
            assert plan.shared_bytes <= shared_bytes
            assert 12 * 128 * (plan.steps - 1) < k <= 12 * 128 * plan.steps
    assert plan_for(5120, 5120, DeviceFacts(0, "before 9.0", (8, 9), num_sms, shared_bytes, 0)) is None


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("arch", "n", "k"),
    [
        ("sm_90", 17408, 5120),
        ("sm_90", 8192, 5120),
        ("sm_90", 5120, 2560),
        ("sm_90", 5120, 8704),
        ("sm_90", 64, 256),
        ("sm_100", 5120, 8704),
        ("sm_120", 5120, 8704),
    ],
)
def test_machine_code_copies_in_bulk_and_keeps_x_in_registers(
    tmp_path: Path, arch: str, n: int, k: int, dtype: torch.dtype
) -> None:
    plan = plan_for(n, k, H200)
    assert plan
    source = small_batch.source("small_batch_bulk")
    usage, code = machine_code(tmp_path, arch, source, compile_options(dtype, plan))
    registers, stack = (int(re.search(rf"{name}:(\d+)", usage)[1]) for name in ("REG", "STACK"))  # type: ignore[index]
    assert registers * THREADS <= 65_536
    assert stack <= (16 if plan.steps == 6 else 0)
    assert "UBLKCP" in code
    # Nothing of global memory is touched before the kernel ahead has ended, nor may the next one start before that.
    ahead_has_ended = code.index("ACQBULK")
    assert ahead_has_ended < code.index("PREEXIT")
    assert not re.search(r"\b(LDG|STG|LD|ST|UBLKCP)\b", code[:ahead_has_ended])
    assert "HMMA.16816" in code
    assert "LDS.128" in code
