"""What the layers of a decoder need to know of a batch."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch

from tpoverlap.microbatch.batch import Batch


@dataclass(frozen=True)
class AttentionMetadata:
    """What the attention of every layer needs to know of a batch; tensors are on the model's device.

    block_table: int32 [requests, max_blocks]. slot_mapping: int64 [tokens]. cu_seqlens_q: int32 [requests + 1].
    seq_lens: int32 [requests]. max_query_len: most tokens that a request brings. decode_only: every request brings
    one, and there is no padding. query_start_loc: requests + 1 host ints. state_slots: where recurrent states lie;
    None: the model has none.
    """

    block_table: torch.Tensor
    slot_mapping: torch.Tensor
    cu_seqlens_q: torch.Tensor
    seq_lens: torch.Tensor
    max_query_len: int
    decode_only: bool
    query_start_loc: tuple[int, ...]
    state_slots: StateSlots | None = None

    @classmethod
    def of(cls, batch: Batch) -> AttentionMetadata:
        starts = list(batch.query_start_loc)
        device = batch.block_table.device
        return cls(
            block_table=batch.block_table,
            slot_mapping=batch.slot_mapping,
            # non_blocking: a blocking copy would hold the host until the device has caught up with it
            cu_seqlens_q=torch.tensor(starts, dtype=torch.int32).to(device, non_blocking=True),
            seq_lens=torch.tensor(list(batch.seq_lens), dtype=torch.int32).to(device, non_blocking=True),
            max_query_len=max((stop - start for start, stop in pairwise(starts)), default=0),
            decode_only=starts == list(range(len(starts))) and batch.num_padding_tokens == 0,
            query_start_loc=tuple(starts),
        )


@dataclass(frozen=True)
class StateSlots:
    """Where each request's state lies, on the device. before, after: int64 [requests], slots of the states before the
    request's new tokens and after them. fresh: bool [requests], whether it has none yet, its first token being new."""

    before: torch.Tensor
    after: torch.Tensor
    fresh: torch.Tensor

    @classmethod
    def of(cls, metadata: AttentionMetadata, state_block: int, blocks_per_state: int) -> StateSlots:
        """From the batch's lengths on the device, so that a captured graph follows them."""
        ends = metadata.seq_lens.long()
        starts = ends - metadata.cu_seqlens_q.diff()

        def slot(length: torch.Tensor) -> torch.Tensor:
            first_block = (length - 1).clamp(min=0) // state_block * blocks_per_state
            return metadata.block_table.gather(1, first_block[:, None])[:, 0].long() // blocks_per_state

        return cls(slot(starts), slot(ends), starts == 0)
