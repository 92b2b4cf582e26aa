"""What the parts of launch/bench_sparse.py share: settings and results of the run, graph arms, tables on a terminal."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from bench_common import Arm, on_gpu

Table = dict[str, object]


@dataclass
class Run:
    """repetitions: turns of an arm. l2_bytes: of the GPU. tables, figures: filled by the parts."""

    repetitions: int
    l2_bytes: int
    tables: list[Table] = field(default_factory=list)
    figures: dict[str, float | int | str] = field(default_factory=dict)

    def rotations(self, touched_bytes: float, buffer_bytes: float) -> int:
        """Input sets whose touched bytes pass the L2 cache twice: 1 to 8, and at most a quarter of the free memory."""
        fits = int(torch.cuda.mem_get_info()[0] / 4 // max(1.0, buffer_bytes))
        return max(1, min(8, fits, 1 + int(2 * self.l2_bytes // max(1.0, touched_bytes))))


def graph_arm(name: str, calls: Sequence[Callable[[], object]], check: Callable[[], object], repeats: int = 1) -> Arm:
    """An arm whose turn replays a graph of all calls, ``repeats`` times over, and returns the seconds of one."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(repeats):
            for call in calls:
                call()
    turn = on_gpu(graph.replay)
    return Arm(name, check, lambda: turn() / (len(calls) * repeats))


def require(condition: bool | torch.Tensor, what: str) -> None:
    """AssertionError that names what is wrong."""
    if not bool(condition):
        raise AssertionError(what)


def print_table(table: Table) -> None:
    lines = [table["columns"], *table["rows"]]  # type: ignore[misc]
    cells = [["" if cell is None else str(cell) for cell in line] for line in lines]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    print(f"\n{table['title']}")
    for line in cells:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip(), flush=True)
