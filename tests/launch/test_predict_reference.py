"""The prediction of reported and measured times: within 10 %, and the page that says so is true."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "launch"))

import predict_h200 as h200
import predict_reference as reference
from bench_common import ROOT
from predict import reference_tables
from predict_model import SHAPES, Predictor
from predict_records import Measured, compare, to_record
from render_benchmarks import load

NEAR = 0.10


def assert_predicted(record: dict[str, Any]) -> None:
    for measured, seconds in compare(record):
        assert seconds == pytest.approx(measured.seconds, rel=NEAR), f"{measured} is predicted as {seconds:.3f} s"


def test_one_fitted_figure_gives_all_others_within_ten_percent() -> None:
    fit = reference.fitted()
    assert len(fit.figures) == 15
    assert len(fit.others) == 14
    for figure in fit.others:
        assert abs(figure.error) <= NEAR, figure
    (on,) = (figure for figure in fit.figures if figure not in fit.others)
    assert (on.step, on.tokens) == reference.FITTED
    assert abs(on.error) < 1e-3


def test_serial_prefill_needs_no_fit_and_the_account_is_met() -> None:
    for half_tokens in (0, 2000):
        serial = reference.steps(reference.tables_with(half_tokens))[0]
        for tokens, measured_s in zip(reference.LENGTHS, reference.MEASURED_S["serial"], strict=True):
            assert serial.predict(tokens).seconds == pytest.approx(measured_s, rel=0.02)
    accounted = reference.steps(reference.tables_with(0))[0].predict(reference.ACCOUNTED_TOKENS)
    assert accounted.communication_s == pytest.approx(reference.NCCL_S, rel=1e-3)
    assert accounted.compute_s == pytest.approx(reference.ATTENTION_S + reference.OTHER_S, rel=1e-3)
    assert accounted.seconds == pytest.approx(207.9, rel=0.01)


@pytest.mark.parametrize(
    ("tokens", "context", "measured_ms", "step"),
    [
        (1600, 30_000, 9.71, "+ split-KV attention"),
        (1600, 100_000, 31.75, "+ split-KV attention"),
        (1600, 184_000, 58.47, "+ split-KV attention"),
        (801, 100_000, 17.14, "+ split-KV attention"),
        (801, 184_000, 32.07, "+ split-KV attention"),
        (2048, 32_000, 13.1, "serial"),
        (2048, 150_000, 61.5, "serial"),
        (512, 150_000, 20.0, "serial"),
        (96, 150_000, 19.8, "serial"),
        (64, 150_000, 19.9, "serial"),
    ],
)
def test_waves_explain_the_attention_kernel_as_it_was_timed(
    tokens: int, context: int, measured_ms: float, step: str
) -> None:
    """The tables know of it only that 150k tokens took 47 s in all."""
    (tables,) = (one.tables for one in reference.steps(reference.tables_with(0)) if one.name == step)
    seconds = Predictor(SHAPES[reference.SHAPE], tables).attention_s(context, tokens)
    assert seconds * 1e3 == pytest.approx(measured_ms, rel=0.06)


def test_the_fitted_projections_are_slower_than_the_card_could_be() -> None:
    fit = reference.fitted()
    assert 0.5 * reference.PEAK_FLOPS < fit.full_speed_flops < reference.PEAK_FLOPS
    assert 0 < fit.half_tokens < reference.CHUNK


def test_a_figure_that_the_parameter_does_not_explain_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"explains 33\.0 s for 'serial' at 29000 tokens"):
        reference.fitted("serial", 29_000)
    impossible = {**reference.MEASURED_S, "+ copy engines": (5.0, 216.81, 341.66)}
    monkeypatch.setattr(reference, "MEASURED_S", impossible)
    with pytest.raises(ValueError, match=r"explains 5\.0 s"):
        reference.fitted.__wrapped__("+ copy engines", 29_000)


def test_loops_on_two_h200() -> None:
    for loop in h200.LOOPS:
        predicted = h200.predicted_ms(loop, h200.COPY_ENGINES)
        assert predicted == pytest.approx(loop.halves_on_copy_engines, rel=0.03), loop
    factor = h200.fitted_nccl()
    for loop in h200.LOOPS[1:]:
        assert h200.predicted_ms(loop, h200.NCCL, factor) == pytest.approx(loop.halves_on_nccl, rel=NEAR), loop
    # Without that factor the overlap on NCCL is predicted to be far better than it was.
    assert all(h200.predicted_ms(loop, h200.NCCL) < (1 - NEAR) * loop.halves_on_nccl for loop in h200.LOOPS)


def test_the_page_shows_what_the_model_gives() -> None:
    page = (ROOT / "docs" / "prediction.md").read_text(encoding="utf-8")
    places = [page.find(table) for table in reference_tables()]
    assert min(places) >= 0, "stale: paste the tables that python launch/predict.py --reference prints"
    assert places == sorted(places)


def test_committed_prefills_are_predicted_but_for_those_that_the_page_names() -> None:
    page = (ROOT / "docs" / "prediction.md").read_text(encoding="utf-8")
    named = {line for line in page.splitlines() if line.startswith("| prefill_")}
    missed = set()
    for path in (ROOT / "docs" / "benchmarks").glob("prefill_*.json"):
        for one, seconds in compare(load(path)):
            error = seconds / one.seconds - 1
            if abs(error) > NEAR:
                row = (path.stem, one.transport, one.pieces, f"{one.seconds:.3f}", f"{100 * error:+.1f} %")
                missed.add(f"| {' | '.join(map(str, row))} |")
    assert missed == named


@pytest.mark.parametrize("factor", [0.85, 0.95, 1.0, 1.05, 1.15])
def test_a_record_whose_times_are_not_predicted_is_seen(factor: float) -> None:
    tables = h200.tables(1.3)
    predictor = Predictor(SHAPES[tables.shape], tables)
    measured = [
        Measured(name, pieces, 4096, 2048, factor * predictor.prefill(name, 4096, 2048, pieces).seconds)
        for name in tables.transports
        for pieces in (1, 2, 3)
    ]
    record = {"tables": to_record(tables, measured)}
    if abs(factor - 1) < NEAR / 2 + 0.01:
        assert_predicted(record)
    else:
        with pytest.raises(AssertionError, match=r"Measured\(transport='NCCL'"):
            assert_predicted(record)
