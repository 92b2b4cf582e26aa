"""The floors of the DSA benchmark, under Triton's interpreter, and the cells that compare with them."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch
from triton_interpreter import run_tests

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "launch"))

pytest.importorskip("triton")

if os.environ.get("TRITON_INTERPRET") != "1":
    from bench_common import Comparison
    from sparse_dsa import _cells
    from sparse_run import Run

    @pytest.mark.timeout(200)
    def test_floors_in_the_interpreter() -> None:
        assert run_tests(Path(__file__), timeout_s=180) > 0

    def test_cells_take_the_floors_ratio_out_of_ours() -> None:
        seconds = {"wide": 6e-6, "narrow": 4e-6, "full": 60e-6, "floor wide": 5e-6, "floor narrow": 4e-6}
        run = Run(repetitions=2, l2_bytes=1)
        # The machine runs at half speed in the second turn; ratios do not see that.
        cells = _cells(run, "x", Comparison({name: (value, 2 * value) for name, value in seconds.items()}))
        assert run.figures["x_wide_over_narrow"] == 1.5
        assert run.figures["x_floor_wide_over_narrow"] == 1.25
        assert run.figures["x_over_floor"] == 1.2
        assert run.figures["x_wide_over_narrow_beyond_floor"] == 1.2
        assert run.figures["x_speed_up"] == 10
        assert str(cells["wide over narrow, of the floor's"]).startswith("1.200")
        assert "with fill" not in cells

else:
    from sparse_floor import floor_mask, floor_scores, kept_words

    @pytest.mark.parametrize("live", [64, 512, 8192])
    @pytest.mark.parametrize("dropping", [False, True])
    def test_the_mask_floor_drops_what_is_not_kept(live: int, dropping: bool) -> None:
        g = torch.Generator().manual_seed(live)
        logits = torch.randn(3, 16_384, generator=g)
        candidates = torch.full((3, 40), -1, dtype=torch.int32)
        kept = torch.zeros(3, live // 8, dtype=torch.bool)
        for row in range(3):
            chosen = torch.randperm(live // 8, generator=g)[: 1 + 12 * row]
            candidates[row, : len(chosen)] = chosen.int()
            kept[row, chosen] = True
        words = kept_words(candidates, live, 8)
        if not dropping:
            words.fill_(-1)
            kept.fill_(True)
        want = logits.clone()
        want[:, :live].masked_fill_(~kept.repeat_interleave(8, dim=1), -torch.inf)
        floor_mask(logits, candidates, words, live, 8)
        assert torch.equal(logits, want)

    @pytest.mark.parametrize("live", [64, 512, 8192, 16_384])
    def test_the_score_floor_is_the_maxima_of_the_live_blocks(live: int) -> None:
        logits = torch.randn(2, 16_384, generator=torch.Generator().manual_seed(live))
        scores = torch.full((2, 2048), 7.0)
        floor_scores(logits, live, 8, scores)
        assert torch.equal(scores[:, : live // 8], logits[:, :live].view(2, -1, 8).amax(2))
        assert (scores[:, live // 8 :] == 7.0).all()
