"""Statistics as a run of a real model leaves them, from the two-resource model of docs: one compute stream and one
communication channel a rank, pieces in order, a collective that waits for the slowest rank."""

from __future__ import annotations

import random

from tpoverlap.microbatch.stats import Interval, RunStats

HANDOVER_S = 25e-6


def simulate_run(
    rng: random.Random,
    *,
    start_s: float,
    piece_tokens: tuple[int, ...],
    num_ranks: int = 2,
    num_layers: int = 8,
    attention_s: float = 0.9e-6,
    mlp_s: float = 1.8e-6,
    collective_s: float = 1.25e-6,
    hidden_bytes: int = 1152,
) -> list[RunStats]:
    """One run on every rank. ``*_s``: seconds a token. Segments alternate attention / MLP; one collective each."""
    runs = [
        RunStats(sum(piece_tokens), piece_tokens, None if len(piece_tokens) > 1 else "fewer than min_tokens")
        for _ in range(num_ranks)
    ]
    compute_free = [start_s + rng.uniform(0, 30e-6) for _ in range(num_ranks)]
    channel_free = start_s
    ready = [[0.0] * len(piece_tokens) for _ in range(num_ranks)]

    def record(rank: int, kind: str, piece: int, name: str, start: float, end: float, size: int, index: int) -> None:
        interval = Interval(kind, piece, name, start, end, size, index)  # type: ignore[arg-type]
        runs[rank].intervals.append(interval)

    def resume(rank: int, piece: int, index: int) -> float:
        """The compute stream takes the piece up again: hand-over, then the wait for the piece's own collective."""
        now = compute_free[rank]
        if index and len(piece_tokens) > 1:
            record(rank, "handover", piece, "hand-over", now, now + HANDOVER_S, 0, index)
            now += HANDOVER_S
        if ready[rank][piece] > now:
            record(rank, "exposed", piece, "wait for all_reduce", now, ready[rank][piece], 0, index - 1)
            now = ready[rank][piece]
        return now

    for index in range(2 * num_layers):
        name, per_token = ("attention", attention_s) if index % 2 == 0 else ("mlp", mlp_s)
        for piece, tokens in enumerate(piece_tokens):
            arrivals = []
            for rank in range(num_ranks):
                now = resume(rank, piece, index)
                end = now + tokens * per_token * rng.uniform(0.95, 1.08)
                record(rank, "compute", piece, name, now, end, 0, index)
                compute_free[rank] = end
                arrivals.append(max(end, channel_free))
            channel_free = max(arrivals) + tokens * collective_s * rng.uniform(0.95, 1.15)
            for rank in range(num_ranks):
                size = tokens * hidden_bytes
                record(rank, "communication", piece, "all_reduce", arrivals[rank], channel_free, size, index)
                ready[rank][piece] = channel_free
    for rank, stats in enumerate(runs):
        for piece in range(len(piece_tokens)):
            compute_free[rank] = resume(rank, piece, 2 * num_layers)
        seconds = dict.fromkeys(("compute", "communication", "exposed", "handover"), 0.0)
        for interval in stats.intervals:
            seconds[interval.kind] += interval.end_s - interval.start_s
        stats.wall_s = compute_free[rank] - start_s
        stats.compute_s, stats.communication_s = seconds["compute"], seconds["communication"]
        stats.exposed_s, stats.handover_s = seconds["exposed"], seconds["handover"]
        stats.num_collectives = 2 * num_layers * len(piece_tokens)
        stats.collective_bytes = 2 * num_layers * sum(piece_tokens) * hidden_bytes
    return runs


def two_rank_example(seed: int, *, num_layers: int = 8, num_chunks: int = 2) -> list[tuple[int, list[RunStats]]]:
    """Two ranks: some chunks in two halves, and a short last one that runs whole; (rank, runs) pairs."""
    rng = random.Random(seed)
    now = 5000.0 + rng.uniform(0, 1000)
    per_rank: list[list[RunStats]] = [[], []]
    for tokens in [(1088, 960)] * num_chunks + [(300,)]:
        stats = simulate_run(rng, start_s=now, piece_tokens=tokens, num_layers=num_layers)
        for rank, run in enumerate(stats):
            per_rank[rank].append(run)
        now += max(run.wall_s for run in stats) + 2e-3
    return list(enumerate(per_rank))
