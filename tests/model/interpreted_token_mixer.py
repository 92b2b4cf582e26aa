"""The token mixer's Triton kernels against its torch operators. On CPU tensors under TRITON_INTERPRET=1, which
test_token_mixer_triton.py sets; on a GPU as they are."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from tpoverlap.attention import slot_mapping
from tpoverlap.cuda.triton_available import triton_interpreted
from tpoverlap.microbatch import Batch
from tpoverlap.model.layers import RMSNorm, RowParallel
from tpoverlap.model.linears import DenseLinear
from tpoverlap.model.metadata import AttentionMetadata, StateSlots
from tpoverlap.model.token_mixer import Decay, TokenMixer

DEVICE = torch.device("cpu" if triton_interpreted() else "cuda")
# The interpreter's products of BF16 are wrong.
DTYPES = [torch.float16] if triton_interpreted() else [torch.float16, torch.bfloat16]
HIDDEN, STATE_BLOCK, BLOCK_SIZE = 48, 128, 32


def make_mixer(heads: int, kv_heads: int, dim: int, dtype: torch.dtype, slots: int, seed: int) -> TokenMixer:
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    def linear(rows: int, columns: int) -> DenseLinear:
        return DenseLinear((random(rows, columns) * columns**-0.5).to(DEVICE, dtype), None)

    norms = [RMSNorm((1 + 0.1 * random(dim)).to(DEVICE, dtype), 1e-6) for _ in range(2)]
    decay = Decay((1 - torch.exp2(-2.0 - torch.arange(kv_heads))).to(DEVICE))
    mixer = TokenMixer(
        heads,
        kv_heads,
        dim,
        linear((2 * heads + 2 * kv_heads) * dim, HIDDEN),
        norms[0],
        norms[1],
        RowParallel(linear(HIDDEN, heads * dim), None, None),
        decay=decay,
        state_block=STATE_BLOCK,
    )
    mixer.allocate_states(slots, DEVICE)
    assert mixer.states is not None
    mixer.states.copy_(random(*mixer.states.shape))
    return mixer


def metadata(starts: list[int], seq_lens: list[int], tables: list[list[int]]) -> AttentionMetadata:
    runs = STATE_BLOCK // BLOCK_SIZE
    table = torch.tensor([[s * runs + i for s in row for i in range(runs)] for row in tables], dtype=torch.int32)
    tokens = starts[-1]
    batch = Batch(
        inputs_embeds=torch.zeros(tokens, HIDDEN, device=DEVICE),
        positions=torch.zeros(tokens, dtype=torch.int64, device=DEVICE),
        query_start_loc=starts,
        seq_lens=seq_lens,
        block_table=table.to(DEVICE),
        slot_mapping=slot_mapping(table, starts, seq_lens, BLOCK_SIZE).to(DEVICE),
    )
    made = AttentionMetadata.of(batch)
    return dataclasses.replace(made, state_slots=StateSlots.of(made, STATE_BLOCK, runs))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "starts", "seq_lens"),
    [
        (4, 2, 16, [0, 1], [1]),
        (4, 2, 32, [0, 64], [200]),
        (6, 2, 32, [0, 63, 63, 200], [63, 40, 300]),
        (3, 3, 64, [0, 65, 130], [129, 65]),
        (2, 1, 128, [0, 130], [130]),
        (2, 1, 256, [0, 70], [140]),
    ],
)
@torch.inference_mode()
def test_kernels_do_what_the_operators_do(
    heads: int, kv_heads: int, dim: int, starts: list[int], seq_lens: list[int], dtype: torch.dtype
) -> None:
    tables = [[3 * r, 3 * r + 1, 3 * r + 2] for r in range(len(seq_lens))]
    mixer = make_mixer(heads, kv_heads, dim, dtype, 3 * len(seq_lens), dim + starts[-1])
    known = metadata(starts, seq_lens, tables)
    x = torch.randn(starts[-1], HIDDEN, generator=torch.Generator().manual_seed(1)).to(DEVICE, dtype)
    assert mixer.states is not None
    first = mixer.states.clone()
    got = mixer._in_triton(x), mixer(x, (x, x), known)
    assert got[0]
    states = mixer.states.clone()
    mixer.states.copy_(first)
    mixer._in_triton = lambda x: False  # type: ignore[method-assign]
    expected = mixer(x, (x, x), known)
    tolerance = 6 * torch.finfo(dtype).eps
    assert (got[1] - expected).double().norm() <= tolerance * expected.double().norm()
    assert (states - mixer.states).norm() <= 1e-3 * mixer.states.norm()
    moved = {int(slot) for slot in known.state_slots.after}  # type: ignore[union-attr]
    kept = [slot for slot in range(first.shape[0]) if slot not in moved]
    assert torch.equal(states[kept], first[kept])
