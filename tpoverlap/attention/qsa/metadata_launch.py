"""The launch of the metadata kernel."""

from __future__ import annotations

import torch

from tpoverlap.attention.qsa.metadata_kernel import build_tiles
from tpoverlap.attention.qsa.metadata_torch import Outputs, Sizes
from tpoverlap.cuda.triton_dispatch import dependent_launch, on_device_of

TOKEN_TILE = 128
WORK_TILE = 128
REQUEST_CHUNK = 32


def build(
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    slot_mapping: torch.Tensor,
    block_table: torch.Tensor,
    sizes: Sizes,
    outputs: Outputs,
) -> None:
    """Fill the outputs in one launch. Batch sizes are runtime arguments: no batch compiles the kernel again."""
    max_k_work = outputs[4].shape[0]
    token_tiles = -(-sizes.num_tokens // TOKEN_TILE)
    work_tiles = -(-max_k_work // WORK_TILE)
    if not token_tiles + work_tiles:
        return
    circular = sizes.circular_buffer_size > 0
    pdl = dependent_launch(query_start_loc)
    with on_device_of(query_start_loc):
        build_tiles[(token_tiles + work_tiles,)](
            query_start_loc.contiguous(),
            seq_lens.contiguous(),
            slot_mapping,
            slot_mapping.stride(0),
            block_table,
            *block_table.stride(),
            block_table.shape[1],
            sizes.requests,
            sizes.requests.bit_length(),
            sizes.num_tokens,
            token_tiles,
            max_k_work,
            sizes.storage_block_size,
            sizes.compress_ratio,
            sizes.circular_buffer_size,
            *outputs,
            CIRCULAR=circular,
            COMPRESSED=not circular and sizes.compress_ratio > 1,
            TILE=TOKEN_TILE,
            ITEMS=WORK_TILE,
            REQUESTS=REQUEST_CHUNK,
            DEPENDENT_LAUNCH=pdl,
            launch_pdl=pdl,
            num_warps=4,
        )
