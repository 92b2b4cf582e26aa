"""QSA arms of launch/bench_sparse.py: request segments against the paged scorer, their break-even, metadata."""

from __future__ import annotations

import statistics
from functools import partial

import torch
from bench_common import Comparison, alternate, on_host
from sparse_run import Run, graph_arm, require

from tpoverlap.attention import qsa
from tpoverlap.attention.qsa import scoring, scoring_torch

RATIO, PAGE, HEADS, HEAD_DIM = 4, 16, 4, 128
KEY_BYTES = 2 * HEAD_DIM
SHAPES = ((4, 4), (4, 5), (8, 4), (8, 5))
TOKENS = (32_768, 131_072, 262_144)
BREAK_EVEN = tuple((requests, rows) for requests in (2, 4, 8, 16) for rows in (1, 2, 3, 4))


class DecodeBatch:
    """Requests with several rows each at the end of contexts of one length, over shuffled pages."""

    def __init__(self, requests: int, rows_each: int, tokens: int) -> None:
        columns = tokens // RATIO
        rows = requests * rows_each
        self.q = torch.randn(rows, HEADS, HEAD_DIM, device="cuda", dtype=torch.float16)
        pages = requests * columns // PAGE
        self.keys = torch.randn(pages, PAGE, HEAD_DIM, device="cuda", dtype=torch.float16)
        self.table = torch.randperm(pages, device="cuda").int().view(requests, -1)
        self.token_to_req = torch.arange(requests, device="cuda").repeat_interleave(rows_each).int()
        self.positions = (tokens - rows_each + torch.arange(rows_each, device="cuda")).repeat(requests)
        self.seq_lens = torch.full((requests,), tokens, dtype=torch.int32, device="cuda")
        self.visible = torch.div(self.positions + 1, RATIO, rounding_mode="floor").int()
        self.scores = torch.empty(rows, columns, device="cuda")

    def select(self, segments: bool) -> torch.Tensor:
        out = qsa.select_tokens(
            self.q,
            self.keys,
            self.table,
            self.token_to_req,
            self.positions,
            self.seq_lens,
            compress_ratio=RATIO,
            visible_blocks=self.visible,
            request_segments=segments,
        )
        assert isinstance(out, torch.Tensor)
        return out

    def score(self, segment: int) -> torch.Tensor:
        args = (self.q, self.keys, self.table, self.token_to_req, self.visible, HEAD_DIM**-0.5, self.scores)
        scoring.score(*args, max_segment=segment, skip_visible=0)
        return self.scores


def compare(run: Run, requests: int, rows_each: int, tokens: int, *, whole: bool) -> Comparison:
    """Arms "paged" and "segments" (whole selections where ``whole``), and "paged scores" and "segment scores"."""
    key_bytes = requests * tokens // RATIO * KEY_BYTES
    count = run.rotations(key_bytes, 2.0 * key_bytes)
    batches = [DecodeBatch(requests, rows_each, tokens) for _ in range(count)]

    def check_scores() -> None:
        for batch in batches:
            seen = torch.arange(batch.scores.shape[1], device="cuda") < batch.visible.unsqueeze(1)
            words = [batch.score(segment).view(torch.int32)[seen].clone() for segment in (1, 4)]
            require(torch.equal(*words), "the scorers differ in a bit")
            row = torch.empty(1, batch.scores.shape[1], device="cuda")
            last = (batch.q[-1:], batch.keys, batch.table, batch.token_to_req[-1:], batch.visible[-1:])
            scoring_torch.score(*last, HEAD_DIM**-0.5, row)
            n = int(batch.visible[-1])
            torch.testing.assert_close(batch.score(1)[-1, :n], row[0, :n], rtol=1e-4, atol=1e-4)

    def check_selections() -> None:
        for batch in batches:
            require(torch.equal(batch.select(False), batch.select(True)), "the selections differ")

    arms = [
        graph_arm("paged scores", [partial(batch.score, 1) for batch in batches], check_scores),
        graph_arm("segment scores", [partial(batch.score, 4) for batch in batches], check_scores),
    ]
    if whole:
        arms += [
            graph_arm("paged", [partial(batch.select, False) for batch in batches], check_selections),
            graph_arm("segments", [partial(batch.select, True) for batch in batches], check_selections),
        ]
    return alternate(arms, run.repetitions, label=f"QSA {requests} x {rows_each} at {tokens}")


def measure_selection(run: Run) -> None:
    """Whole selections at the shapes of speculative decoding, with the bytes of keys that each scorer reads."""
    rows_out: list[list[object]] = []
    for requests, rows_each in SHAPES:
        for tokens in TOKENS:
            result = compare(run, requests, rows_each, tokens, whole=True)
            ratio = result.ratio("segments", "paged")
            scores = result.ratio("segment scores", "paged scores")
            key_bytes = requests * tokens // RATIO * KEY_BYTES
            segment_reads = -(-rows_each // 4) * key_bytes
            seconds = result.time("segment scores").median
            key = f"qsa_{requests}x{rows_each}_{tokens // 1024}k"
            run.figures[f"{key}_segments_over_paged"] = round(ratio.median, 3)
            run.figures[f"{key}_us"] = round(result.time("segments").median * 1e6, 1)
            rows_out.append(
                [
                    f"{requests} x {rows_each}",
                    f"{tokens // 1024}K",
                    result.time("paged").as_time(),
                    result.time("segments").as_time(),
                    ratio.as_ratio(),
                    scores.as_ratio(),
                    round(rows_each * key_bytes / 1e6),
                    round(segment_reads / 1e6),
                    round(segment_reads / seconds / 1e9),
                ]
            )
    columns = ["requests x rows", "tokens", "paged", "segments", "segments over paged", "scores alone"]
    columns += ["paged reads, MB", "segments read, MB", "segments read, GB/s"]
    title = "QSA selection of 512 blocks, compress ratio 4, 4 heads of 128, FP16"
    run.tables.append({"title": title, "columns": columns, "rows": rows_out})


def measure_break_even(run: Run) -> None:
    """Scores alone by requests and rows a request: where request segments begin to pay."""
    rows_out: list[list[object]] = []
    for requests, rows_each in BREAK_EVEN:
        row: list[object] = [requests, rows_each]
        for tokens in (8192, 32_768, 131_072):
            result = compare(run, requests, rows_each, tokens, whole=False)
            ratio = result.ratio("segment scores", "paged scores")
            run.figures[f"qsa_scores_{requests}x{rows_each}_{tokens // 1024}k"] = round(ratio.median, 3)
            row.append(ratio.as_ratio())
        rows_out.append(row)
    columns = ["requests", "rows each", "8K tokens", "32K tokens", "128K tokens"]
    run.tables.append({"title": "Request segments over paged scorer, scores", "columns": columns, "rows": rows_out})


def measure_metadata(run: Run) -> None:
    """One build of a batch's metadata into given buffers: the kernel, and the host's share."""
    rows_out: list[list[object]] = []
    for requests, rows_each in ((16, 4), (256, 4), (8, 1024)):
        tokens = requests * rows_each
        work = qsa.k_work_capacity(tokens, requests, RATIO)
        buffers = qsa.QSAMetadata.allocate(tokens, work, "cuda")
        starts = (torch.arange(requests + 1, device="cuda") * rows_each).int()
        lens = torch.randint(rows_each, 100_000, (requests,), device="cuda").int()
        slots = torch.arange(tokens, device="cuda")
        table = torch.randint(0, 10_000, (requests, 100_000 // RATIO // PAGE + 1), device="cuda").int()
        build = partial(
            qsa.build_metadata,
            starts,
            lens,
            slots,
            table,
            num_tokens=tokens,
            storage_block_size=PAGE,
            compress_ratio=RATIO,
            max_k_work=work,
            buffers=buffers,
        )

        def check(build: partial[qsa.QSAMetadata] = build, inputs: tuple[torch.Tensor, ...] = (starts, lens)) -> None:
            got = build()
            on_cpu = [t.cpu() for t in build.args]
            want = qsa.build_metadata(*on_cpu, **{k: v for k, v in build.keywords.items() if k != "buffers"})
            for name, tensor in vars(want).items():
                require(torch.equal(getattr(got, name).cpu(), tensor), f"metadata: {name} is wrong")

        result = alternate([graph_arm("kernel", [build] * 8, check)], run.repetitions, label="QSA metadata")
        host = statistics.median(_host_seconds(build) for _ in range(200))
        kernel = result.time("kernel")
        key = f"qsa_metadata_{requests}x{rows_each}"
        run.figures[f"{key}_us"] = round(kernel.median * 1e6, 2)
        run.figures[f"{key}_host_us"] = round(host * 1e6, 1)
        rows_out.append([requests, rows_each, work, kernel.as_time(), round(host * 1e6, 1)])
    columns = ["requests", "tokens each", "work items", "kernel", "host, us"]
    run.tables.append({"title": "QSA metadata, one launch", "columns": columns, "rows": rows_out})


def _host_seconds(call: partial[qsa.QSAMetadata]) -> float:
    torch.cuda.synchronize()
    return on_host(call)()
