"""Machine code of the warp-specialized prefill for Hopper: products overlap, and loops spill next to nothing."""

from __future__ import annotations

import pytest
import torch
from sass import disassemble

from tpoverlap.attention.triton.configs import prefill_tiles
from tpoverlap.attention.triton.gluon_available import hopper_prefill_available

triton = pytest.importorskip("triton")

from attention_machine_code import compile_kernel  # noqa: E402

SHARED_BYTES = 232_448
# Of some 700 instructions: Triton 3.9 spills one of a consumer with head_dim 128, 3.6 none.
SPILLS_IN_A_STEP = 2


def test_this_triton_has_the_gluon_that_it_is_written_in():
    assert hopper_prefill_available()


@pytest.mark.parametrize(
    ("version", "known"), [("3.5.1", False), ("3.6.0", True), ("3.9.0+git1", True), ("3.10.0", False)]
)
def test_other_versions_get_the_plain_kernel(monkeypatch, version, known):
    monkeypatch.setattr(triton, "__version__", version)
    assert hopper_prefill_available.__wrapped__() is known


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "head_dim", [pytest.param(64, marks=pytest.mark.gpu), 128, pytest.param(256, marks=pytest.mark.gpu)]
)
def test_code_of_the_consumers_and_the_producer(tmp_path, head_dim):
    tiles = prefill_tiles((9, 0), torch.float16, head_dim)
    constants = {"KV_HEADS": 2, "GROUP": 6, "HEAD_DIM": head_dim, "DIM": head_dim, "BLOCK_SIZE": 16}
    constants |= {"BLOCK_M": tiles.block_m, "BLOCK_N": tiles.block_n, "PART_KEYS": tiles.part_keys}
    constants |= {"STAGES": tiles.specialized_stages, "WINDOW": False, "SOFTCAP": False, "STORE_LSE": False}
    from triton.experimental.gluon._runtime import GluonASTSource

    from tpoverlap.attention.triton.prefill_hopper import WARPS, hopper_prefill_kernel

    compiled = compile_kernel(hopper_prefill_kernel, constants, (9, 0), source=GluonASTSource, num_warps=WARPS)
    assert compiled.metadata.shared <= SHARED_BYTES
    cubin = tmp_path / "kernel.cubin"
    cubin.write_bytes(compiled.asm["cubin"])
    loops = disassemble(cubin, "hopper_prefill_kernel").loops()
    # The two consumers' loops over keys: all of a step's products, and no loop within.
    products = head_dim // 16 + tiles.block_n // 16
    steps = [body for body in loops if _count(body, "HGMMA") == products and not _count(body, "STG")]
    steps = sorted(steps, key=len)[:2]
    assert len(steps) == 2
    for body in steps:
        # ptxas waits after every instruction where it cannot keep products in flight.
        assert sum(i.opcode.startswith("WARPGROUP.DEPBAR") for i in body) == 2
        assert _count(body, "LDL") + _count(body, "STL") <= SPILLS_IN_A_STEP
    copies = [body for body in loops if _count(body, "LDGSTS")]
    assert copies
    assert all(".128" in i.opcode for body in copies for i in body if i.name == "LDGSTS")


def _count(body, name: str) -> int:
    return sum(i.name == name for i in body)
