"""What a piece of a batch gets, and what a batch refuses to hand over uncut."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pytest
import torch

from tpoverlap.errors import UnsupportedError
from tpoverlap.microbatch import Batch, TokenPiece, split_tokens


def fields(tokens: int = 12) -> dict[str, object]:
    return {
        "input_ids": torch.arange(tokens),
        "positions": torch.arange(3 * tokens).view(3, tokens),
        "query_start_loc": [0, 4, tokens],
        "seq_lens": [9, tokens - 4],
        "block_table": torch.tensor([[3, 1], [2, 0]], dtype=torch.int32),
        "slot_mapping": torch.arange(tokens) + 100,
    }


CROSSED = split_tokens([0, 4, 12], [9, 8], cut=6)[1]


def test_a_piece_gets_its_tokens_and_requests() -> None:
    piece = Batch(**fields()).piece(CROSSED)  # type: ignore[arg-type]
    assert piece.input_ids is not None
    assert piece.input_ids.tolist() == list(range(6, 12))
    assert piece.positions.tolist() == [[*range(6, 12)], [*range(18, 24)], [*range(30, 36)]]
    assert piece.slot_mapping.tolist() == list(range(106, 112))
    assert piece.block_table.tolist() == [[2, 0]]
    assert (tuple(piece.query_start_loc), tuple(piece.seq_lens)) == ((0, 6), (8,))


@pytest.mark.parametrize("inference", [False, True])
def test_a_pieces_tensors_share_memory_and_are_no_views(inference: bool) -> None:
    with torch.inference_mode(inference):
        batch = Batch(**fields())  # type: ignore[arg-type]
        piece = batch.piece(CROSSED)
    for name in ("input_ids", "positions", "slot_mapping"):
        whole, part = getattr(batch, name), getattr(piece, name)
        assert part._base is None
        assert part.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()
    embeds = torch.randn(12, 4, requires_grad=True)
    values = {**fields(), "input_ids": None, "inputs_embeds": embeds}
    part = Batch(**values).piece(CROSSED).inputs_embeds  # type: ignore[arg-type]
    assert part is not None
    assert part.requires_grad, "so that a collective can refuse it"


@dataclass(frozen=True)
class TypedBatch(Batch):
    token_types: torch.Tensor | None = None
    scale: float | None = None


@dataclass(frozen=True)
class CutBatch(TypedBatch):
    def cut_field(self, name: str, piece: TokenPiece) -> object:
        if name == "token_types":
            assert self.token_types is not None
            return self.token_types[slice(*piece.token_range)]
        return super().cut_field(name, piece)


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [("token_types", torch.zeros(12, dtype=torch.int64), r"Tensor \(12,\)"), ("scale", 0.5, r"0\.5")],
)
def test_a_field_that_nothing_cuts_is_refused(name: str, value: object, text: str) -> None:
    batch = TypedBatch(**fields(), **{name: value})  # type: ignore[arg-type]
    with pytest.raises(UnsupportedError, match=rf"TypedBatch\.{name} \({text}\).*override cut_field"):
        batch.piece(CROSSED)


def test_a_field_without_a_value_is_allowed() -> None:
    piece = TypedBatch(**fields()).piece(CROSSED)  # type: ignore[arg-type]
    assert type(piece) is TypedBatch
    assert piece.token_types is None


def test_a_field_that_the_subclass_cuts_is_allowed_and_no_other() -> None:
    piece = CutBatch(**fields(), token_types=torch.arange(12)).piece(CROSSED)  # type: ignore[arg-type]
    assert isinstance(piece, CutBatch)
    assert piece.token_types is not None
    assert piece.token_types.tolist() == list(range(6, 12))
    with pytest.raises(UnsupportedError, match=r"CutBatch\.scale"):
        CutBatch(**fields(), scale=1.0).piece(CROSSED)  # type: ignore[arg-type]


class Patched(Batch):
    extra: torch.Tensor | None = None

    @cached_property
    def longest(self) -> int:
        return max(self.seq_lens)


def test_an_attribute_set_past_the_dataclass_is_refused_and_a_cached_property_is_made_anew() -> None:
    batch = Patched(**fields())  # type: ignore[arg-type]
    assert batch.longest == 9
    assert batch.piece(CROSSED).longest == 8  # type: ignore[attr-defined]
    object.__setattr__(batch, "extra", torch.zeros(12))
    with pytest.raises(UnsupportedError, match=r"Patched\.extra \(Tensor \(12,\)\)"):
        batch.piece(CROSSED)


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        (
            "input_ids",
            torch.zeros(11),
            r"input_ids is \[11\]: .* say 12 tokens of 2 requests, give a tensor \[tokens\]",
        ),
        ("input_ids", torch.zeros(12, 1), r"input_ids is \[12, 1\]"),
        ("input_ids", list(range(12)), "input_ids is list"),
        ("positions", torch.zeros(13), r"positions is \[13\]: .* give a tensor \[tokens\] or \[3, tokens\]"),
        ("positions", torch.zeros(4, 12), r"positions is \[4, 12\]"),
        ("positions", torch.zeros(12, 3), r"positions is \[12, 3\]"),
        ("positions", torch.tensor(5), r"positions is \[\]"),
        ("slot_mapping", torch.zeros(13), r"slot_mapping is \[13\]"),
        ("block_table", torch.zeros(3, 2), r"block_table is \[3, 2\]: .* give a tensor \[requests, max_blocks\]"),
        ("block_table", torch.zeros(2), r"block_table is \[2\]"),
        ("query_start_loc", [0, 4, 12.0], "query_start_loc needs a sequence of integers"),
        ("query_start_loc", [0, 13, 12], "query_start_loc needs requests"),
        ("query_start_loc", [1, 4, 12], "query_start_loc needs requests"),
        ("seq_lens", [9], "query_start_loc needs requests"),
        ("seq_lens", [3, 8], "request 0 has 4 new tokens but seq_len 3"),
        ("num_padding_tokens", -1, "num_padding_tokens=-1"),
        ("num_draft_tokens", 1.5, r"num_draft_tokens=1\.5"),
    ],
)
def test_what_does_not_fit_together_is_refused_by_name(name: str, value: object, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        Batch(**{**fields(), name: value})  # type: ignore[arg-type]


def test_embeddings_need_a_row_a_token_and_no_ids_beside_them() -> None:
    for shape in ((12,), (11, 4), (12, 4, 1)):
        with pytest.raises(ValueError, match="inputs_embeds is"):
            Batch(**{**fields(), "input_ids": None, "inputs_embeds": torch.zeros(shape)})  # type: ignore[arg-type]
    for both in ({"inputs_embeds": torch.zeros(12, 4)}, {"input_ids": None}):
        with pytest.raises(ValueError, match="either input_ids or inputs_embeds"):
            Batch(**{**fields(), **both})  # type: ignore[arg-type]


def test_lengths_in_host_arrays_become_plain_integers() -> None:
    values = fields() | {"query_start_loc": torch.tensor([0, 4, 12]), "seq_lens": np.array([9, 8])}
    batch = Batch(**values)  # type: ignore[arg-type]
    assert (batch.query_start_loc, batch.seq_lens) == ((0, 4, 12), (9, 8))
    assert type(batch.num_tokens) is int


@pytest.mark.parametrize("mrope", [False, True])
@pytest.mark.parametrize("embeds", [False, True])
def test_pieces_hold_every_field_of_each_token_once_padding_left_out(mrope: bool, embeds: bool) -> None:
    starts, lens, padding = [0, 5, 5, 6, 17, 20], [9, 4, 1, 11, 8], 4
    rows = starts[-1] + padding
    inputs = {"inputs_embeds": torch.randn(rows, 3)} if embeds else {"input_ids": torch.arange(rows) * 7}
    batch = Batch(
        **inputs,
        positions=torch.arange(rows * 3).view(3, rows) if mrope else torch.arange(rows),
        query_start_loc=starts,
        seq_lens=lens,
        block_table=torch.arange(10, dtype=torch.int32).view(5, 2),
        slot_mapping=torch.arange(rows) + 50,
        num_padding_tokens=padding,
    )
    cuts = split_tokens(starts, lens, cut=[5, 9, 17], num_pieces=4)
    pieces = [batch.piece(cut) for cut in cuts]
    assert [p.block_table[:, 0].tolist() for p in pieces] == [[0], [4, 6], [6], [8]]
    assert [p.num_padding_tokens for p in pieces] == [0] * 4
    for name in (*inputs, "positions", "slot_mapping"):
        along = -1 if name == "positions" else 0
        joined = torch.cat([getattr(p, name) for p in pieces], dim=along)
        assert torch.equal(joined, getattr(batch, name).narrow(along, 0, starts[-1]))
    for cut, piece in zip(cuts, pieces, strict=True):
        assert (piece.query_start_loc, piece.seq_lens) == (cut.query_start_loc, cut.seq_lens)


def test_a_piece_without_requests_is_an_empty_batch() -> None:
    values = fields() | {"query_start_loc": [0, 0, 0], "num_padding_tokens": 12}
    piece = Batch(**values).piece(*split_tokens([0, 0, 0], [9, 8]))  # type: ignore[arg-type]
    assert (piece.num_tokens, piece.block_table.shape) == (0, (0, 2))
    with pytest.raises(ValueError, match=r"input_ids is \[0\]"):
        piece.piece(CROSSED)
