"""The decoder on 1 to 8 ranks against transformers' own forward on the same tiny random weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny_models import ThreadGroup, run_ranks, save_model

from tpoverlap.attention import BlockTables
from tpoverlap.microbatch.batch import Batch
from tpoverlap.model.checkpoint import load_decoder
from tpoverlap.model.decoder import Decoder
from tpoverlap.model.runner import Runner

TOLERANCE = 1e-3

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 1000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 5000.0, "factor": 4.0}
NINE_HEADS = {"num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 144}

# Architecture, and what differs from the tiny default of 6 query heads, 2 KV heads and 80 intermediate features.
SHAPES = {
    "llama": ("llama", {}),
    "llama-3kv-odd-mlp": ("llama", {**NINE_HEADS, "intermediate_size": 83}),
    "llama-tied": ("llama", {"tie_word_embeddings": True, "vocab_size": 97}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-llama3-rope": ("llama", {"rope_parameters": LLAMA3_ROPE}),
    "llama-linear-rope": ("llama", {"rope_parameters": LINEAR_ROPE}),
    "qwen2": ("qwen2", {}),
    "qwen2-multi-query": ("qwen2", {"num_key_value_heads": 1, "tie_word_embeddings": True}),
    "qwen3": ("qwen3", {"head_dim": 32}),
    "qwen3-bias": ("qwen3", {"attention_bias": True, "intermediate_size": 1}),
}


def reference_logits(model: torch.nn.Module, prompt: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.tensor([prompt])).logits[0]


def new_runner(model: Decoder, prompts: list[list[int]]) -> Runner:
    model.allocate_kv_cache(64, 4)
    return Runner(model, BlockTables(64, 4), prompts)


def random_prompt(seed: int, length: int, vocab_size: int) -> list[int]:
    return torch.randint(vocab_size, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 8])
@pytest.mark.parametrize(("family", "overrides"), SHAPES.values(), ids=SHAPES.keys())
def test_logits_and_losses_match(tmp_path: Path, family: str, overrides: dict[str, object], world_size: int) -> None:
    seed = 100 * world_size + len(family)
    reference = save_model(tmp_path, family, seed, **overrides)
    prompt = random_prompt(seed, 23, reference.config.vocab_size)
    expected = reference_logits(reference, prompt)
    expected_losses = torch.nn.functional.cross_entropy(expected[:-1], torch.tensor(prompt[1:]), reduction="none")

    def work(group: ThreadGroup) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
        model = load_decoder(tmp_path, weights="fp32", group=group)
        logits, losses = [], []
        for chunk in new_runner(model, [prompt]).prefill(9):
            logits.append(model.logits(chunk.hidden))
            known = chunk.targets >= 0
            losses.append(model.token_losses(chunk.hidden[known], chunk.targets[known], block=4))
        return torch.cat(logits), torch.cat(losses), group.reduced

    results = run_ranks(world_size, work)
    for logits, losses, reduced in results:
        assert logits.shape == expected.shape
        assert (logits - expected).abs().max() <= TOLERANCE
        assert (losses - expected_losses).abs().max() <= TOLERANCE
        assert torch.equal(logits, results[0][0])
        assert torch.equal(losses, results[0][1])
        assert len(reduced) == (0 if world_size == 1 else 3 * 2 * reference.config.num_hidden_layers)
        assert all(map(torch.equal, reduced, results[0][2]))


@pytest.mark.parametrize("world_size", [1, 3])
def test_several_prompts_packed_into_chunks_decode_like_transformers(tmp_path: Path, world_size: int) -> None:
    reference = save_model(tmp_path, "qwen3", 7)
    prompts = [random_prompt(length, length, 101) for length in (5, 1, 14, 9)]

    def work(group: ThreadGroup) -> tuple[list[int], list[list[int]], int]:
        runner = new_runner(load_decoder(tmp_path, weights="fp32", group=group), prompts)
        sizes = [chunk.num_tokens for chunk in runner.prefill(8)]
        steps = [runner.decode() for _ in range(6)]
        tables = runner._tables
        runner.free()
        return sizes, [list(row) for row in zip(*steps, strict=True)], tables.num_free

    for sizes, texts, num_free in run_ranks(world_size, work):
        assert sizes == [8, 8, 8, 5]
        assert num_free == 64
        for prompt, text in zip(prompts, texts, strict=True):
            expected = list(prompt)
            for _ in range(6):
                expected.append(int(reference_logits(reference, expected)[-1].argmax()))
            assert text == expected[len(prompt) :]


@pytest.mark.parametrize(
    ("weights", "dtype", "tolerance"), [("bf16", torch.bfloat16, 0.15), ("fp16", torch.float16, 0.02)]
)
def test_half_precision_weights_stay_near_transformers(
    tmp_path: Path, weights: str, dtype: torch.dtype, tolerance: float
) -> None:
    reference = save_model(tmp_path, "llama", 11).to(dtype)
    prompt = random_prompt(11, 17, 101)

    def work(group: ThreadGroup) -> torch.Tensor:
        model = load_decoder(tmp_path, weights=weights, group=group)
        (chunk,) = new_runner(model, [prompt]).prefill(32)
        assert chunk.hidden.dtype == dtype
        return model.logits(chunk.hidden)

    for logits in run_ranks(2, work):
        assert (logits.float() - reference_logits(reference, prompt).float()).abs().max() <= tolerance


def one_request(ids: torch.Tensor, *, padding: int = 0, **fields: object) -> Batch:
    length = ids.shape[0]
    defaults: dict[str, object] = {
        "input_ids": torch.cat([ids, ids.new_zeros(padding)]),
        "positions": torch.cat([torch.arange(length), torch.zeros(padding, dtype=torch.int64)]),
        "query_start_loc": [0, length],
        "seq_lens": [length],
        "block_table": torch.arange(16, dtype=torch.int32)[None],
        "slot_mapping": torch.cat([torch.arange(length), torch.full((padding,), -1)]),
        "num_padding_tokens": padding,
    }
    return Batch(**(defaults | fields))  # type: ignore[arg-type]


@pytest.fixture
def model(tmp_path: Path) -> Decoder:
    save_model(tmp_path, "llama", 3)
    model = load_decoder(tmp_path, weights="fp32")
    model.allocate_kv_cache(16, 4)
    return model


@pytest.mark.parametrize("length", [1, 6])
def test_padding_tokens_change_nothing(model: Decoder, length: int) -> None:
    ids = torch.tensor(random_prompt(length, length, 101))
    padded = model(one_request(ids, padding=3))
    assert padded.shape[0] == length + 3
    torch.testing.assert_close(padded[:length], model(one_request(ids)))


def test_embeddings_may_be_given_in_place_of_ids(model: Decoder) -> None:
    ids = torch.tensor(random_prompt(1, 6, 101))
    embedded = one_request(ids, input_ids=None, inputs_embeds=model.embedding[ids])
    assert torch.equal(model(embedded), model(one_request(ids)))


def test_positions_of_three_axes_are_refused(model: Decoder) -> None:
    ids = torch.tensor([1, 2, 3])
    with pytest.raises(ValueError, match="M-RoPE"):
        model(one_request(ids, positions=torch.arange(3).expand(3, 3)))


def test_a_model_without_cache_says_so(tmp_path: Path) -> None:
    save_model(tmp_path, "llama", 3)
    with pytest.raises(RuntimeError, match="allocate_kv_cache"):
        load_decoder(tmp_path, weights="fp32")(one_request(torch.tensor([1, 2])))


def test_decode_before_prefill_and_bad_prompts_are_refused(model: Decoder) -> None:
    tables = BlockTables(16, 4)
    runner = Runner(model, tables, [[1, 2, 3], [4]])
    with pytest.raises(RuntimeError, match="2 prompts are not prefilled"):
        runner.decode()
    next(iter(runner.prefill(3)))
    with pytest.raises(RuntimeError, match="1 prompts are not prefilled"):
        runner.decode()
    with pytest.raises(ValueError, match="chunk_tokens"):
        next(runner.prefill(0))
    for prompts in ([], [[1], []]):
        with pytest.raises(ValueError, match="at least one token"):
            Runner(model, tables, prompts)
    with pytest.raises(ValueError, match="vocabulary of 101"):
        Runner(model, tables, [[101]])
