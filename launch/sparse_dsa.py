"""DSA arms of launch/bench_sparse.py: mask, block scores and selection by live length, width and rows."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from bench_common import Arm, Comparison, Spread, alternate
from sparse_floor import floor_mask, floor_scores, kept_words
from sparse_full_width import full_width_mask, full_width_scores
from sparse_run import Run, graph_arm, require

from tpoverlap.attention import dsa
from tpoverlap.attention.dsa import launches, torch_backend
from tpoverlap.attention.topk import topk_torch

WIDTH = 1 << 20
BLOCK, CANDIDATES = 8, 2048
ROWS = (1, 16, 256, 1024)
LIVE = (64, 512, 8192, 131_072, WIDTH)


def narrow_width(live: int) -> int:
    """The live length rounded up to the kernels' tile of 1024 columns."""
    return -(-live // 1024) * 1024


def shapes(run: Run) -> list[tuple[int, int]]:
    """(rows, live) whose logits fit a quarter of the memory."""
    free = torch.cuda.mem_get_info()[0] / 4
    return [(rows, live) for rows in ROWS for live in LIVE if rows * WIDTH * 4 < free]


class Buffers:
    """Rotated logits of one shape, wide and narrow, their ends, and candidates as the selection gives them."""

    def __init__(self, run: Run, rows: int, live: int) -> None:
        width = narrow_width(live)
        count = run.rotations(rows * 4.0 * (live + CANDIDATES), rows * 4.0 * (WIDTH + width))
        self.rows, self.live = rows, live
        self.ends = torch.full((rows,), live, dtype=torch.int32, device="cuda")
        self.wide = [torch.randn(rows, WIDTH, device="cuda") for _ in range(count)]
        self.narrow = [wide[:, :width].contiguous() for wide in self.wide]
        self.repeats = max(1, min(16, 2**24 // (rows * live)) // count)


def checked_rows(rows: int) -> list[int]:
    return sorted({0, rows // 2, rows - 1})


def measure_mask(run: Run) -> None:
    """The mask by itself: candidates in, -inf out."""

    def arms(buffers: Buffers) -> list[Arm]:
        wanted = {
            id(logits): dsa.select_candidate_blocks(logits, None, buffers.ends, CANDIDATES, BLOCK)
            for logits in buffers.narrow
        }
        candidates = [wanted[id(logits)] for logits in buffers.narrow]

        def masks(mask: Callable[..., object], logits: list[torch.Tensor]) -> list[Callable[[], object]]:
            return [partial(mask, x, None, buffers.ends, c, BLOCK) for x, c in zip(logits, candidates, strict=True)]

        def check(mask: Callable[..., object], logits: list[torch.Tensor]) -> None:
            # On copies of a few rows: the timed buffers have been masked already.
            for x, c in zip(logits, candidates, strict=True):
                rows = checked_rows(buffers.rows)
                got, ends = torch.randn(len(rows), x.shape[1], device="cuda"), buffers.ends[rows].contiguous()
                want = got.clone()
                mask(got, None, ends, c[rows].contiguous(), BLOCK)
                torch_backend.apply_candidate_mask(want, None, ends, c[rows], BLOCK, 1)
                live = slice(None, buffers.live)
                require(torch.equal(got[:, live], want[:, live]), "the mask is wrong")

        words = [kept_words(c, buffers.live, BLOCK) for c in candidates]

        def floors(logits: list[torch.Tensor]) -> list[Callable[[], object]]:
            sets = zip(logits, candidates, words, strict=True)
            return [partial(floor_mask, x, c, w, buffers.live, BLOCK) for x, c, w in sets]

        def floor_of_few(x: torch.Tensor, _starts: None, _ends: torch.Tensor, c: torch.Tensor, block_size: int) -> None:
            floor_mask(x, c, kept_words(c, buffers.live, block_size), buffers.live, block_size)

        return [
            *(
                graph_arm(name, masks(mask, logits), partial(check, mask, logits), buffers.repeats)
                for name, mask, logits in (
                    ("wide", dsa.apply_candidate_mask, buffers.wide),
                    ("narrow", dsa.apply_candidate_mask, buffers.narrow),
                    ("full", full_width_mask, buffers.wide),
                )
            ),
            *(
                graph_arm(name, floors(logits), partial(check, floor_of_few, logits), buffers.repeats)
                for name, logits in (("floor wide", buffers.wide), ("floor narrow", buffers.narrow))
            ),
        ]

    _measure(run, "mask", "DSA mask, block size 8, 2048 candidates, width 1,048,576", arms)


def measure_scores(run: Run) -> None:
    """Block scores as the selection uses them (live blocks only), and the public function's fill of the rest."""

    def arms(buffers: Buffers) -> list[Arm]:
        def live_scores(logits: torch.Tensor) -> torch.Tensor:
            return launches.block_scores(logits, None, buffers.ends, BLOCK, 1, fill=False)[0]

        def filled_scores(logits: torch.Tensor) -> torch.Tensor:
            return dsa.block_scores(logits, None, buffers.ends, BLOCK)

        def wide_scores(logits: torch.Tensor) -> torch.Tensor:
            return full_width_scores(logits, buffers.ends, BLOCK)

        def floor(logits: torch.Tensor) -> torch.Tensor:
            scores = torch.empty(buffers.rows, logits.shape[1] // BLOCK, device="cuda")
            floor_scores(logits, buffers.live, BLOCK, scores)
            return scores

        def check(score: Callable[[torch.Tensor], torch.Tensor], logits: list[torch.Tensor], blocks: int) -> None:
            rows = checked_rows(buffers.rows)
            if score is floor:
                blocks -= 1  # the newest, which the floor does not pin
            for x in logits:
                got = score(x)[rows, :blocks]
                want = torch_backend.block_scores(x[rows], None, buffers.ends[rows], BLOCK, 1)[:, :blocks]
                require(torch.equal(got, want), "the scores are wrong")

        live_blocks = -(-buffers.live // BLOCK)
        return [
            graph_arm(name, [partial(score, x) for x in logits], partial(check, score, logits, blocks), buffers.repeats)
            for name, score, logits, blocks in (
                ("wide", live_scores, buffers.wide, live_blocks),
                ("narrow", live_scores, buffers.narrow, live_blocks),
                ("full", wide_scores, buffers.wide, WIDTH // BLOCK),
                ("filled", filled_scores, buffers.wide, WIDTH // BLOCK),
                ("floor wide", floor, buffers.wide, live_blocks),
                ("floor narrow", floor, buffers.narrow, live_blocks),
            )
        ]

    _measure(run, "scores", "DSA block scores, block size 8, width 1,048,576", arms)


def measure_select(run: Run) -> None:
    """Scores and selection together, against torch.topk alone over full-width scores."""

    def arms(buffers: Buffers) -> list[Arm]:
        def select(logits: torch.Tensor) -> torch.Tensor:
            return dsa.select_candidate_blocks(logits, None, buffers.ends, CANDIDATES, BLOCK)

        scores = [dsa.block_scores(x, None, buffers.ends, BLOCK) for x in buffers.wide]

        def check(logits: list[torch.Tensor]) -> None:
            rows = checked_rows(buffers.rows)
            for x, full in zip(logits, scores, strict=True):
                lengths = torch.full((len(rows),), full.shape[1], dtype=torch.int32, device="cuda")
                want = topk_torch(full[rows], lengths, CANDIDATES, order="score", skip_neg_inf=True)
                require(torch.equal(select(x)[rows], want), "the selection is wrong")

        def check_torch() -> None:
            for full, x in zip(scores, buffers.wide, strict=True):
                best = torch.topk(full, CANDIDATES, dim=1).values
                chosen = select(x).long()
                mine = full.gather(1, chosen.clamp(min=0)).masked_fill(chosen < 0, -torch.inf)
                require(torch.equal(best, mine), "torch.topk and the selection differ in scores")

        topk = [partial(torch.topk, full, CANDIDATES, dim=1) for full in scores]
        return [
            graph_arm(
                "wide", [partial(select, x) for x in buffers.wide], partial(check, buffers.wide), buffers.repeats
            ),
            graph_arm(
                "narrow", [partial(select, x) for x in buffers.narrow], partial(check, buffers.narrow), buffers.repeats
            ),
            graph_arm("full", topk, check_torch, buffers.repeats),
        ]

    title = "DSA selection (scores and top 2048) against torch.topk alone over full-width scores"
    _measure(run, "select", title, arms)


def _measure(run: Run, what: str, title: str, make_arms: Callable[[Buffers], list[Arm]]) -> None:
    lines: list[dict[str, object]] = []
    for count, live in shapes(run):
        buffers = Buffers(run, count, live)
        arms = make_arms(buffers)
        result = alternate(arms, run.repetitions, label=f"DSA {what} {count} x {live}")
        lines.append({"rows": count, "live": live} | _cells(run, f"dsa_{what}_{count}x{live}", result))
        del buffers, arms, result
        torch.cuda.empty_cache()
    rows = [list(line.values()) for line in lines]
    run.tables.append({"title": title, "columns": list(lines[0]) if lines else ["rows"], "rows": rows})


def _cells(run: Run, key: str, result: Comparison) -> dict[str, object]:
    """Column -> cell of one shape; the figures go to the run."""
    by_width, speed_up = result.ratio("wide", "narrow"), result.ratio("full", "wide")
    run.figures[f"{key}_us"] = round(result.time("wide").median * 1e6, 2)
    run.figures[f"{key}_wide_over_narrow"] = round(by_width.median, 3)
    run.figures[f"{key}_speed_up"] = round(speed_up.median, 2)
    cells: dict[str, object] = {
        "time": result.time("wide").as_time(),
        "wide over narrow": by_width.as_ratio(),
        "full-width time": result.time("full").as_time(),
        "speed-up over full width": speed_up.as_ratio(),
    }
    if "filled" in result.turns:
        cells["with fill"] = result.time("filled").as_time()
    if "floor wide" in result.turns:
        floor_by_width = result.ratio("floor wide", "floor narrow")
        over_floor = result.ratio("wide", "floor wide")
        own_by_width = _beyond_floor(result)
        run.figures[f"{key}_floor_us"] = round(result.time("floor wide").median * 1e6, 2)
        run.figures[f"{key}_floor_wide_over_narrow"] = round(floor_by_width.median, 3)
        run.figures[f"{key}_over_floor"] = round(over_floor.median, 3)
        run.figures[f"{key}_wide_over_narrow_beyond_floor"] = round(own_by_width.median, 3)
        cells |= {
            "floor": result.time("floor wide").as_time(),
            "floor, wide over narrow": floor_by_width.as_ratio(),
            "time over floor": over_floor.as_ratio(),
            "wide over narrow, of the floor's": own_by_width.as_ratio(),
        }
    return cells


def _beyond_floor(result: Comparison) -> Spread:
    """What a kernel adds to the width's price: its wide over narrow divided by the floor's, turn by turn."""
    names = ("wide", "narrow", "floor wide", "floor narrow")
    turns = zip(*(result.turns[name] for name in names), strict=True)
    return Spread.of([(wide / narrow) / (floor / floor_narrow) for wide, narrow, floor, floor_narrow in turns])
