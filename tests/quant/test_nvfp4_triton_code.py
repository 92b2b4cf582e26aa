"""Machine code of the Triton kernels for GPUs that are not here: who loads and stores what, in any Triton."""

import re
import subprocess
import warnings
from pathlib import Path

import pytest
import torch

from tpoverlap.quant.nvfp4.tiles import tile_for

triton = pytest.importorskip("triton")

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from tpoverlap.quant.nvfp4 import NVFP4Tensor, QPN2Tensor, triton_backend, triton_kernels  # noqa: E402

COMMON = {"words": "*i32", "scales": "*u8", "global_scale": "*fp32"}
KERNELS = {
    "row_major": (triton_kernels.dequantize_row_major, {"num_groups": "i32", "groups_per_row": "i32"}),
    "qpn2": (triton_kernels.dequantize_qpn2, {"groups_per_row": "i32"}),
}


@pytest.mark.parametrize("per_row", [False, True])
@pytest.mark.parametrize("layout", ["row_major", "qpn2"])
@pytest.mark.parametrize(
    ("capability", "out"), [((7, 0), "fp16"), ((7, 5), "fp16"), ((8, 6), "fp16"), ((9, 0), "fp16"), ((9, 0), "bf16")]
)
def test_a_warp_takes_words_side_by_side_and_products_keep_subnormals(
    tmp_path: Path, capability: tuple[int, int], out: str, layout: str, per_row: bool
) -> None:
    """Each thread stores 16 bytes at a time, its neighbours the next 16, and nothing goes through shared memory."""
    kernel, sizes = KERNELS[layout]
    tile = tile_for(layout, capability)  # type: ignore[arg-type]
    signature = COMMON | {"out": f"*{out}"} | sizes | {"PER_ROW": "constexpr", "GROUPS": "constexpr"}
    names = list(signature)
    source = ASTSource(
        kernel,
        signature,
        constexprs={"PER_ROW": per_row, "GROUPS": tile.groups},
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in (*names[:4], "groups_per_row")},
    )
    target = GPUTarget("cuda", 10 * capability[0] + capability[1], 32)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a notice about the default of fusing multiply and add: there is no add
        compiled = triton.compile(source, target=target, options={"num_warps": tile.num_warps})
    threads = set(re.findall(r"threadsPerWarp = (\[[\d, ]+\])", compiled.asm["ttgir"]))
    assert "[32, 1]" in threads
    assert threads <= {"[32, 1]", "[32]"}
    assert compiled.metadata.shared == 0
    assert set(re.findall(r"st\.global\S*", compiled.asm["ptx"])) == {"st.global.v4.b32"}
    if capability == (7, 0):
        return  # the disassembler of Triton 3.9 does not know it
    cubin = tmp_path / "kernel.cubin"
    cubin.write_bytes(compiled.asm["cubin"])
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
    code = subprocess.run([tool, "-c", cubin], capture_output=True, text=True, check=True).stdout
    assert re.search(r"STG\.E(\.\w+)*\.128", code)
    assert "FMUL" in code
    assert "FMUL.FTZ" not in code
    assert not re.search(r"\b(LDL|STL)\b", code)


def test_a_launch_counts_groups_in_integers_of_one_width(monkeypatch: pytest.MonkeyPatch) -> None:
    """2**31 of them are counted by another launch than fewer: a launcher may cut an int64 to the int32 before it."""
    counts: list[list[int]] = []

    class Launch:
        def __init__(self, *_: object, **__: object) -> None:
            self.counts: list[int] = []
            counts.append(self.counts)

        def __call__(self, programs: int, tensors: tuple[torch.Tensor, ...], values: tuple[int, ...]) -> None:
            self.counts.append(values[0])

    monkeypatch.setattr(triton_backend, "FastLaunch", Launch)
    triton_backend._row_major.cache_clear()
    groups_per_row = 64
    for n in (1, 2**25 - 1, 2**25, 2**26, 2):
        k = 16 * groups_per_row
        weight = NVFP4Tensor(
            torch.empty(n, k // 2, dtype=torch.uint8, device="meta"),
            torch.empty(n, groups_per_row, dtype=torch.float8_e4m3fn, device="meta"),
            torch.empty((), device="meta"),
            (n, k),
        )
        triton_backend.dequantize_into(weight, torch.empty(n, k, dtype=torch.float16, device="meta"))
    triton_backend._row_major.cache_clear()
    assert counts == [[64, 2**31 - 64, 128], [2**31, 2**32]]


@pytest.mark.parametrize(
    ("shape", "serves"),
    [((32, 2**26), True), ((32, 2**26 + 16), False), ((32 * 65_535, 16), True), ((32 * 65_536, 16), False)],
)
def test_a_qpn2_weight_past_the_grid_or_int32_offsets_is_refused(
    shape: tuple[int, int], serves: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    n, k = shape
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    tiles = (n // 32, k // 16, 32)
    weight = QPN2Tensor(
        torch.empty(*tiles, 8, dtype=torch.uint8, device="meta"),
        torch.empty(tiles, dtype=torch.float8_e4m3fn, device="meta"),
        torch.empty((), device="meta"),
        shape,
    )
    reason = triton_backend.rejection(weight)
    assert reason is None if serves else reason is not None and str(list(shape)) in reason
    # The last row's last weight in a tile, and CUDA's limit of a grid.
    assert not serves or (32 * k - 1 < 2**31 and n // 32 <= 65_535)
