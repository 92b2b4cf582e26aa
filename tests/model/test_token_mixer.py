"""The token mixer: its block form against the recurrence, split runs against whole ones, and its states' slots."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tpoverlap.attention import slot_mapping
from tpoverlap.errors import ConfigError
from tpoverlap.microbatch import Batch, split_tokens
from tpoverlap.model.layers import RMSNorm, RowParallel
from tpoverlap.model.linears import DenseLinear
from tpoverlap.model.metadata import AttentionMetadata, StateSlots
from tpoverlap.model.token_mixer import Decay, TokenMixer, blocks_per_state, retain, step

HEADS, KV_HEADS, DIM, HIDDEN = 4, 2, 8, 24


def random_inputs(tokens: int, seed: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = [(tokens, HEADS, DIM), (tokens, KV_HEADS, DIM), (tokens, KV_HEADS, DIM), (KV_HEADS, DIM, DIM)]
    q, k, v, state = (torch.randn(shape, generator=generator) for shape in shapes)
    return [q.to(dtype), (k * DIM**-0.5).to(dtype), v.to(dtype), state]


def recurrence(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, decay: torch.Tensor, state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Token by token in FP64."""
    state, rows = state.double(), []
    for t in range(q.shape[0]):
        state = decay.double()[:, None, None] * state + k[t].double()[:, :, None] * v[t].double()[:, None, :]
        rows.append((q[t].double().unflatten(0, (KV_HEADS, -1)) @ state).flatten(0, 1))
    return torch.stack(rows), state


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 400), st.floats(0.3, 1.0), st.integers(0, 1 << 30))
def test_blocks_give_what_the_recurrence_gives(tokens: int, decay: float, seed: int) -> None:
    decays = torch.tensor([decay, 1.0 - 2.0**-7])
    inputs = random_inputs(tokens, seed)
    expected, expected_state = recurrence(*inputs[:3], decays, inputs[3])
    mixed, state = retain(*inputs[:3], Decay(decays), inputs[3])
    torch.testing.assert_close(mixed.double(), expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(state.double(), expected_state, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_stays_close_and_finite_for_fast_decays(dtype: torch.dtype) -> None:
    decays = torch.tensor([0.05, 0.999])
    inputs = random_inputs(300, 7, dtype)
    expected, expected_state = recurrence(*inputs[:3], decays, inputs[3])
    mixed, state = retain(*inputs[:3], Decay(decays), inputs[3])
    tolerance = 8 * torch.finfo(dtype).eps
    assert (mixed.double() - expected).norm() <= tolerance * expected.norm()
    torch.testing.assert_close(state.double(), expected_state, rtol=1e-4, atol=1e-4)


def test_a_step_is_the_recurrence() -> None:
    decays = torch.tensor([0.9, 0.99])
    q, k, v, state = random_inputs(1, 3)
    expected, expected_state = recurrence(q, k, v, decays, state)
    mixed, states = step(q, k, v, Decay(decays), state[None])
    torch.testing.assert_close(mixed.double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(states[0].double(), expected_state, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("decay", [0.0, -0.5, 1.5, float("nan")])
def test_impossible_decays_are_refused(decay: float) -> None:
    with pytest.raises(ValueError, match="above 0"):
        Decay(torch.tensor([0.5, decay]))


def make_mixer(state_block: int, slots: int) -> TokenMixer:
    generator = torch.Generator().manual_seed(5)

    def linear(rows: int, columns: int) -> DenseLinear:
        return DenseLinear(torch.randn(rows, columns, generator=generator) * columns**-0.5, None)

    norm = RMSNorm(torch.ones(DIM), 1e-6)
    projections = linear((2 * HEADS + 2 * KV_HEADS) * DIM, HIDDEN)
    out = RowParallel(linear(HIDDEN, HEADS * DIM), None, None)
    decay = Decay(torch.tensor([0.97, 0.995]))
    mixer = TokenMixer(HEADS, KV_HEADS, DIM, projections, norm, norm, out, decay=decay, state_block=state_block)
    mixer.allocate_states(slots, torch.device("cpu"))
    assert mixer.states is not None
    mixer.states.fill_(torch.nan)  # nothing may be read that was not written
    return mixer


STATE_BLOCK, BLOCK_SIZE, RUNS = 32, 8, 4


def batch(tables: list[list[int]], starts: list[int], seq_lens: list[int], hidden: torch.Tensor) -> Batch:
    """tables: slots of each request's states, in order."""
    table = torch.tensor([[slot * RUNS + i for slot in row for i in range(RUNS)] for row in tables], dtype=torch.int32)
    return Batch(
        inputs_embeds=hidden,
        positions=torch.zeros(hidden.shape[0], dtype=torch.int64),
        query_start_loc=starts,
        seq_lens=seq_lens,
        block_table=table,
        slot_mapping=slot_mapping(table, starts, seq_lens, BLOCK_SIZE),
    )


def run(mixer: TokenMixer, part: Batch) -> torch.Tensor:
    metadata = AttentionMetadata.of(part)
    metadata = dataclasses.replace(metadata, state_slots=StateSlots.of(metadata, STATE_BLOCK, RUNS))
    assert part.inputs_embeds is not None
    return mixer(part.inputs_embeds, (part.inputs_embeds, part.inputs_embeds), metadata)


@pytest.mark.parametrize("num_pieces", [2, 3, 4])
def test_pieces_and_chunks_go_on_from_the_states_before_them(num_pieces: int) -> None:
    hidden = torch.randn(150, HIDDEN, generator=torch.Generator().manual_seed(num_pieces))
    tables = [[6, 1, 3], [4, 0, 5]]
    # First chunk: 60 and 30 tokens; second: 20 and 40 more.
    chunks = [([0, 60, 90], [60, 30], hidden[:90]), ([0, 20, 60], [80, 70], hidden[90:])]
    whole, split = make_mixer(STATE_BLOCK, 7), make_mixer(STATE_BLOCK, 7)
    for starts, lens, rows in chunks:
        one = batch(tables, starts, lens, rows)
        cut = split_tokens(starts, lens, num_pieces=num_pieces, cut_multiple=4, state_block=STATE_BLOCK)
        assert len(cut) > 1
        parts = torch.cat([run(split, one.piece(piece)) for piece in cut])
        torch.testing.assert_close(parts, run(whole, one), rtol=1e-4, atol=1e-5)
    # The earlier blocks' states are still there: lengths 60 and 80, 30 and 70.
    assert whole.states is not None
    assert split.states is not None
    written = [1, 3, 4, 5]
    torch.testing.assert_close(split.states[written], whole.states[written], rtol=1e-4, atol=1e-5)
    # A decode step of both reads the last ones.
    tokens = batch(tables, [0, 1, 2], [81, 71], hidden[:2])
    torch.testing.assert_close(run(split, tokens), run(whole, tokens), rtol=1e-4, atol=1e-5)


def test_decode_continues_a_prefill() -> None:
    hidden = torch.randn(41, HIDDEN, generator=torch.Generator().manual_seed(0))
    whole, steps = make_mixer(STATE_BLOCK, 2), make_mixer(STATE_BLOCK, 2)
    expected = run(whole, batch([[1, 0]], [0, 41], [41], hidden))
    got = [run(steps, batch([[1, 0]], [0, 30], [30], hidden[:30]))]
    got += [run(steps, batch([[1, 0]], [0, 1], [t + 1], hidden[t : t + 1])) for t in range(30, 41)]
    torch.testing.assert_close(torch.cat(got), expected, rtol=1e-4, atol=1e-5)


def test_heads_of_two_ranks_add_up_to_the_whole_mixer() -> None:
    hidden = torch.randn(70, HIDDEN, generator=torch.Generator().manual_seed(2))
    one = batch([[0, 1, 2]], [0, 70], [70], hidden)
    whole = make_mixer(STATE_BLOCK, 3)
    parts = []
    for rank in range(2):
        group = HEADS // KV_HEADS
        weight = whole.projections.weight.unflatten(0, (-1, DIM))
        gates, queries = (weight[at + rank * group :][:group] for at in (0, HEADS))
        keys, values = (weight[at + rank :][:1] for at in (2 * HEADS, 2 * HEADS + KV_HEADS))
        projections = DenseLinear(torch.cat([gates, queries, keys, values]).flatten(0, 1), None)
        columns = slice(rank * group * DIM, (rank + 1) * group * DIM)
        out = RowParallel(DenseLinear(whole.o.linear.weight[:, columns], None), None, None)
        norm = RMSNorm(torch.ones(DIM), 1e-6)
        decay = Decay(whole.decay.log[rank : rank + 1].exp())
        mixer = TokenMixer(group, 1, DIM, projections, norm, norm, out, decay=decay, state_block=STATE_BLOCK)
        mixer.allocate_states(3, torch.device("cpu"))
        parts.append(run(mixer, one))
    torch.testing.assert_close(parts[0] + parts[1], run(whole, one), rtol=1e-4, atol=1e-5)


def test_states_need_whole_runs_of_blocks() -> None:
    assert blocks_per_state(800, 100, 32) == 25
    for state_block, num_blocks in ((800, 101), (801, 100)):
        with pytest.raises(ConfigError, match="whole number of states"):
            blocks_per_state(state_block, num_blocks, 32)
