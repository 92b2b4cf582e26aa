"""The fused product's host side and machine code, without a GPU."""

import re
import subprocess
from importlib import resources
from pathlib import Path

import pytest
import torch
from nvfp4_reference import random_weight

from tpoverlap.cuda.nvrtc import compile_cuda
from tpoverlap.quant.nvfp4 import small_batch


def test_cpu_inputs_are_rejected_with_the_reason() -> None:
    reason = small_batch.rejection(torch.ones(1, 32, dtype=torch.float16), random_weight(4, 32, seed=1))
    assert reason == "x is on cpu, not on a CUDA device"


@pytest.mark.parametrize(("arch", "bf16"), [("sm_75", 0), ("sm_80", 0), ("sm_80", 1), ("sm_90", 0), ("sm_90", 1)])
def test_machine_code_has_tensor_instructions_wide_loads_and_no_spills(tmp_path: Path, arch: str, bf16: int) -> None:
    triton = pytest.importorskip("triton", reason="its package carries the disassembler")
    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    source = resources.files("tpoverlap.quant.nvfp4").joinpath("small_batch.cu").read_text()
    cubin = tmp_path / "small_batch.cubin"
    cubin.write_bytes(compile_cuda(source, name="small_batch.cu", arch=arch, options=(f"-DBF16={bf16}",)))

    def tool(*command: str) -> str:
        return subprocess.run(
            [tools / command[0], *command[1:], cubin], capture_output=True, text=True, check=True
        ).stdout

    usage = tool("cuobjdump", "-res-usage")
    registers, stack = (int(re.search(rf"{name}:(\d+)", usage)[1]) for name in ("REG", "STACK"))  # type: ignore[index]
    assert stack == 0
    assert registers <= 64  # four blocks of 256 threads on an SM
    code = tool("nvdisasm", "-c")
    assert re.search(r"HMMA\.16816" if arch != "sm_75" else r"HMMA\.1688", code)
    assert "LDG.E.128" in code
    assert not re.search(r"\b(LDL|STL)\b", code)
