"""Predicted prefill: sums when run whole, the two-FIFO recurrence in pieces, and the advice that follows."""

from __future__ import annotations

import random
import sys
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "launch"))

import predict_reference
from predict_model import SHAPES, ModelShape, Predictor, at_speed, chunks, equal_cuts
from predict_tables import Curve, Dequantization, DeviceTables, Host, PointAttention, Transport

from tpoverlap.errors import ConfigError
from tpoverlap.microbatch.bound import Segment, overlapped_time

SHAPE = SHAPES["qwen3.8-27b"]
UNDISTURBED = {"linear": 0.0, "dequantization": 0.0, "attention": 0.0}


def tables(**changes: object) -> DeviceTables:
    """Times that are easy to add up: 1 and 3 s for 100 tokens, all-reduces of 2 s for 100 tokens, attention 4 s."""
    link = Transport(at_speed(100 * SHAPE.hidden * 2 / 2e9), 1.0, UNDISTURBED)
    made = DeviceTables(
        name="made-up",
        sources=("made up",),
        shape="qwen3.8-27b",
        ranks=2,
        mixer=Curve(((100, 1.0),)),
        mlp=Curve(((100, 3.0),)),
        dequantization=None,
        attention=PointAttention(((100, 950, 4.0),)),
        transports={"link": link},
        hand_over=0.0,
    )
    return replace(made, **changes)  # type: ignore[arg-type]


def test_shapes_hold_the_weights_that_their_names_say() -> None:
    for name, billions, embeddings in (
        ("qwen3.8-27b", 27, 248_320),
        ("qwen3-32b", 32.8, 151_936),
        ("llama-70b", 70.6, 128_256),
    ):
        shape = SHAPES[name]
        total = shape.layers * (shape.mixer_weights + shape.mlp_weights) + 2 * embeddings * shape.hidden
        assert total / 1e9 == pytest.approx(billions, rel=0.03)
    assert sum(SHAPE.has_attention(layer) for layer in range(64)) == 16


def test_a_whole_chunk_is_the_sum_of_its_parts() -> None:
    predicted = Predictor(SHAPE, tables()).whole("link", 950, 100)
    assert predicted.compute_s == pytest.approx(64 * (1 + 3) + 16 * 4)
    assert predicted.communication_s == pytest.approx(128 * 2)
    assert predicted.seconds == predicted.limit_s == pytest.approx(64 * 4 + 16 * 4 + 128 * 2)


def test_equal_pieces_without_attention_are_the_bound_on_overlapped_time() -> None:
    predictor = Predictor(replace(SHAPE, attention_every=0), tables())
    for pieces in (2, 4):
        predicted = predictor.split("link", 0, 400, equal_cuts(400, pieces))
        bound = overlapped_time([Segment(4, 8), Segment(12, 8)] * 64, pieces)
        assert predicted.seconds == pytest.approx(bound)
        assert predicted.limit_s == pytest.approx(64 * 16)


def test_hand_overs_dequantization_and_slower_all_reduces_count_in_pieces() -> None:
    per_piece = tables(dequantization=Dequantization(1.0, 2.0, "piece"))
    per_chunk = tables(dequantization=Dequantization(1.0, 2.0, "chunk"))
    slow = Transport(at_speed(1.0), 1.5, UNDISTURBED)
    shape = replace(SHAPE, attention_every=0)
    whole, once, twice = (
        Predictor(shape, given).split("link", 0, 100, cuts).compute_s
        for given, cuts in ((per_piece, ()), (per_chunk, (50,)), (per_piece, (50,)))
    )
    assert (whole, once, twice) == pytest.approx((64 * 7, 64 * 7, 64 * 10))
    on_slow = Predictor(shape, tables(transports={"link": slow}))
    ratio = on_slow.split("link", 0, 100, (50,)).communication_s / on_slow.whole("link", 0, 100).communication_s
    assert ratio == pytest.approx(1.5)
    free, costly = (Predictor(shape, tables(hand_over=s)).split("link", 0, 100, (50,)).seconds for s in (0.0, 0.1))
    assert free < costly <= free + 256 * 0.1 + 1e-6


def test_a_host_that_is_slower_than_the_device_decides() -> None:
    shape = replace(SHAPE, attention_every=4)
    link = Transport(at_speed(1e12), 1.0, UNDISTURBED, issue=0.1)
    free, fast, slow = (
        Predictor(shape, tables(transports={"link": link}, host=host))
        for host in (None, Host(0.1, 0.2, 0.1), Host(10.0, 30.0, 20.0))
    )
    for cuts in ((), (50,)):
        pieces = len(cuts) + 1
        of_free, of_fast, of_slow = (one.split("link", 0, 100, cuts) for one in (free, fast, slow))
        assert of_free.issue_s == 0
        assert of_fast.issue_s == pytest.approx(pieces * (48 * 0.1 + 16 * 0.2 + 64 * 0.1 + 12.8))
        assert of_fast.seconds == pytest.approx(of_free.seconds, rel=0.01)  # it runs ahead
        assert of_slow.issue_s == of_slow.limit_s == pytest.approx(pieces * (48 * 10 + 16 * 30 + 64 * 20 + 12.8))
        assert of_slow.seconds == pytest.approx(of_slow.limit_s, rel=0.01)


@pytest.mark.parametrize("seed", range(5))
def test_no_schedule_beats_its_limit_or_is_slower_than_one_after_the_other(seed: int) -> None:
    draw = random.Random(seed)
    link = Transport(
        at_speed(draw.uniform(1e-6, 1e-4)), draw.uniform(1, 1.4), {k: draw.uniform(0, 0.4) for k in UNDISTURBED}
    )
    predictor = Predictor(SHAPE, tables(transports={"link": link}))
    cuts = sorted(draw.sample(range(1, 400), draw.randint(1, 3)))
    one = predictor.split("link", draw.randint(0, 5000), 400, cuts)
    assert one.limit_s <= one.seconds * (1 + 1e-9)
    assert one.seconds <= 1.4 * one.compute_s + one.communication_s


def test_prompts_are_predicted_chunk_by_chunk() -> None:
    assert list(chunks(250, 100)) == [(0, 100), (100, 100), (200, 50)]
    assert equal_cuts(1600, 2) == (800,)
    assert equal_cuts(10, 3) == (4, 7)
    assert equal_cuts(1, 2) == equal_cuts(5, 1) == ()
    predictor = Predictor(SHAPE, tables())
    parts = [predictor.split("link", c, n, equal_cuts(n, 2)) for c, n in chunks(250, 100)]
    assert predictor.prefill("link", 250, 100, 2).seconds == pytest.approx(sum(part.seconds for part in parts))


def test_attention_follows_heads_width_and_ranks() -> None:
    four = Predictor(SHAPE, tables(), tp=4)
    assert four.attention_s(950, 100) == pytest.approx(2.0)
    wide = ModelShape(2, 5120, 48, 4, 128, 17408)
    assert Predictor(wide, tables()).attention_s(950, 100) == pytest.approx(4.0)
    # A rank's share of weights halves, each byte of an all-reduce crosses 2 (n - 1) / n instead of 1 times.
    whole = four.whole("link", 0, 100)
    assert whole.communication_s == pytest.approx(128 * 2 * 1.5)
    # By waves: 8 ranks share 4 KV heads, so each has 3 query heads of one: 1600 * 3 / 128 rounds up to 38 blocks,
    # which in 3 parts fill 72 slots twice.
    waves = predict_reference.tables_with(500)
    assert Predictor(SHAPE, waves, tp=8).attention_s(0, 1600) == pytest.approx(
        2 / 3 * waves.attention.seconds_per_key * 800  # type: ignore[union-attr]
    )


def test_best_cut_is_no_worse_than_equal_pieces_and_whole() -> None:
    predictor = Predictor(SHAPE, predict_reference.tables_with(600))
    for context in (0, 100_000):
        best = predictor.best_cut("copy engines", context, 1024)
        others = [predictor.split("copy engines", context, 1024, equal_cuts(1024, k)).seconds for k in (1, 2, 4)]
        assert best.seconds <= min(others) + 1e-12
        assert all(cut % 128 == 0 for cut in best.cuts)
        assert best.seconds == predictor.split("copy engines", context, 1024, best.cuts).seconds


def test_an_expensive_hand_over_or_a_free_link_leaves_batches_whole() -> None:
    costly = Predictor(SHAPE, tables(hand_over=1e3))
    assert costly.best_cut("link", 0, 512).cuts == ()
    assert costly.min_tokens("link", 512) is None
    free = Predictor(SHAPE, tables(hand_over=1e-6, transports={"link": Transport(at_speed(1e12), 1.0, UNDISTURBED)}))
    assert free.min_tokens("link", 512) is None


def test_min_tokens_is_where_splitting_begins_to_pay() -> None:
    predictor = Predictor(SHAPE, predict_reference.tables_with(600))
    least = predictor.min_tokens("copy engines", 1600)
    assert least is not None
    assert 128 < least < 1600

    def pays(tokens: int) -> bool:
        split = predictor.split("copy engines", 0, tokens, equal_cuts(tokens, 2))
        return split.seconds < predictor.whole("copy engines", 0, tokens).seconds

    assert not pays(least - 128)
    assert all(pays(tokens) for tokens in range(least, 1601, 128))
    assert Predictor(SHAPE, tables()).min_tokens("link", 1600) == 128  # nothing is lost by splitting there
    assert Predictor(SHAPE, tables()).min_tokens("link", 100) is None  # no multiple of 128 fits


def test_what_does_not_fit_is_refused() -> None:
    for tp in (1, 5, 16):
        with pytest.raises(ConfigError, match=f"^{tp} ranks do not fit 24 query and 4 KV heads"):
            Predictor(SHAPE, tables(), tp)
    with pytest.raises(ConfigError, match="the tables are of shape 'other', known are"):
        Predictor(SHAPE, tables(shape="other"))
    with pytest.raises(ConfigError, match="no transport 'NCCL': give one of link"):
        Predictor(SHAPE, tables()).whole("NCCL", 0, 100)
