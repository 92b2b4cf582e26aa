"""The command line of predict.py: what it prints and writes, and what it says to wrong input."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "launch"))

import predict
import predict_h200
from bench_common import check_record
from predict_tables import to_json

QUICK = ["--tokens", "2000", "--chunk", "512"]


def test_built_in_tables_print_steps_cuts_and_advice(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "prediction.json"
    assert predict.main([*QUICK, "--json", str(path)]) == 0
    printed = capsys.readouterr().out
    for words in ("2000 tokens in chunks of 512, on quadro-rtx-8000", "serial", "+ dequantization tile", "min_tokens"):
        assert words in printed
    record = json.loads(path.read_text())
    check_record(record)
    times, cuts, advice = record["tables"]
    assert [row[0] for row in times["rows"]][:5] == list(predict.reference.MEASURED_S)
    assert [row[0] for row in cuts["rows"]] == [0, 512, 1024]
    for _, pieces, sizes, *_ in cuts["rows"]:
        parts = [int(part) for part in sizes.split(" + ")]
        assert len(parts) == pieces
        assert sum(parts) == 512
    assert [row[0] for row in advice["rows"]] == ["min_tokens", "num_pieces"]
    assert record["figures"]["serial, s"] == pytest.approx(times["rows"][0][1], abs=0.01)


def test_a_file_of_tables_a_link_and_another_model(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "box.json"
    path.write_text(json.dumps(to_json(predict_h200.tables(1.3))))
    seconds = {}
    for link in ("20", "40"):
        out = tmp_path / f"{link}.json"
        arguments = ["--tables", str(path), "--shape", "llama-70b", "--tp", "4", "--link", link, "--json", str(out)]
        assert predict.main([*QUICK, *arguments]) == 0
        seconds[link] = json.loads(out.read_text())["figures"]
    printed = capsys.readouterr().out
    assert "llama-70b, 4 ranks, 2000 tokens in chunks of 512, on h200-without-peer-access" in printed
    assert seconds["40"]["2 pieces, copy engines, s"] < seconds["20"]["2 pieces, copy engines, s"]
    assert seconds["40"]["2 pieces, NCCL, s"] == seconds["20"]["2 pieces, NCCL, s"]


def test_a_prompt_shorter_than_its_chunk(capsys: pytest.CaptureFixture[str]) -> None:
    assert predict.main(["--tokens", "100", "--chunk", "512"]) == 0
    assert "Best cuts of 100 tokens" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tp", "1"], "--tp 1 is not supported: give an integer >= 2"),
        (["--tokens", "0"], "--tokens 0 is not supported"),
        (["--chunk", "-5"], "--chunk -5 is not supported"),
        (["--link", "0"], "--link 0.0 is not supported: give a positive number of GB/s"),
        (["--link", "nan"], "--link nan is not supported"),
        (["--shape", "gpt-2"], "invalid choice: 'gpt-2'"),
        (["--json", "no/such/folder/x.json"], "does not exist: make it, or give another path"),
    ],
)
def test_wrong_options_end_with_status_2(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        predict.main(arguments)
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tables", "missing.json"], "predict: the tables missing.json cannot be read: No such file"),
        (["--tp", "5"], "predict: 5 ranks do not fit 24 query and 4 KV heads"),
    ],
)
def test_tables_and_models_that_do_not_fit_end_with_status_2(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert predict.main([*QUICK, *arguments]) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.out == ""
