"""Top-k arms of launch/bench_sparse.py: the shared selection against torch.topk on the same scores."""

from __future__ import annotations

from functools import partial
from typing import Literal

import torch
from bench_common import alternate
from sparse_run import Run, graph_arm, require

from tpoverlap.attention.topk import topk_indices, topk_torch

Order = Literal["score", "index"]
SHAPES: tuple[tuple[int, int, int, Order], ...] = (
    (16, 65_536, 512, "index"),
    (40, 65_536, 512, "index"),
    (256, 65_536, 512, "index"),
    (1, 131_072, 2048, "score"),
    (64, 131_072, 2048, "score"),
    (1024, 131_072, 2048, "score"),
)


def measure_topk(run: Run) -> None:
    rows_out: list[list[object]] = []
    for rows, width, k, order in SHAPES:
        count = run.rotations(rows * width * 4.0, rows * width * 4.0)
        scores = [torch.randn(rows, width, device="cuda") for _ in range(count)]
        lengths = torch.full((rows,), width, dtype=torch.int32, device="cuda")

        def check(scores: list[torch.Tensor], lengths: torch.Tensor, k: int, order: Order) -> None:
            for x in scores:
                want = topk_torch(x[:40], lengths[:40], k, order=order, skip_neg_inf=False)
                require(torch.equal(topk_indices(x, lengths, k, order=order)[:40], want), "top-k is wrong")

        def check_torch(scores: list[torch.Tensor], lengths: torch.Tensor, k: int) -> None:
            for x in scores:
                mine = x.gather(1, topk_indices(x, lengths, k, order="score").long())
                require(torch.equal(torch.topk(x, k, dim=1).values, mine), "torch.topk and ours differ in scores")

        arms = [
            graph_arm(
                "ours",
                [partial(topk_indices, x, lengths, k, order=order) for x in scores],
                partial(check, scores, lengths, k, order),
            ),
            graph_arm(
                "torch.topk",
                [partial(torch.topk, x, k, dim=1) for x in scores],
                partial(check_torch, scores, lengths, k),
            ),
        ]
        result = alternate(arms, run.repetitions, label=f"top-k {rows} x {width}")
        ratio = result.ratio("ours", "torch.topk")
        run.figures[f"topk_{rows}x{width}_k{k}_of_torch"] = round(ratio.median, 3)
        run.figures[f"topk_{rows}x{width}_k{k}_us"] = round(result.time("ours").median * 1e6, 2)
        times = [result.time(name).as_time() for name in ("ours", "torch.topk")]
        rows_out.append([rows, width, k, order, *times, ratio.as_ratio()])
    columns = ["rows", "width", "k", "order", "ours", "torch.topk (by score)", "ours over torch.topk"]
    run.tables.append({"title": "Exact, deterministic top-k", "columns": columns, "rows": rows_out})
