"""Split geometry: named boundary batches, and properties on random ones."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tpoverlap.microbatch import TokenPiece, balance_position, split_tokens


def test_a_crossed_request_continues_with_the_keys_of_its_earlier_part() -> None:
    assert split_tokens([0, 1000, 1600], [1000, 5600], cut=800) == [
        TokenPiece((0, 800), (0,), (0, 800), (800,)),
        TokenPiece((800, 1600), (0, 1), (0, 200, 800), (1000, 5600)),
    ]


@pytest.mark.parametrize("cut", [0, -5, 1600, 9999])
def test_a_cut_outside_the_batch_gives_one_piece(cut: int) -> None:
    assert split_tokens([0, 1600], [1600], cut=cut) == [TokenPiece((0, 1600), (0,), (0, 1600), (1600,))]


def test_requests_without_tokens_are_left_out() -> None:
    pieces = split_tokens([0, 0, 4, 4, 8], [7, 4, 9, 5], cut=4)
    assert [p.request_ids for p in pieces] == [(1,), (3,)]


def test_state_block_moves_the_cut_past_the_first_token_of_the_last_slot() -> None:
    assert [p.num_tokens for p in split_tokens([0, 1600], [1600], cut=800, state_block=800)] == [801, 799]


def test_state_block_that_would_empty_the_second_piece_leaves_the_batch_whole() -> None:
    assert len(split_tokens([0, 801], [801], cut=400, state_block=800)) == 1


def test_state_block_keeps_the_cut_inside_its_request() -> None:
    # The crossed request's last slot begins with its last token: it ends in the first piece.
    pieces = split_tokens([0, 801, 1000], [801, 199], cut=400, state_block=800)
    assert [p.token_range for p in pieces] == [(0, 801), (801, 1000)]


def test_without_a_prefix_the_later_piece_is_shorter() -> None:
    a, b = split_tokens([0, 4096], [4096], cut_multiple=1, balance_position=1000)
    assert a.num_tokens > b.num_tokens
    cost = lambda first, n: n * (1 + first / 1000) + n * n / 2000  # noqa: E731
    assert cost(0, a.num_tokens) == pytest.approx(cost(a.num_tokens, b.num_tokens), rel=2e-3)


def test_cuts_are_rounded_to_the_multiple() -> None:
    assert [p.num_tokens for p in split_tokens([0, 1000], [1000])] == [512, 488]
    assert len(split_tokens([0, 60], [60])) == 1


def test_balance_position_of_a_27b_layer() -> None:
    weights = 5120 * (7168 + 17408 * 2) + 3072 * 5120 + 17408 * 5120
    assert 10_000 < balance_position(weights, 24, 256) < 60_000


@pytest.mark.parametrize(
    ("starts", "lens", "options"),
    [
        ([0, 5], [4], {}),
        ([0, 5, 3], [5, 5], {}),
        ([1, 5], [5], {}),
        ([0, 5], [5, 5], {}),
        ([0, 5], [5], {"num_pieces": 0}),
        ([0, 5], [5], {"state_block": 0}),
        ([0, 9], [9], {"num_pieces": 3, "cut": [4]}),
        ([0, 9], [9], {"num_pieces": 3, "cut": [5, 4]}),
        ([0, 9.0], [9], {}),
        (None, [9], {}),
        ([0, 9], [9.0], {}),
        ([0, 9], [9], {"cut": 4.5}),
        ([0, 9], [9], {"cut": "4"}),
        ([0, 9], [9], {"cut": [4.0]}),
        ([0, 9], [9], {"num_pieces": 2.5}),
        ([0, 9], [9], {"cut_multiple": 1.5}),
        ([0, 9], [9], {"state_block": 2.0}),
        ([0, 9], [9], {"balance_position": 0}),
        ([0, 9], [9], {"balance_position": -5.0}),
        ([0, 9], [9], {"balance_position": math.nan}),
    ],
)
def test_bad_input_is_refused_by_name(starts: Any, lens: Any, options: dict[str, Any]) -> None:
    names = "|".join(options) or "query_start_loc|seq_len"
    with pytest.raises(ValueError, match=f"({names}).*(give|need|got|[0-9])"):
        split_tokens(starts, lens, **options)


@pytest.mark.parametrize("kind", [list, tuple, np.array, torch.tensor])
def test_host_integers_of_any_library_give_the_same_pieces(kind: Callable[[list[int]], Any]) -> None:
    starts, lens = [0, 4, 12], [9, 8]
    plain = split_tokens(starts, lens, cut=[3, 6], num_pieces=3)
    assert split_tokens(kind(starts), kind(lens), cut=kind([3, 6]), num_pieces=3) == plain
    one = split_tokens(kind(starts), kind(lens), cut=kind([6])[0])
    assert one == split_tokens(starts, lens, cut=6)
    for piece in plain + one:
        parts = (piece.token_range, piece.request_ids, piece.query_start_loc, piece.seq_lens)
        assert {type(value) for part in parts for value in part} == {int}


@pytest.mark.parametrize(("starts", "lens"), [([0], []), ([0, 0], [0]), ([0, 0, 0], [5, 0])])
@pytest.mark.parametrize("options", [{}, {"cut": 0}, {"cut": 3}, {"state_block": 4, "num_pieces": 4}])
def test_a_batch_without_tokens_is_one_empty_piece(starts: list[int], lens: list[int], options: dict[str, int]) -> None:
    assert split_tokens(starts, lens, **options) == [TokenPiece((0, 0), (), (0,), ())]  # type: ignore[arg-type]


@st.composite
def _batches(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    counts = draw(st.lists(st.integers(0, 300), min_size=1, max_size=8))
    prefixes = draw(st.lists(st.integers(0, 2000), min_size=len(counts), max_size=len(counts)))
    starts = [0]
    for n in counts:
        starts.append(starts[-1] + n)
    return starts, [n + p for n, p in zip(counts, prefixes, strict=True)]


@settings(max_examples=200, deadline=None)
@given(
    _batches(),
    st.integers(1, 4),
    st.sampled_from([None, 1, 16, 64]),
    st.sampled_from([1, 16, 128]),
    st.sampled_from([10.0, 700.0, math.inf]),
)
def test_pieces_cover_every_token_once_and_in_order(
    batch: tuple[list[int], list[int]], num_pieces: int, state_block: int | None, multiple: int, p0: float
) -> None:
    starts, lens = batch
    pieces = split_tokens(
        starts, lens, num_pieces=num_pieces, cut_multiple=multiple, state_block=state_block, balance_position=p0
    )
    assert 1 <= len(pieces) <= num_pieces
    assert [pieces[0].token_range[0], *(p.token_range[1] for p in pieces)] == [
        *(p.token_range[0] for p in pieces),
        starts[-1],
    ]

    # Token by token: the key count that each token's request has once the token is in.
    def rows(piece: TokenPiece) -> list[tuple[int, int]]:
        out = []
        for i, r in enumerate(piece.request_ids):
            n = piece.query_start_loc[i + 1] - piece.query_start_loc[i]
            assert n > 0
            out += [(r, piece.seq_lens[i] - n + 1 + j) for j in range(n)]
        assert len(out) == piece.num_tokens
        return out

    whole = [
        (r, lens[r] - (starts[r + 1] - starts[r]) + 1 + j)
        for r in range(len(lens))
        for j in range(starts[r + 1] - starts[r])
    ]
    assert [row for p in pieces for row in rows(p)] == whole
    if starts[-1]:
        assert all(p.num_tokens > 0 for p in pieces)


Token = tuple[int, int]  # request, position in its sequence


def _given(tokens: list[Token], cuts: list[int], state_block: int | None) -> list[TokenPiece]:
    """The definition, token by token."""

    def moved(cut: int) -> int:
        if state_block is None or not 0 < cut < len(tokens) or tokens[cut - 1][0] != tokens[cut][0]:
            return cut
        own = [t for t, (request, _) in enumerate(tokens) if request == tokens[cut][0]]
        slots = {t: tokens[t][1] // state_block for t in own}
        return max(cut, 1 + min(t for t in own if slots[t] == slots[own[-1]]))

    edges = sorted({0, len(tokens), *(c for c in map(moved, cuts) if 0 < c < len(tokens))})
    pieces = []
    for first, last in itertools.pairwise(edges):
        part = tokens[first:last]
        ids = list(dict.fromkeys(request for request, _ in part))
        ends = [max(i for i, token in enumerate(part) if token[0] == request) for request in ids]
        pieces.append(
            TokenPiece((first, last), tuple(ids), (0, *(e + 1 for e in ends)), tuple(part[e][1] + 1 for e in ends))
        )
    return pieces


@settings(max_examples=300, deadline=None)
@given(_batches(), st.lists(st.integers(-20, 2420), min_size=1, max_size=3), st.booleans(), st.data())
def test_given_cuts_are_those_of_the_definition(
    batch: tuple[list[int], list[int]], cuts: list[int], near: bool, data: st.DataObject
) -> None:
    starts, lens = batch
    if near:  # at the borders of requests and one beside them
        cuts = [starts[c % len(starts)] + c % 3 - 1 for c in cuts]
    cuts.sort()
    state_block = data.draw(st.sampled_from([None, 1, 2, 7, 16, 100, 800]))
    tokens = [
        (request, lens[request] - (starts[request + 1] - starts[request]) + i)
        for request in range(len(lens))
        for i in range(starts[request + 1] - starts[request])
    ]
    cut = cuts[0] if len(cuts) == 1 and data.draw(st.booleans()) else cuts
    got = split_tokens(starts, lens, cut=cut, num_pieces=len(cuts) + 1, state_block=state_block)
    assert got == (_given(tokens, cuts, state_block) if tokens else [TokenPiece((0, 0), (), (0,), ())])


@settings(max_examples=150, deadline=None)
@given(
    _batches(),
    st.integers(2, 4),
    st.sampled_from([0.2, 3.0, 700.0, 1e4, 1e18, 1e300, math.inf]),
    st.sampled_from([1, 16, 128]),
)
def test_default_cuts_balance_the_cost_of_the_tokens(
    batch: tuple[list[int], list[int]], num_pieces: int, p0: float, multiple: int
) -> None:
    starts, lens = batch
    total = [0.0]  # cost of the tokens before each one
    for n, length in zip((b - a for a, b in itertools.pairwise(starts)), lens, strict=True):
        for position in range(length - n, length):
            total.append(total[-1] + 1 + position / p0)
    got = split_tokens(starts, lens, num_pieces=num_pieces, cut_multiple=multiple, balance_position=p0)
    allowed = set()
    for k in range(1, num_pieces):
        best = min(range(len(total)), key=lambda t: abs(total[t] - total[-1] * k / num_pieces))
        # Inside the token the cost is spread evenly, or grows: a token's difference before rounding.
        allowed.add(frozenset(round((best + e) / multiple) * multiple for e in (-1, -0.5, 0, 0.5, 1)))
    inside = [piece.token_range[1] for piece in got[:-1]]
    assert all(any(cut in near for near in allowed) for cut in inside)
    assert all(any(cut in near for cut in (0, *inside)) or max(near) >= starts[-1] for near in allowed)
