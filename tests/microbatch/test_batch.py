"""What a piece of a batch gets, and what a batch refuses to hand over uncut."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

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
