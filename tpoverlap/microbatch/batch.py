"""What a forward pass over packed requests takes, and a part of it."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tpoverlap.errors import UnsupportedError


@dataclass(frozen=True)
class TokenPiece:
    """A contiguous range of a batch's tokens, with the requests that have tokens in it.

    token_range: (first, past-the-end) token of the batch. request_ids: indices of the batch's requests, in order.
    query_start_loc: starts of those requests' tokens inside the piece, and the piece's token count at the end.
    seq_lens: keys that each request has once the piece has run (its prefix, its tokens in earlier pieces and in this).
    """

    token_range: tuple[int, int]
    request_ids: tuple[int, ...]
    query_start_loc: tuple[int, ...]
    seq_lens: tuple[int, ...]

    @property
    def num_tokens(self) -> int:
        return self.token_range[1] - self.token_range[0]


@dataclass(frozen=True)
class Batch:
    """Packed requests: one row a token, requests one after the other.

    input_ids: int [tokens]; or inputs_embeds: [tokens, hidden]; exactly one of them. positions: int [tokens], or
    [3, tokens] for M-RoPE. query_start_loc: requests + 1 host ints, the starts of the requests' tokens, 0 first, the
    token count last (padding excluded). seq_lens: host ints [requests], keys of each request counting the new tokens.
    block_table: int32 [requests, max_blocks], the cache blocks of each request in order. slot_mapping: int64
    [tokens], block * block_size + offset where each token's key and value go; negative: not stored.
    num_draft_tokens, num_padding_tokens: speculative and padding tokens among them; such batches run whole.
    """

    positions: torch.Tensor
    query_start_loc: Sequence[int]
    seq_lens: Sequence[int]
    block_table: torch.Tensor
    slot_mapping: torch.Tensor
    input_ids: torch.Tensor | None = None
    inputs_embeds: torch.Tensor | None = None
    num_draft_tokens: int = 0
    num_padding_tokens: int = 0

    def __post_init__(self) -> None:
        if (self.input_ids is None) == (self.inputs_embeds is None):
            raise ValueError("a batch takes either input_ids or inputs_embeds, and exactly one of them")
        starts, lens = host_ints("query_start_loc", self.query_start_loc), host_ints("seq_lens", self.seq_lens)
        check_starts(starts, lens)
        for name, ints in (("query_start_loc", starts), ("seq_lens", lens)):
            if not isinstance(getattr(self, name), (list, tuple)):
                object.__setattr__(self, name, tuple(ints))
        for name in ("num_draft_tokens", "num_padding_tokens"):
            if host_int(name, getattr(self, name)) < 0:
                raise ValueError(f"{name}={getattr(self, name)} is not supported: give 0 or more")
        tokens = starts[-1] + self.num_padding_tokens
        for name, supported in _SHAPES.items():
            tensor = getattr(self, name)
            if tensor is None and name in ("input_ids", "inputs_embeds"):
                continue
            shape = tuple(tensor.shape) if isinstance(tensor, torch.Tensor) else None
            if shape is None or not _fits(name, shape, tokens, len(lens)):
                raise ValueError(
                    f"{name} is {type(tensor).__name__ if shape is None else list(shape)}: query_start_loc, seq_lens "
                    f"and num_padding_tokens say {tokens} tokens of {len(lens)} requests, give a tensor {supported}"
                )

    @property
    def num_tokens(self) -> int:
        """Tokens of the batch, padding excluded."""
        return self.query_start_loc[-1]

    def piece(self, piece: TokenPiece) -> Batch:
        """The part of the batch that ``piece`` describes; its tensors share memory, but for a block table with gaps.

        Padding, which is in no piece's range, is left behind.
        Raises UnsupportedError for what a subclass adds and :meth:`cut_field` does not cut.
        """
        tokens = slice(*piece.token_range)
        return dataclasses.replace(
            self,
            **self._cut_fields(piece),
            input_ids=None if self.input_ids is None else _plain(self.input_ids[tokens]),
            inputs_embeds=None if self.inputs_embeds is None else _plain(self.inputs_embeds[tokens]),
            positions=_plain(self.positions[..., tokens]),
            query_start_loc=piece.query_start_loc,
            seq_lens=piece.seq_lens,
            block_table=self._rows(piece.request_ids),
            slot_mapping=_plain(self.slot_mapping[tokens]),
            num_padding_tokens=0,
        )

    def _rows(self, request_ids: Sequence[int]) -> torch.Tensor:
        """The block table's rows of these requests. A copy of host data to a device would wait for all its work."""
        table = self.block_table
        if not request_ids:
            return _plain(table[:0])
        first, last = request_ids[0], request_ids[-1]
        if last - first + 1 == len(request_ids):
            return _plain(table[first : last + 1])
        rows = torch.tensor(request_ids, dtype=torch.long).to(table.device, non_blocking=True)
        return table.index_select(0, rows)

    def cut_field(self, name: str, piece: TokenPiece) -> Any:
        """The value, in ``piece``, of a field that a subclass adds; such subclasses override it.

        name: of a field that is not None. What is per token is cut along ``piece.token_range``, what is per request
        taken at ``piece.request_ids``; ``super().cut_field(name, piece)`` refuses what else there is.
        """
        value = getattr(self, name)
        what = f"{type(value).__name__} {tuple(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)
        raise UnsupportedError(
            f"{type(self).__name__}.{name} ({what}) cannot be cut into pieces: per token, input_ids, inputs_embeds, "
            "positions and slot_mapping are; leave it None or override cut_field"
        )

    def _cut_fields(self, piece: TokenPiece) -> dict[str, Any]:
        fields = {f.name for f in dataclasses.fields(self)}
        # An attribute that was set past the dataclass would be missing in the pieces, or be the class's default.
        for name in vars(self).keys() - fields:
            if not isinstance(getattr(type(self), name, None), functools.cached_property):
                Batch.cut_field(self, name, piece)
        return {name: self.cut_field(name, piece) for name in fields - _OWN_FIELDS if getattr(self, name) is not None}


def host_int(name: str, value: Any) -> int:
    """``value``, an integer of any library, as Python's; ValueError that says ``name`` for anything else."""
    try:
        return operator.index(value)
    except TypeError:
        raise ValueError(f"{name}={value!r} is not supported: give an integer") from None


def host_ints(name: str, values: Any) -> list[int]:
    """The integers in ``values``, a sequence or an array in host memory; ValueError that says ``name`` otherwise."""
    if isinstance(values, torch.Tensor) and values.device.type != "cpu":
        raise ValueError(f"{name} is on {values.device}, and cuts are made on the host: give {name}.tolist()")
    try:
        return [operator.index(value) for value in values]
    except TypeError:
        raise ValueError(f"{name} needs a sequence of integers, got {values!r:.200}") from None


def check_starts(starts: Sequence[int], lens: Sequence[int]) -> None:
    """Raises ValueError for a query_start_loc and seq_lens that do not fit together."""
    if len(starts) != len(lens) + 1 or starts[0] != 0 or any(a > b for a, b in itertools.pairwise(starts)):
        raise ValueError(f"query_start_loc needs requests + 1 = {len(lens) + 1} ascending starts from 0, got {starts}")
    for i, length in enumerate(lens):
        if length < starts[i + 1] - starts[i]:
            raise ValueError(f"request {i} has {starts[i + 1] - starts[i]} new tokens but seq_len {length}")


_SHAPES = {
    "input_ids": "[tokens]",
    "inputs_embeds": "[tokens, hidden]",
    "positions": "[tokens] or [3, tokens]",
    "slot_mapping": "[tokens]",
    "block_table": "[requests, max_blocks]",
}


def _fits(name: str, shape: tuple[int, ...], tokens: int, requests: int) -> bool:
    if name == "positions":
        return shape in ((tokens,), (3, tokens))
    if name in ("inputs_embeds", "block_table"):
        return len(shape) == 2 and shape[0] == (requests if name == "block_table" else tokens)
    return shape == (tokens,)


_OWN_FIELDS = frozenset(f.name for f in dataclasses.fields(Batch))


def _plain(view: torch.Tensor) -> torch.Tensor:
    """The same memory, not marked as a view: a compiled model would be compiled once more for views."""
    return view if view.requires_grad else view.detach()
