"""Machine code of the Gluon decode for Hopper: nothing spills, no step waits for its own copies' addresses."""

from __future__ import annotations

import pytest
import torch
from sass import disassemble

from tpoverlap.attention.triton.configs import DecodeTiles, decode_tiles
from tpoverlap.attention.triton.gluon_available import hopper_decode_available

triton = pytest.importorskip("triton")

from attention_machine_code import compile_kernel  # noqa: E402

# Of a multiprocessor, and what each program takes of it beside its own.
SHARED_BYTES, RESERVED_BYTES = 233_472, 1024
# Head_dim and splits -> programs that a multiprocessor must hold: 64 x 2048 with 2 KV heads are 8 each.
PROGRAMS = {(128, 16): 8, (128, 128): 4, (256, 16): 4}


def test_this_triton_has_the_gluon_that_it_is_written_in():
    assert hopper_decode_available()


@pytest.mark.parametrize(("version", "known"), [("3.5.1", False), ("3.6.0", True), ("3.10.0", False)])
def test_other_versions_get_the_plain_kernel(monkeypatch, version, known):
    monkeypatch.setattr(triton, "__version__", version)
    assert hopper_decode_available.__wrapped__() is known


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("head_dim", "num_splits"),
    [(128, 16), pytest.param(128, 128, marks=pytest.mark.gpu), pytest.param(256, 16, marks=pytest.mark.gpu)],
)
def test_code_of_a_step(tmp_path, head_dim, num_splits):
    tiles = decode_tiles((9, 0), torch.float16, head_dim, num_splits)
    compiled, cubin = _compile(tmp_path, head_dim, num_splits, tiles, tiles.ring_stages)
    program_bytes = compiled.metadata.shared + RESERVED_BYTES
    assert SHARED_BYTES // program_bytes >= PROGRAMS[head_dim, num_splits]
    # The loop over keys: both products of a step for 8 columns, and no loop within.
    products = (head_dim // 16) * (tiles.block_n // 16) * 2
    steps = [body for body in disassemble(cubin, "hopper_decode_kernel").loops() if _count(body, "HMMA") == products]
    assert len(steps) == 1
    (step,) = steps
    assert _count(step, "LDL") + _count(step, "STL") == 0
    copies = [i for i in step if i.name == "LDGSTS"]
    assert copies
    assert all(".128" in i.opcode for i in copies)
    # Block ids come from a lane; the one load is of the next 32, and skipped in all other steps.
    assert _count(step, "REDUX") == tiles.block_n // 16
    assert _count(step, "LDG") <= tiles.block_n // 16


def _compile(tmp_path, head_dim: int, num_splits: int, tiles: DecodeTiles, stages: int):
    constants = {"KV_HEADS": 2, "GROUP": 6, "HEAD_DIM": head_dim, "DIM": head_dim, "BLOCK_SIZE": 16}
    constants |= {"BLOCK_N": tiles.block_n, "PART_KEYS": tiles.part_keys, "NUM_SPLITS": num_splits}
    constants |= {"STORE_LSE": False, "STAGES": stages, "DEPENDENT": True}
    from triton.experimental.gluon._runtime import GluonASTSource

    from tpoverlap.attention.triton.decode_hopper import WARPS, hopper_decode_kernel

    compiled = compile_kernel(hopper_decode_kernel, constants, (9, 0), source=GluonASTSource, num_warps=WARPS)
    cubin = tmp_path / "kernel.cubin"
    cubin.write_bytes(compiled.asm["cubin"])
    return compiled, cubin


def _count(body, name: str) -> int:
    return sum(i.name == name for i in body)
