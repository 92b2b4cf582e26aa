"""Where a batch of packed requests is cut. Pure functions of host integers: all ranks come to the same pieces."""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Iterable, Sequence

from tpoverlap.microbatch.batch import TokenPiece, check_starts, host_int, host_ints


def split_tokens(
    query_start_loc: Sequence[int],
    seq_lens: Sequence[int],
    *,
    cut: int | Sequence[int] | None = None,
    num_pieces: int = 2,
    cut_multiple: int = 128,
    state_block: int | None = None,
    balance_position: float = math.inf,
) -> list[TokenPiece]:
    """Cuts a batch's tokens into contiguous pieces.

    query_start_loc: requests + 1 starts of the requests' tokens, from 0; seq_lens: keys of each request, its new
    tokens counted. cut: the first token of the second piece, or num_pieces - 1 ascending ones, taken as they are;
    None balances the estimated time of the pieces, where a token at position p of its sequence costs
    1 + p / ``balance_position`` (see :func:`balance_position`), and rounds to a multiple of ``cut_multiple``.
    state_block: tokens a block of a recurrent-state cache in align mode, whose slot is (seq_len - 1) // state_block:
    a cut inside a request then moves up to and including the first token whose slot is that of the request's last
    token of the batch, so that no piece ends in a slot that a later one must still read in its earlier state.

    A request that a cut crosses continues in the next piece with the keys up to that piece's end. No piece is empty:
    a cut outside the batch, or on another cut, counts for nothing, so that fewer pieces, down to one, may come back.
    Raises ValueError for starts, lengths or cuts that do not fit together, or are no integers.
    """
    starts, lens = host_ints("query_start_loc", query_start_loc), host_ints("seq_lens", seq_lens)
    check_starts(starts, lens)
    check_split_options(cut_multiple, state_block, balance_position, num_pieces)
    total = starts[-1]
    cuts = None if cut is None else _given_cuts(cut, num_pieces)
    if total == 0:
        return [_piece(starts, lens, 0, 0)]
    if cuts is None:
        cuts = _balanced_cuts(starts, lens, num_pieces, cut_multiple, balance_position)
    if state_block is not None:
        cuts = [_align_to_state(c, starts, lens, state_block) if 0 < c < total else c for c in cuts]
    borders = sorted({0, total, *(c for c in cuts if 0 < c < total)})
    return [_piece(starts, lens, a, b) for a, b in itertools.pairwise(borders)]


def balance_position(linear_weights: int, q_heads: int, head_dim: int) -> float:
    """The position at which a token's attention costs as many operations as its linear layers.

    linear_weights: weights of a layer's linear projections; q_heads, head_dim: of its attention. A token at position
    p takes 2 operations a weight and 4 * q_heads * head_dim * p in attention.
    """
    return linear_weights / (2 * q_heads * head_dim)


def check_split_options(
    cut_multiple: int, state_block: int | None, balance_position: float, num_pieces: int = 2
) -> None:
    """Raises ValueError for options of :func:`split_tokens` that cannot cut any batch."""
    counts = {"num_pieces": num_pieces, "cut_multiple": cut_multiple}
    if state_block is not None:
        counts["state_block"] = state_block
    for name, value in counts.items():
        if host_int(name, value) < 1:
            raise ValueError(f"{name}={value} is not supported: give an integer >= 1")
    if not balance_position > 0:
        raise ValueError(f"balance_position={balance_position} is not supported: give a positive number of tokens")


def _given_cuts(cut: int | Sequence[int], num_pieces: int) -> list[int]:
    try:
        cuts = host_ints("cut", list(cut))  # type: ignore[arg-type]  # of a number: TypeError
    except TypeError:
        return [host_int("cut", cut)]
    if cuts != sorted(cuts) or len(cuts) != num_pieces - 1:
        raise ValueError(f"cut needs {num_pieces - 1} ascending tokens for {num_pieces} pieces, got {cuts}")
    return cuts


def _balanced_cuts(starts: list[int], lens: list[int], num_pieces: int, cut_multiple: int, p0: float) -> list[int]:
    costs = [0.0]
    for i, length in enumerate(lens):
        n = starts[i + 1] - starts[i]
        costs.append(costs[-1] + _cost(length - n, n, p0))

    def token_at(cost: float) -> float:
        i = min(bisect.bisect_right(costs, cost) - 1, len(lens) - 1)
        n = starts[i + 1] - starts[i]
        left = cost - costs[i]
        if left <= 0:
            return starts[i]
        # x tokens cost linear x + x^2 / (2 p0): the positive root, in the form that keeps its digits for any p0.
        linear = 1 + (lens[i] - n - 0.5) / p0
        return starts[i] + 2 * left / (linear + math.sqrt(linear * linear + 2 * left / p0))

    ideal = [token_at(costs[-1] * k / num_pieces) for k in range(1, num_pieces)]
    return [round(t / cut_multiple) * cut_multiple for t in ideal]


def _cost(first: int, count: int, p0: float) -> float:
    """Estimated time of ``count`` tokens from position ``first`` on, in units of a token at position 0."""
    return count * (1 + first / p0) + count * (count - 1) / (2 * p0)


def _align_to_state(cut: int, starts: list[int], lens: list[int], state_block: int) -> int:
    i = bisect.bisect_right(starts, cut) - 1
    if starts[i] == cut:
        return cut  # between requests: no request is crossed
    context = lens[i] - (starts[i + 1] - starts[i])
    last_slot = (lens[i] - 1) // state_block
    first_in_slot = max(0, last_slot * state_block - context)
    return max(cut, starts[i] + first_in_slot + 1)


def _piece(starts: list[int], lens: list[int], begin: int, end: int) -> TokenPiece:
    ids, piece_starts, piece_lens = [], [0], []
    for i, length in _requests_in(starts, lens, begin, end):
        ids.append(i)
        piece_starts.append(min(starts[i + 1], end) - begin)
        piece_lens.append(length - max(0, starts[i + 1] - end))
    return TokenPiece((begin, end), tuple(ids), tuple(piece_starts), tuple(piece_lens))


def _requests_in(starts: list[int], lens: list[int], begin: int, end: int) -> Iterable[tuple[int, int]]:
    for i in range(max(0, bisect.bisect_right(starts, begin) - 1), len(lens)):
        if starts[i] >= end:
            return
        if starts[i + 1] > max(starts[i], begin):
            yield i, lens[i]
