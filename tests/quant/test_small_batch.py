"""The fused product's host side and machine code, without a GPU."""

import functools
import re
import subprocess
from pathlib import Path

import pytest
import torch
from nvfp4_reference import random_weight

from tpoverlap.cuda.device import DeviceFacts
from tpoverlap.cuda.nvrtc import KernelCompileError, compile_cuda
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
    ("n", "k", "plan", "pays"),
    [
        (17408, 5120, Plan(128, 272, slots=3, steps=2, halves=False), True),
        (8192, 5120, Plan(128, 128, slots=3, steps=2, halves=False), True),
        (5120, 8704, Plan(128, 80, slots=3, steps=3, halves=False), True),
        (5120, 2560, Plan(128, 80, slots=2, steps=1, halves=True), True),
        (4 * 16 * 66, 2560, Plan(132, 64, slots=2, steps=1, halves=True), False),
        (1, 512, Plan(2, 16, slots=2, steps=1, halves=True), False),
        (100, 9216, Plan(14, 16, slots=3, steps=3, halves=False), False),
        (5120, 8704 + 256, None, None),
        (5120, 9216 + 512, None, None),
    ],
)
def test_layouts_where_tensor_copies_bring_the_weight(n: int, k: int, plan: Plan | None, pays: bool | None) -> None:
    assert plan_for(n, k, H200) == plan
    assert plan is None or plan.pays is pays


@pytest.mark.parametrize("shared_bytes", [101_376, 166_912, 232_448])
@pytest.mark.parametrize("num_sms", [2, 84, 131, 132, 148])
def test_layouts_cover_the_weight_and_fit(num_sms: int, shared_bytes: int) -> None:
    facts = DeviceFacts(0, "a device", (9, 0), num_sms, shared_bytes, 0)
    for n in (1, 7, 100, 2112, 5120, 8192, 17408, 151_936):
        for k in range(512, 9728, 512):
            plan = plan_for(n, k, facts)
            if plan is None:
                assert k > 9216
                continue
            assert plan.blocks % 2 == 0
            assert plan.blocks <= num_sms
            assert plan.block_rows % 16 == 0
            assert (plan.blocks // 2 - 1) * plan.block_rows < n <= plan.blocks // 2 * plan.block_rows
            assert 2 <= plan.slots <= 4
            assert plan.shared_bytes <= shared_bytes
            assert 2 * 12 * 128 * (plan.steps - 1) < k <= 2 * 12 * 128 * plan.steps


@pytest.mark.parametrize(
    "facts",
    [
        DeviceFacts(0, "before 9.0", (8, 9), 132, 232_448, 0),
        DeviceFacts(0, "one SM", (9, 0), 1, 232_448, 0),
        DeviceFacts(0, "48 KB", (9, 0), 132, 49_152, 0),
    ],
    ids=lambda facts: facts.name,
)
def test_devices_that_tensor_copies_do_not_serve(facts: DeviceFacts) -> None:
    assert plan_for(5120, 5120, facts) is None


@pytest.mark.parametrize("broken", [(), (Plan,), (Plan, Blocks)], ids=["none", "bulk", "both"])
def test_where_the_bulk_kernel_cannot_be_built_the_other_one_serves(
    broken: tuple[type, ...], monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    """Each is tried once, and each failure warned of once."""
    tried: list[type] = []

    def kernel(ordinal: int, dtype: torch.dtype, layout: Blocks | Plan) -> None:
        tried.append(type(layout))
        if isinstance(layout, broken):
            raise KernelCompileError(f"no {type(layout).__name__}")

    monkeypatch.setattr(small_batch, "device_facts", lambda ordinal: H200)
    monkeypatch.setattr(small_batch, "_kernel", kernel)
    for cached in (small_batch._layout_for, small_batch._unavailable):  # caches of their own
        monkeypatch.setattr(small_batch, cached.__name__, functools.cache(cached.__wrapped__))
    for _ in range(3):
        layout = small_batch._layout_for(17408, 5120, True, 0, torch.bfloat16)
        reason = small_batch._unavailable(0, torch.bfloat16, layout)
    assert isinstance(layout, Blocks if broken else Plan)
    assert reason == ("no Blocks" if Blocks in broken else None)
    assert tried == ([Plan, Blocks] if broken else [Plan])
    assert [str(w.message) for w in recwarn] == [
        "NVFP4 layers take small_batch.cu in place of small_batch_bulk.cu: no Plan",
        "NVFP4 layers dequantize their weights for every decode step: no Blocks",
    ][: len(broken)]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("arch", "n", "k"),
    [
        ("sm_90", 17408, 5120),
        ("sm_90", 5120, 2560),
        ("sm_90", 5120, 8704),
        ("sm_100", 5120, 8704),
        ("sm_120", 5120, 8704),
    ],
)
def test_machine_code_copies_tensors_and_keeps_x_in_registers(
    tmp_path: Path, arch: str, n: int, k: int, dtype: torch.dtype
) -> None:
    plan = plan_for(n, k, H200)
    assert plan
    source = small_batch.source("small_batch_bulk")
    usage, code = machine_code(tmp_path, arch, source, compile_options(dtype, plan))
    registers, stack = (int(re.search(rf"{name}:(\d+)", usage)[1]) for name in ("REG", "STACK"))  # type: ignore[index]
    assert registers * THREADS <= 65_536
    assert stack <= (8 if arch == "sm_120" else 0)
    assert "UTMALDG" in code
    # Nothing of global memory is touched before the kernel ahead has ended, nor may the next one start before that.
    ahead_has_ended = code.index("ACQBULK")
    assert ahead_has_ended < code.index("PREEXIT")
    assert not re.search(r"\b(LDG|STG|LD|ST|UTMALDG)\b", code[:ahead_has_ended])
    assert "HMMA.16816" in code
    assert "LDS.128" in code
