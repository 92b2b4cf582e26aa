"""The prefill benchmark: its arms, its model, its findings, and a short run on CPU ranks."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "launch"))

from bench_common import ROOT, Comparison, check_record
from bench_prefill import parse_options
from bench_teams import HOST, PEER, Team
from job_world import World
from predict_records import compare, from_record
from predict_tables import Host, PointAttention
from prefill_arms import OURS, SERIAL, TILE, everything, prefill_arms
from prefill_contributions import ChunkAccount, Findings, Measured, figures, missed, tables
from prefill_host import HostTimes
from prefill_parts import device_tables
from prefill_soak import LENGTHS, SETTLED, Footprint, growth
from prefill_trials import Answer, PrefillTrials, lead, sample
from rank_harness import run_ranks
from synthetic_decoder import SHAPES, synthetic_decoder

from tpoverlap.attention import slot_mapping
from tpoverlap.microbatch import Batch
from tpoverlap.quant import NVFP4Linear


class OneRank:
    rank_in_group, world_size = 0, 1

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def all_gather(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        return x


def test_steps_add_up_and_peers_have_the_kernels_that_they_are_compared_with() -> None:
    arms = prefill_arms(device="cuda", pieces=2, has_turing=True, fastest="triton", with_peer=True)
    steps = [arm.name for arm in arms if arm.is_step]
    assert steps == [
        "serial",
        "+ halves",
        "+ copy engines",
        "+ split-KV attention",
        "+ dequantization tile",
        "+ triton attention",
    ]
    assert everything(arms).name == TILE
    for before, after in itertools.pairwise(arms):
        if after.is_step:
            changed = [key for key in vars(after) if getattr(after, key) != getattr(before, key)]
            assert len(changed) == 2, changed  # the name, and one thing more
    kernels = {arm.name: (arm.backend, arm.num_splits, arm.tile) for arm in arms}
    assert kernels["serial with P2P"] == kernels[TILE]
    assert kernels["serial with P2P, best kernels"] == kernels["serial, best kernels"] == kernels["+ triton attention"]
    assert {arm.team for arm in arms if "P2P" in arm.name} == {PEER}
    assert {arm.team for arm in arms if "P2P" not in arm.name} == {HOST}


def test_arms_that_a_machine_cannot_have_are_left_out() -> None:
    cpu = prefill_arms(device="cpu", pieces=2, has_turing=False, fastest=None, with_peer=False)
    assert [arm.name for arm in cpu] == ["serial", "+ halves", "+ channel"]
    no_turing = prefill_arms(device="cuda", pieces=3, has_turing=False, fastest="triton", with_peer=False)
    assert [arm.name for arm in no_turing] == ["serial", "+ halves", "+ copy engines", "+ dequantization tile"]
    assert {arm.backend for arm in no_turing} == {"triton"}


def test_the_27b_shape_is_the_one_that_layers_are_timed_with() -> None:
    shape = SHAPES["qwen3.8-27b"]
    assert (2 * shape.query_heads + 2 * shape.kv_heads) * shape.head_dim // 2 == 7168
    assert shape.query_heads * shape.head_dim // 2 == 3072
    weights = shape.num_layers * shape.config().linear_weights_per_layer + 2 * shape.vocab * shape.hidden
    gates = shape.num_layers * shape.hidden * shape.query_heads * shape.head_dim
    assert 24e9 < weights + gates < 28e9


def test_activations_of_a_deep_random_model_keep_their_size() -> None:
    shape = SHAPES["tiny"].with_layers(48)
    model, _ = synthetic_decoder(
        shape,
        OneRank(),
        dtype=torch.float32,
        device=torch.device("cpu"),
        state_block=32,
        progress=lambda: None,
    )
    model.allocate_kv_cache(8, 16)
    for module in model.modules():
        if isinstance(module, NVFP4Linear):
            dense = module(torch.eye(module.in_features)).T
            assert dense.std() < 1.2 * module.in_features**-0.5
    ids = torch.randint(shape.vocab, (96,), generator=torch.Generator().manual_seed(0))
    table = torch.arange(8, dtype=torch.int32)[None]
    slots = slot_mapping(table, [0, 96], [96], 16)
    batch = Batch(
        input_ids=ids,
        positions=torch.arange(96),
        query_start_loc=[0, 96],
        seq_lens=[96],
        block_table=table,
        slot_mapping=slots,
    )
    hidden = torch.nn.functional.embedding(ids, model.embedding)
    metadata = model.metadata(batch)
    rotary = (torch.ones(96, shape.head_dim // 2), torch.zeros(96, shape.head_dim // 2))
    with torch.inference_mode():
        for layer in model.layers:
            hidden = layer(hidden, rotary, metadata)
    assert 0.7 < float(hidden.std()) < 3
    assert 0.5 < float(model.logits(model(batch)).std()) < 2


def measured(everything_s: float, peer_s: float, decode_s: float) -> Measured:
    arms = prefill_arms(device="cuda", pieces=2, has_turing=True, fastest="turing", with_peer=True)
    seconds = {arm.name: 10.0 for arm in arms} | {TILE: everything_s, "serial with P2P": peer_s}
    times = Comparison({name: (s, 2 * s) for name, s in seconds.items()})
    accounts = {arm.name: [ChunkAccount(0.5, 0.95, 0.4, 1.0)] * 2 for arm in arms}
    peaks = {arm.name: (100 if arm.name == SERIAL else 406) << 20 for arm in arms}
    answers = {arm.name: Answer(7, 1e-3) for arm in arms}
    decode = Comparison({"NCCL": (1.0, 1.0), "tpoverlap": (decode_s, decode_s)})
    return Measured(29_000, arms, times, times, accounts, peaks, answers, 28_672, decode)


def test_goals_that_are_missed_say_what_bounds_them() -> None:
    assert missed(Findings([measured(6.0, 5.8, 0.9)], None)) == []
    slow = Findings([measured(7.0, 5.0, 1.1)], None)
    assert missed(slow) == [
        "29000 tokens: + dequantization tile / serial is 0.700, the goal is 0.62; compute takes 50% of a chunk's time, "
        "communication 95%: communication bounds it",
        "29000 tokens: + dequantization tile / serial with P2P is 1.400, the goal is 1.05; compute takes 50% of a "
        "chunk's time, communication 95%: communication bounds it",
        "decode behind 28672: tpoverlap / NCCL is 1.100, the goal is 1",
    ]
    made = figures(slow)
    assert made["dequantization_tile_over_serial_29k"] == 0.7
    assert made["peak_memory_difference_29k_mib"] == 306.0
    assert [table["title"] for table in tables(slow)] == [
        "29000 tokens",
        "29000 tokens: ratios",
        "Decode of a token behind 28672 tokens",
    ]


def test_a_soak_counts_growth_behind_the_first_prompts() -> None:
    found = [Footprint(1 << 20, 1 << 21, 1 << 22)] * SETTLED
    assert growth([*found, *found]) == Footprint(0, 0, 0)
    leaking = found + [Footprint((2 + i) << 20, 1 << 21, 1 << 22) for i in range(LENGTHS)]
    assert growth(leaking) == Footprint(LENGTHS << 20, 0, 0)
    assert "allocated memory grew by 5.0 MiB" in missed(Findings([measured(6.0, 5.8, 0.9)], leaking))[0]


def test_samples_lie_evenly_over_the_full_chunks() -> None:
    def chunk(tokens: int, end: int) -> Batch:
        zeros = torch.zeros(tokens, dtype=torch.int64)
        return Batch(
            input_ids=zeros,
            positions=zeros,
            query_start_loc=[0, tokens],
            seq_lens=[end],
            block_table=torch.zeros(1, 1, dtype=torch.int32),
            slot_mapping=zeros,
        )

    chunks = [*(chunk(4, 4 * i + 4) for i in range(6)), chunk(1, 25)]
    assert [c.seq_lens[0] for c in sample(chunks, 3)] == [8, 16, 24]
    assert [c.seq_lens[0] for c in sample(chunks, 8)] == [4, 8, 12, 16, 20, 24, 4, 8]


def test_a_lead_is_measured_in_deviations() -> None:
    logits = torch.zeros(1, 100)
    logits[0, :2] = torch.tensor([3.0, 1.0])
    assert lead(logits) == pytest.approx(2.0 / float(logits.std()))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--chunk", "100"], "multiple of 32"),
        (["--state-block", "96"], "multiple of the state block"),
        (["--lengths", "2047"], "at least a chunk"),
        (["--lengths", "4096", "4096"], "twice"),
        (["--soak", "10"], "more than"),
        (["--samples", "0"], "at least 1"),
        (["--plot", "plot.png"], "give --json"),
        (["--record", "record.json"], "give --plot"),
        (["--ranks", "9"], "2 to 8"),
        (["--trace", "/nowhere/at/all.json"], "does not exist"),
    ],
)
def test_bad_options_are_refused(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        parse_options(["--device", "cpu", *arguments])
    assert message in capsys.readouterr().err


def check_predictions(record: dict[str, Any]) -> None:
    ((kernels, prefills),) = from_record(record)
    assert kernels.name == "auto attention, default dequantization tile"
    assert (kernels.shape, kernels.ranks) == ("tiny", 2)
    assert [(one.transport, one.pieces) for one in prefills] == [("gloo", 1), ("gloo", 2), ("channel", 2)]
    assert {(one.tokens, one.chunk) for one in prefills} == {(300, 128)}
    assert [tokens for tokens, _ in kernels.mixer.points] == [tokens for tokens, _ in kernels.mlp.points]
    assert {tokens for tokens, _ in kernels.mlp.points} == {16, 32, 64, 96, 128}
    assert isinstance(kernels.attention, PointAttention)
    assert {point[:2] for point in kernels.attention.points} == {
        (tokens, context) for tokens in (32, 64, 128) for context in (0, (300 - tokens) // 2, 300 - tokens)
    }
    assert kernels.dequantization is not None
    assert kernels.dequantization.per == "chunk"
    assert min(kernels.hand_over, kernels.dequantization.mixer, kernels.dequantization.mlp) >= 0
    assert min(kernels.per_chunk, kernels.per_prompt) > 0
    assert list(kernels.transports) == ["gloo", "channel"]
    for transport in kernels.transports.values():
        assert [size for size, _ in transport.all_reduce.points] == [64 * 2 * n for n in (16, 32, 64, 96, 128)]
    predicted = [row for table in record["tables"] for row in table["rows"] if table["title"].startswith("Predicted")]
    for (one, seconds), row in zip(compare(record), predicted, strict=True):
        assert 0 < seconds < 100 * one.seconds
        assert row[1:6] == [one.transport, one.pieces, one.tokens, one.seconds, seconds]


def _host_times(rank: int) -> tuple[float, ...]:
    team = Team(HOST, World(rank, 2, rank, 2), rank, 2, range(2), torch.device("cpu"))
    trials = PrefillTrials(team, SHAPES["tiny"], 128, 64, 256)
    arm = prefill_arms(device="cpu", pieces=2, has_turing=False, fastest=None, with_peer=False)[0]
    layers = list(trials.model.layers)[:2]
    with torch.inference_mode():
        times = HostTimes(trials, layers)
        host = times.of_segments(lambda some: lambda: time.sleep(0.001 * len(some)), lambda: time.sleep(0.004))
        before = list(trials.model.layers)
        all_reduce = times.of_all_reduce(arm, OURS, Host(0.0, 0.0, 0.0))
        assert list(trials.model.layers) == before
        # Segments that take the host as long as all of it leave nothing for the all-reduces.
        assert times.of_all_reduce(arm, OURS, Host(1.0, 1.0, 1.0)) == 0
    trials.close()
    return (*vars(host).values(), all_reduce)


def test_host_times_are_those_of_the_slowest_rank_and_the_same_on_all() -> None:
    first, second = run_ranks(_host_times, 2)
    assert first == second
    mixer, attention, mlp, all_reduce = first
    assert 0.001 <= mixer < 0.01
    assert 0.001 <= attention < 0.01
    assert 0.002 <= mlp < 0.02
    assert 0 < all_reduce < 0.1


def _tables_of_teams(rank: int) -> str:
    name = (HOST, PEER)[rank // 2]
    first = rank // 2 * 2
    team = Team(name, World(rank, 4, rank, 4), rank - first, 2, range(first, first + 2), torch.device("cpu"))
    trials = PrefillTrials(team, SHAPES["tiny"].with_layers(2), 128, 64, 256)
    arms = prefill_arms(device="cpu", pieces=2, has_turing=False, fastest=None, with_peer=True)
    (tables,) = device_tables(trials, arms, "tiny", 256)
    trials.close()
    return repr(tables)


def test_a_team_that_has_one_transport_gets_the_tables_of_all() -> None:
    assert len(set(run_ranks(_tables_of_teams, 4))) == 1


def test_what_was_measured_outlasts_a_run_that_is_cut_short(tmp_path: Path) -> None:
    record_file = tmp_path / "record.json"
    command = [sys.executable, str(ROOT / "launch" / "bench_prefill.py"), "--device", "cpu", "--shape", "tiny"]
    command += ["--chunk", "128", "--state-block", "64", "--lengths", "300", "--rounds", "1", "--samples", "2"]
    command += ["--decode-repetitions", "1", "--soak", "100000", "--json", str(record_file)]
    run = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
    try:
        while not record_file.exists():
            assert run.poll() is None
            time.sleep(0.1)
        time.sleep(0.5)
    finally:
        os.killpg(run.pid, signal.SIGTERM)
        run.wait()
    record = json.loads(record_file.read_text())
    check_record(record)
    assert record["notes"][-1] == "The run did not come to its end."
    assert record["command"].startswith("python launch/bench_prefill.py --device cpu")
    assert "channel_over_serial_300" in record["figures"]


def test_a_short_run_on_cpu_ranks_leaves_all_its_files(tmp_path: Path) -> None:
    record_file, plot, trace = (tmp_path / name for name in ("record.json", "plot.png", "trace.json"))
    command = [sys.executable, str(ROOT / "launch" / "bench_prefill.py"), "--device", "cpu", "--shape", "tiny"]
    command += ["--chunk", "128", "--state-block", "64", "--lengths", "300", "--rounds", "1", "--samples", "2"]
    command += ["--decode-repetitions", "1", "--soak", "11"]
    command += ["--json", str(record_file), "--plot", str(plot), "--trace", str(trace)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    record = json.loads(record_file.read_text())
    check_record(record)
    assert record["what"] == "prefill"
    assert [row[0] for row in record["tables"][0]["rows"]] == ["serial", "+ halves", "+ channel"]
    assert len({row[9] for row in record["tables"][0]["rows"]}) == 1  # the first token
    assert record["figures"].keys() >= {"channel_over_serial_300", "decode_gloo_300_ms", "soak_growth_resident_mib"}
    check_predictions(record)
    assert plot.read_bytes().startswith(b"\x89PNG")
    drawn = [sys.executable, command[1], "--record", str(record_file), "--plot", str(tmp_path / "again.png")]
    assert subprocess.run(drawn, timeout=60).returncode == 0
    assert (tmp_path / "again.png").read_bytes().startswith(b"\x89PNG")
    names = {event["name"] for event in json.loads(trace.read_text())["traceEvents"]}
    assert {"segment", "all_reduce"} <= names
