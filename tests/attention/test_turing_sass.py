"""What the compiler made of the Turing kernel for compute capability 7.5. Needs NVRTC and a disassembler, no GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import sass

from tpoverlap.attention.turing import launch
from tpoverlap.cuda.nvrtc import compile_cuda, nvrtc_version
from tpoverlap.errors import UnsupportedError

SHARED_BYTES_OF_AN_SM = 65_536


@pytest.fixture(scope="module")
def cubin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    try:
        nvrtc_version()
    except UnsupportedError as error:
        pytest.skip(str(error))
    if not (sass.tool("nvdisasm") and sass.tool("cuobjdump")):
        pytest.skip("no disassembler: it comes with the Triton package")
    path = tmp_path_factory.mktemp("sass") / "prefill.cubin"
    path.write_bytes(compile_cuda(launch.source(), name="prefill.cu", arch="sm_75", options=launch.OPTIONS))
    return path


@pytest.fixture(scope="module")
def attend(cubin: Path) -> sass.Kernel:
    return sass.disassemble(cubin, "attend")


@pytest.mark.parametrize("kernel", ["attend", "merge"])
def test_no_spills_and_no_stack(cubin: Path, kernel: str) -> None:
    usage = sass.resources(cubin)[kernel]
    assert usage["LOCAL"] == 0
    assert usage["STACK"] == 0
    assert usage["REG"] <= 255
    names = {instruction.name for instruction in sass.disassemble(cubin, kernel).instructions}
    assert names
    assert not names & {"LDL", "STL"}


def test_a_block_fits_the_shared_memory_of_an_sm(cubin: Path) -> None:
    assert sass.resources(cubin)["attend"]["SHARED"] + launch.SHARED_BYTES <= SHARED_BYTES_OF_AN_SM
    assert sass.resources(cubin)["merge"]["SHARED"] <= SHARED_BYTES_OF_AN_SM


def test_the_inner_loop_is_products_and_wide_loads(attend: sass.Kernel) -> None:
    body = attend.loop("HMMA")
    print(f"inner loop, {len(body)} instructions: {sass.mix(body)}")
    opcodes = [instruction.opcode for instruction in body]
    # A warp's share of a tile: 16 rows x 32 keys x 256 dimensions and 32 x 32 x 128, in products of 16 x 8 x 8.
    assert opcodes.count("HMMA.1688.F32") == 256
    # Each K fragment serves one product, each V fragment two; four fragments a load.
    matrix_loads = [opcode for opcode in opcodes if opcode.startswith("LDSM")]
    assert len(matrix_loads) == 128 // 4 + 128 // 2 // 4
    assert all(opcode.endswith(".4") for opcode in matrix_loads)
    # K and V: 32 KiB a tile, 16 bytes a thread and load.
    assert sum(opcode.startswith("LDG.E.128") for opcode in opcodes) == 8
    assert sum(opcode.startswith("STS.128") for opcode in opcodes) == 8
    # The rest of a tile's work, without the paths of masked tiles and of a moved maximum, must leave room for products.
    assert len(body) < 1000


def test_staged_keys_are_loaded_well_before_they_are_stored(attend: sass.Kernel) -> None:
    """Between a 16-byte load and the store of its registers lie about a quarter of the tile's 256 products."""
    body = attend.loop("HMMA")
    twice = body + body
    for at, load in enumerate(body):
        if not load.opcode.startswith("LDG.E.128"):
            continue
        between = 0
        for later in twice[at + 1 : at + len(body)]:
            between += later.name == "HMMA"
            if later.opcode.startswith("STS.128") and later.operands[1].removesuffix(".reuse") == load.operands[0]:
                break
        else:
            pytest.fail(f"the registers of {load} are never stored")
        assert between >= 48, f"{load}: stored after {between} products"
