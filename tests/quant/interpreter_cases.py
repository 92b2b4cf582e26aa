"""Run by test_nvfp4_interpreter.py under TRITON_INTERPRET=1."""

import torch
from nvfp4_reference import GLOBAL_SCALES, all_codes, assert_same_bits, random_weight

from tpoverlap.quant.nvfp4 import NVFP4Tensor, dequantize, to_qpn2, torch_backend, triton_backend
from tpoverlap.quant.nvfp4.tiles import Tile

DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def main() -> None:
    passed = 0

    def check(t, row_major, dtype, tile) -> None:  # type: ignore[no-untyped-def]
        nonlocal passed
        wanted = torch.empty(t.shape, dtype=dtype)
        torch_backend.dequantize_into(row_major, wanted)
        got = torch.full(t.shape, 7.0, dtype=dtype)
        triton_backend.dequantize_into(t, got, tile)
        assert_same_bits(got, wanted, f"{type(t).__name__} {t.shape} {dtype} {tile}")
        passed += 1

    for global_scale in GLOBAL_SCALES:
        t = all_codes(global_scale)
        for dtype in DTYPES:
            check(t, t, dtype, Tile(256, 4))
            if dtype == torch.float16 or global_scale == GLOBAL_SCALES[0]:
                check(to_qpn2(t), t, dtype, Tile(2, 4))
    for groups in (16, 64, 512):
        for shape in ((7, 48), (33, 160)):
            for per_row in (False, True):
                t = random_weight(*shape, seed=groups, per_row=per_row, nan_scales=True)
                check(t, t, torch.float16, Tile(groups, 4))
                check(t, t, torch.bfloat16, Tile(groups, 4))
    for groups in (1, 4, 16, 64):
        for per_row in (False, True):
            t = random_weight(64, 80, seed=groups, per_row=per_row, nan_scales=True)
            check(to_qpn2(t), t, torch.float16, Tile(groups, 4))
            check(to_qpn2(t), t, torch.float32, Tile(groups, 4))
    t = random_weight(5, 32, seed=1)
    for dtype in DTYPES:
        assert_same_bits(dequantize(t, dtype, backend="triton"), dequantize(t, dtype, backend="torch"))
        passed += 1
    t = random_weight(9, 64, seed=2).slice_rows(3, 8)
    check(t, t, torch.float16, None)
    assert dequantize(random_weight(0, 32, seed=3), backend="triton").shape == (0, 32)
    # What a weight's first call has prepared serves no later call that differs.
    t, other = (random_weight(5, 64, seed=seed) for seed in (4, 5))
    for dtype, tile in ((torch.float16, None), (torch.float32, None), (torch.float16, Tile(16, 4))):
        check(t, t, dtype, tile)
    for part in ("codes", "scales"):
        getattr(t, part).data = getattr(other, part)
        check(t, t, torch.float16, Tile(16, 4))
    codes = torch.zeros(1 + 5 * 32, dtype=torch.uint8)[1:].view(5, 32)
    t = NVFP4Tensor(codes, other.scales, other.global_scale, (5, 64))
    for codes_now in (other.codes, other.codes.flip(0)):
        codes.copy_(codes_now)
        check(t, t, torch.float16, None)
    print(f"interpreter cases passed: {passed}")


if __name__ == "__main__":
    main()
