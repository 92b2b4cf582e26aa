"""Machine code of the dequantization for GPUs that are not here: who loads and stores what, in any Triton."""

from __future__ import annotations

import re

import pytest

from tpoverlap.quant.nvfp4.tiles import tile_for

triton = pytest.importorskip("triton")

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from tpoverlap.quant.nvfp4 import triton_kernels as kernels  # noqa: E402

KERNELS = {"row_major": kernels.dequantize_row_major, "qpn2": kernels.dequantize_qpn2}


@pytest.mark.parametrize("per_row", [False, True])
@pytest.mark.parametrize("capability", [(7, 0), (7, 5), (8, 6), (9, 0)])
@pytest.mark.parametrize("layout", list(KERNELS))
def test_a_warp_takes_words_side_by_side(layout, capability, per_row):
    """Each thread stores 16 bytes at a time, its neighbours the next 16, and nothing goes through shared memory."""
    kernel, tile = KERNELS[layout], tile_for(layout, capability)
    signature = {"words": "*i32", "scales": "*u8", "global_scale": "*fp32", "out": "*fp16", "groups_per_row": "i32"}
    signature |= {"num_groups": "i32"} if layout == "row_major" else {}
    constants = {"PER_ROW": per_row, "GROUPS": tile.groups}
    names = [parameter.name for parameter in kernel.params]
    source = ASTSource(
        kernel,
        {name: signature.get(name, "constexpr") for name in names},
        {(names.index(name),): value for name, value in constants.items()},
        {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if name in signature and name != "num_groups"},
    )
    target = GPUTarget("cuda", capability[0] * 10 + capability[1], 32)
    compiled = triton.compile(source, target=target, options={"num_warps": tile.num_warps})
    layouts = re.findall(r"threadsPerWarp = (\[[\d, ]+\])", compiled.asm["ttgir"])
    assert layouts
    assert set(layouts) <= {"[32, 1]", "[32]"}
    assert compiled.metadata.shared == 0
    stores = set(re.findall(r"st\.global\S*", compiled.asm["ptx"]))
    assert stores == {"st.global.v4.b32"}
