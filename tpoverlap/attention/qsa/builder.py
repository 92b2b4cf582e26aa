"""The owner of a batch's metadata buffers, for engines that build metadata at every step and capture graphs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tpoverlap.attention.qsa.metadata import QSAMetadata, build_metadata, k_work_capacity


@dataclass(frozen=True)
class QSABatchMetadata:
    """A batch's tensors (views of the builder's buffers), and what the host knows of it.

    Decodes are the first num_decodes requests, with decode_query_len tokens each (0 without decodes); prefills are the
    other requests with tokens. max_query_len, max_seq_len: largest over the batch, 0 for an empty one.
    """

    tensors: QSAMetadata
    num_decodes: int
    num_decode_tokens: int
    num_prefills: int
    num_prefill_tokens: int
    max_query_len: int
    max_seq_len: int
    decode_query_len: int


class QSAMetadataBuilder:
    """Builds :class:`QSABatchMetadata` into buffers of a fixed size and address, in one launch and without a sync.

    max_tokens, max_requests: largest batch, padding included. num_speculative_tokens: a request with at most that many
    tokens more than one is a decode. The rest as :func:`build_metadata`. A batch's tensors live until the next build.

    Serves the capture of graphs for uniform batches: capture ``build`` with the fixed numbers of tokens and requests
    and the largest lengths, then replay after the device tensors changed.
    """

    def __init__(
        self,
        max_tokens: int,
        max_requests: int,
        *,
        storage_block_size: int,
        compress_ratio: int,
        circular_buffer_size: int = 0,
        num_speculative_tokens: int = 0,
        device: torch.device | str = "cpu",
    ) -> None:
        for name, value, low in (
            ("max_tokens", max_tokens, 1),
            ("max_requests", max_requests, 1),
            ("storage_block_size", storage_block_size, 1),
            ("compress_ratio", compress_ratio, 1),
            ("circular_buffer_size", circular_buffer_size, 0),
            ("num_speculative_tokens", num_speculative_tokens, 0),
        ):
            if not isinstance(value, int) or isinstance(value, bool) or value < low:
                raise ValueError(f"{name} must be an int of at least {low}, got {value!r}")
        self.max_tokens = max_tokens
        self.max_requests = max_requests
        self.storage_block_size = storage_block_size
        self.compress_ratio = compress_ratio
        self.circular_buffer_size = circular_buffer_size
        self.max_decode_tokens = 1 + num_speculative_tokens
        # Only the owner of compressed keys works through groups.
        self.has_k_work = circular_buffer_size == 0 and compress_ratio > 1
        work = k_work_capacity(max_tokens, max_requests, compress_ratio) if self.has_k_work else 0
        self.buffers = QSAMetadata.allocate(max_tokens, work, device)

    def build(
        self,
        query_start_loc: torch.Tensor,
        seq_lens: torch.Tensor,
        slot_mapping: torch.Tensor,
        block_table: torch.Tensor,
        *,
        query_lens: Sequence[int],
        host_seq_lens: Sequence[int],
        num_tokens: int | None = None,
    ) -> QSABatchMetadata:
        """Metadata of a batch whose device tensors are as :func:`build_metadata` takes them.

        query_lens, host_seq_lens: the same lengths as host ints, one a request. num_tokens: padding included; the sum
        of query_lens for None. Raises ValueError if the batch exceeds the buffers, if decodes do not come first, or if
        they differ in their number of tokens.
        """
        requests = len(query_lens)
        if len(host_seq_lens) != requests or seq_lens.shape != (requests,):
            raise ValueError(
                f"query_lens, host_seq_lens and seq_lens must be one a request, "
                f"got {requests}, {len(host_seq_lens)} and {list(seq_lens.shape)}"
            )
        if min(query_lens, default=0) < 0:
            raise ValueError(f"query_lens must be at least 0, got {list(query_lens)}")
        total = sum(query_lens)
        tokens = total if num_tokens is None else num_tokens
        if not total <= tokens <= self.max_tokens or requests > self.max_requests:
            raise ValueError(
                f"the builder holds {self.max_tokens} tokens and {self.max_requests} requests, "
                f"got {tokens} tokens ({total} in queries) and {requests} requests"
            )
        decode_query_len, num_decodes = self._leading_decodes(query_lens)
        max_k_work = k_work_capacity(tokens, requests, self.compress_ratio) if self.has_k_work else 0
        tensors = build_metadata(
            query_start_loc,
            seq_lens,
            slot_mapping,
            block_table,
            num_tokens=tokens,
            storage_block_size=self.storage_block_size,
            compress_ratio=self.compress_ratio,
            circular_buffer_size=self.circular_buffer_size,
            max_k_work=max_k_work,
            buffers=self.buffers,
        )
        num_decode_tokens = num_decodes * decode_query_len
        return QSABatchMetadata(
            tensors=tensors,
            num_decodes=num_decodes,
            num_decode_tokens=num_decode_tokens,
            num_prefills=sum(n > 0 for n in query_lens[num_decodes:]),
            num_prefill_tokens=total - num_decode_tokens,
            max_query_len=max(query_lens, default=0),
            max_seq_len=max(host_seq_lens, default=0),
            decode_query_len=decode_query_len,
        )

    def _leading_decodes(self, query_lens: Sequence[int]) -> tuple[int, int]:
        """Tokens a decode, and how many decodes; requests without tokens are neither decode nor prefill behind them."""
        is_decode = [n <= self.max_decode_tokens for n in query_lens]
        num_decodes = is_decode.index(False) if False in is_decode else len(query_lens)
        while num_decodes and query_lens[num_decodes - 1] == 0:
            num_decodes -= 1
        late = [i for i in range(num_decodes, len(query_lens)) if is_decode[i] and query_lens[i] > 0]
        if late:
            raise ValueError(
                f"decodes (up to {self.max_decode_tokens} tokens) must come first: request {late[0]} with "
                f"{query_lens[late[0]]} tokens follows a prefill"
            )
        lengths = sorted(set(query_lens[:num_decodes]))
        if len(lengths) > 1 or lengths == [0]:
            raise ValueError(f"decodes must have one common number of tokens above 0, got {lengths}")
        return (lengths[0] if lengths else 0), num_decodes
