"""QSA on a GPU: metadata, scorers, selection and a whole layer against their definitions, eager and captured."""

from __future__ import annotations

import itertools

import pytest
import torch
from qsa_cases import check_metadata, exact_scores, loop_metadata, loop_select, random_batch, score_words, select_case
from qsa_layer import run_layer

from tpoverlap.attention import qsa
from tpoverlap.attention.qsa import scoring_torch, selection_torch
from tpoverlap.errors import UnsupportedError

pytestmark = pytest.mark.gpu

RATIO, PAGE = 4, 16


@pytest.mark.parametrize("ratio", range(1, 9))
@pytest.mark.parametrize("ring", [0, 8])
def test_metadata_by_the_definition(ratio, ring):
    for seed in range(12):
        check_metadata(seed, "cuda", ratio=ratio, storage_block_size=4, ring=ring, extra_work=seed % 4 - 1)


def gpu_kernels(call) -> list[str]:
    """Names of the kernels, copies and fills that a call puts on the GPU."""
    call()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        torch.cuda.synchronize()
    return [e.name for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]


def test_metadata_is_one_launch_without_a_sync():
    batch = random_batch(3, ratio=RATIO, storage_block_size=4)
    inputs = batch.tensors("cuda")
    work = qsa.k_work_capacity(batch.num_tokens, len(batch.query_lens), RATIO)
    buffers = qsa.QSAMetadata.allocate(batch.num_tokens, work, "cuda")
    before = torch.cuda.get_sync_debug_mode()

    def build():
        torch.cuda.set_sync_debug_mode("error")
        try:
            qsa.build_metadata(
                *inputs,
                num_tokens=batch.num_tokens,
                storage_block_size=4,
                compress_ratio=RATIO,
                max_k_work=work,
                buffers=buffers,
            )
        finally:
            torch.cuda.set_sync_debug_mode(before)

    kernels = gpu_kernels(build)
    assert len(kernels) == 1, kernels


def test_builder_in_a_graph_follows_its_inputs():
    requests, query_len, width = 5, 3, 40
    owner = qsa.QSAMetadataBuilder(
        64, 8, storage_block_size=4, compress_ratio=RATIO, num_speculative_tokens=2, device="cuda"
    )
    tokens = requests * query_len + 4
    starts = torch.zeros(requests + 1, dtype=torch.int32, device="cuda")
    lens = torch.zeros(requests, dtype=torch.int32, device="cuda")
    slots = torch.zeros(tokens, dtype=torch.int64, device="cuda")
    table = torch.zeros(requests, width, dtype=torch.int32, device="cuda")

    def build():
        return owner.build(
            starts,
            lens,
            slots,
            table,
            query_lens=[query_len] * requests,
            host_seq_lens=[width * 16] * requests,
            num_tokens=tokens,
        )

    build()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        batch = build()
    assert (batch.num_decodes, batch.decode_query_len, batch.max_seq_len) == (requests, query_len, width * 16)
    for seed in range(12):
        case = random_batch(seed, ratio=RATIO, storage_block_size=4, max_requests=requests)
        query_lens = [min(n, query_len) for n in case.query_lens] + [0] * (requests - len(case.query_lens))
        seq_lens = [*case.seq_lens, *[0] * (requests - len(case.seq_lens))]
        rows = [(row + [-1] * width)[:width] for row in case.block_table] + [[-1] * width] * requests
        common = [(17 * i) % 5 - 1 for i in range(tokens)]
        actual = type(case)(query_lens, seq_lens, common, rows[:requests], tokens)
        for target, value in zip((starts, lens, slots, table), actual.tensors("cpu"), strict=True):
            target.copy_(value)
        graph.replay()
        want = loop_metadata(
            actual,
            storage_block_size=4,
            compress_ratio=RATIO,
            circular_buffer_size=0,
            max_k_work=batch.tensors.k_work.shape[0],
        )
        for name, value in want.items():
            assert getattr(batch.tensors, name).tolist() == value, (seed, name)


class DecodeShape:
    """Decode rows over long contexts in buffers of a fixed address, with guards behind the scores."""

    GUARD = 64

    def __init__(self, requests: int, rows: int, tokens: int) -> None:
        self.requests, self.rows, self.tokens = requests, rows, tokens
        self.columns = tokens // RATIO
        pages = self.columns // PAGE
        self.num_pages = requests * pages + 5
        self.q = torch.empty(rows, 4, 128, dtype=torch.float16, device="cuda")
        self.keys = torch.empty(self.num_pages, PAGE, 128, dtype=torch.float16, device="cuda")
        self.table = torch.empty(requests, pages, dtype=torch.int32, device="cuda")
        self.token_to_req = torch.empty(rows, dtype=torch.int32, device="cuda")
        self.positions = torch.empty(rows, dtype=torch.int64, device="cuda")
        self.seq_lens = torch.empty(requests, dtype=torch.int32, device="cuda")
        self.visible = torch.empty(rows, dtype=torch.int32, device="cuda")
        self.guarded = [torch.empty(rows, self.columns + self.GUARD, device="cuda") for _ in range(2)]
        self.refresh(0)

    @property
    def scorer_args(self) -> tuple[torch.Tensor, ...]:
        return self.q, self.keys, self.table, self.token_to_req, self.visible

    @property
    def select_args(self) -> tuple[torch.Tensor, ...]:
        return self.q, self.keys, self.table, self.token_to_req, self.positions, self.seq_lens

    def refresh(self, seed: int) -> None:
        """New queries, keys, page tables, positions, lengths and runs of rows, padding rows among them."""
        g = torch.Generator().manual_seed(seed)
        device_g = torch.Generator("cuda").manual_seed(seed)
        self.q.normal_(generator=device_g)
        self.keys.normal_(generator=device_g)
        table = torch.randperm(self.num_pages, generator=g)[: self.table.numel()].int().view_as(self.table)
        table[0, 3] = self.num_pages if seed % 2 else -1
        self.table.copy_(table)
        lens = self.tokens - torch.randint(0, 200, (self.requests,), generator=g)
        lens[-1] = self.tokens
        if seed == 2:
            lens[0] = 5000
        self.seq_lens.copy_(lens)
        if seed % 3 == 1:
            cuts = torch.randint(0, self.rows + 1, (self.requests - 1,), generator=g).sort().values
            counts = torch.cat([cuts, torch.tensor([self.rows])]).diff(prepend=torch.tensor([0])).tolist()
        else:
            counts = [self.rows // self.requests] * self.requests
        pairs = [(i, int(lens[i]) - n + j) for i, n in enumerate(counts) for j in range(n)]
        if seed % 3 == 2:
            pairs[-3:] = [(0, -1)] * 3
        self.token_to_req.copy_(torch.tensor([i for i, _ in pairs]))
        self.positions.copy_(torch.tensor([p for _, p in pairs]))
        self.visible.copy_(selection_torch.visible_blocks(self.token_to_req, self.positions, self.seq_lens, RATIO))
        for out in self.guarded:
            out.fill_(123.0)

    def score(self, segment: int) -> None:
        out = [guarded[:, : self.columns] for guarded in self.guarded]
        qsa.score_paged(*self.scorer_args, out=out[0])
        qsa.score_request_segments(*self.scorer_args, max_segment=segment, out=out[1])

    def assert_scores_agree(self) -> None:
        """Words equal, and nothing written in unseen columns or behind them."""
        words = [out.view(torch.int32) for out in self.guarded]
        assert torch.equal(*words)
        unseen = torch.arange(self.columns + self.GUARD, device="cuda") >= self.visible.unsqueeze(1)
        assert bool((self.guarded[0][unseen] == 123.0).all())
        assert not bool((self.guarded[0][~unseen] == 123.0).any())


@pytest.mark.parametrize("segment", [1, 2, 4])
@pytest.mark.parametrize("tokens", [32_768, 131_072, 262_144])
@pytest.mark.parametrize(("requests", "rows"), [(1, 8), (4, 16), (4, 20), (8, 40)])
def test_segments_give_the_words_of_the_paged_scorer(requests, rows, tokens, segment):
    shape = DecodeShape(requests, rows, tokens)
    shape.score(segment)
    shape.assert_scores_agree()
    sample = shape.visible[:1].clamp(max=400)
    got = qsa.score_paged(shape.q[:1], shape.keys, shape.table, shape.token_to_req[:1], sample)[0, : int(sample)]
    want = torch.empty(1, shape.columns, device="cuda")
    scoring_torch.score(shape.q[:1], shape.keys, shape.table, shape.token_to_req[:1], sample, 128**-0.5, want)
    torch.testing.assert_close(got, want[0, : len(got)], rtol=1e-5, atol=1e-5)

    def select():
        settings = {"compress_ratio": RATIO, "max_segment": segment, "return_report": True}
        segmented = "auto" if requests == 1 else True
        return [qsa.select_tokens(*shape.select_args, request_segments=s, **settings) for s in (False, segmented)]

    def assert_selections_agree(results):
        (paged, paged_report), (segmented, report) = results
        assert torch.equal(paged, segmented)
        assert torch.equal(paged_report.visible_blocks, shape.visible)
        assert torch.equal(report.visible_blocks, shape.visible)
        assert report.scorer == ("paged" if requests == 1 else "request_segments")

    assert_selections_agree(select())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        shape.score(segment)
        captured = select()
    for seed in (1, 2, 3):
        shape.refresh(seed)
        graph.replay()
        shape.assert_scores_agree()
        assert_selections_agree(captured)
        eager = qsa.select_tokens(*shape.select_args, compress_ratio=RATIO, request_segments=False)
        assert torch.equal(eager, captured[0][0])


SHAPES = [
    *[("decode", [n] * r, [s] * r, {}) for r, n, s in ((2, 2, 900), (4, 4, 3000), (8, 5, 2100), (3, 8, 2500))],
    *[("decode", [n] * r, [s] * r, {}) for r, n, s in ((16, 2, 2200), (5, 3, 40), (2, 128, 4000))],
    *[("one row a request", [1] * r, [s] * r, {}) for r, s in ((1, 3000), (4, 2300), (16, 2100), (33, 100))],
    *[("ragged", n, s, {}) for n, s in (([1, 5, 2], [2300, 90, 3000]), ([7, 0, 3, 1], [2300, 50, 8, 2200]))],
    *[("ragged", n, s, {}) for n, s in (([17, 2], [5000, 2100]), ([4, 4, 1, 1, 9], [2500, 2600, 2700, 2800, 2900]))],
    *[("prefill, split unknown", [4, 4, n], [2300, 2500, s], {}) for n, s in ((300, 2400), (60, 2400), (512, 512))],
    *[
        ("prefill, split known", [4, 4, n], [2300, 2500, s], {"num_decodes": 2, "num_decode_tokens": 8})
        for n, s in ((300, 2400), (60, 2400), (512, 512))
    ],
    ("prefill, split known", [1, 1, 90], [2300, 2500, 2100], {"num_decodes": 2, "num_decode_tokens": 2}),
    *[("chunks", [4] * 4, [3000] * 4, {"workspace_bytes": b}) for b in (1, 150_000, 260_000)],
    *[("padding", [4] * 3, [2400] * 3, {"num_padding_tokens": p}) for p in (1, 5, 12)],
    ("padding unknown", [2, 2], [2400, 2500], {}),
    ("single request", [6], [2600], {}),
    ("prefill alone", [200], [2600], {}),
]


@pytest.mark.parametrize("index", range(len(SHAPES)), ids=lambda i: f"{i}-{SHAPES[i][0]}")
def test_selection_does_not_depend_on_the_route(index):
    _, query_lens, seq_lens, arguments = SHAPES[index]
    padding = arguments.get("num_padding_tokens", 4 if SHAPES[index][0] == "padding unknown" else 0)
    case = select_case(index, query_lens, seq_lens, padding=padding, storage_block_size=PAGE)
    args = case.args("cuda")
    settings = {"compress_ratio": RATIO, "top_k": 512, "return_report": True} | arguments
    want, off = qsa.select_tokens(*args, request_segments=False, **settings)
    got, report = qsa.select_tokens(*args, request_segments="auto", **settings)
    assert torch.equal(got, want)
    assert report.visible_blocks.tolist() == case.visible
    assert off.scorer in ("paged", "none")
    if report.scorer == "paged":
        with pytest.raises(UnsupportedError, match="request_segments=True is not supported here"):
            qsa.select_tokens(*args, request_segments=True, **settings)
    else:
        assert torch.equal(qsa.select_tokens(*args, request_segments=True, **settings)[0], want)
    # A part of the rows by the definition; the rest by torch.
    cpu = qsa.select_tokens(*case.args("cpu"), compress_ratio=RATIO, top_k=512)
    assert torch.equal(got.cpu(), cpu)


@pytest.mark.parametrize("heads", [1, 3, 4, 8, 20])
@pytest.mark.parametrize(("ratio", "top_k", "holes"), [(4, 6, True), (3, 17, False), (1, 30, False), (8, 100, True)])
def test_selection_by_the_definition(heads, ratio, top_k, holes):
    case = select_case(ratio, [3, 2, 0, 1], [700, 40, 9, 77], ratio=ratio, holes=holes, padding=2, heads=heads)
    args = case.args("cuda")
    visible = torch.tensor(case.visible, dtype=torch.int32, device="cuda")
    scores = qsa.score_paged(*args[:4], visible)
    for row, want in zip(scores.tolist(), exact_scores(case), strict=True):
        assert row[: len(want)] == want
    assert qsa.select_tokens(*args, compress_ratio=ratio, top_k=top_k).tolist() == loop_select(case, top_k)


@pytest.mark.parametrize(
    ("queries", "keys"),
    [
        (torch.float16, torch.float16),
        (torch.float16, torch.float8_e4m3fn),
        (torch.bfloat16, torch.bfloat16),
        (torch.bfloat16, torch.float8_e4m3fn),
    ],
)
def test_dtype_pairs(queries, keys):
    case = select_case(2, [4, 3], [400, 600])
    args = list(case.args("cuda"))
    args[0], args[1] = args[0].to(queries), args[1].to(keys)
    assert qsa.select_tokens(*args, compress_ratio=4, top_k=20).tolist() == loop_select(case, 20)
    visible = torch.tensor(case.visible, dtype=torch.int32, device="cuda")
    paged = qsa.score_paged(*args[:4], visible)
    for segment in (2, 4):
        segmented = qsa.score_request_segments(*args[:4], visible, max_segment=segment)
        assert score_words(segmented, case.visible) == score_words(paged, case.visible)


def test_every_e4m3_code_is_scored_as_its_value():
    codes = torch.arange(256, dtype=torch.uint8, device="cuda")
    keys = torch.zeros(16, PAGE, 128, dtype=torch.uint8, device="cuda")
    keys.view(256, 128)[:, 0] = codes
    keys = keys.view(torch.float8_e4m3fn)
    q = torch.zeros(2, 4, 128, dtype=torch.float16, device="cuda")
    q[0, 0, 0], q[1, 0, 0] = 1.0, -1.0
    table = torch.arange(16, dtype=torch.int32, device="cuda").view(1, 16)
    rows = torch.zeros(2, dtype=torch.int32, device="cuda")
    got = qsa.score_paged(q, keys, table, rows, rows + 256, scale=1.0)
    values = codes.view(torch.float8_e4m3fn).float()
    want = torch.stack([values.clamp(min=0), (-values).clamp(min=0)])
    torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)


def test_a_cache_past_2_to_the_31_elements():
    pages = 2**31 // (PAGE * 128) + 70
    keys = torch.empty(pages, PAGE, 128, dtype=torch.float16, device="cuda")
    table = torch.arange(pages - 64, pages, dtype=torch.int32, device="cuda").view(2, 32)
    table[0, 5], table[1, 6] = pages, 2**31 - 1
    keys[-64:].normal_(generator=torch.Generator("cuda").manual_seed(0))
    q = torch.randn(8, 4, 128, device="cuda", generator=torch.Generator("cuda").manual_seed(1)).half()
    rows = torch.tensor([0] * 4 + [1] * 4, dtype=torch.int32, device="cuda")
    visible = torch.full((8,), 512, dtype=torch.int32, device="cuda")
    near = keys[-64:].clone()
    near_table = torch.where(table < pages, table - (pages - 64), -1)
    want = qsa.score_paged(q, near, near_table, rows, visible)
    assert int(want.isneginf().sum()) == 8 * PAGE
    assert torch.equal(qsa.score_paged(q, keys, table, rows, visible), want)
    assert torch.equal(qsa.score_request_segments(q, keys, table, rows, visible), want)
    reference = torch.empty_like(want)
    scoring_torch.score(q, near, near_table, rows, visible, 128**-0.5, reference)
    torch.testing.assert_close(want, reference, rtol=1e-5, atol=1e-5)


def test_selection_waits_for_nothing():
    case = select_case(1, [4, 4], [2400, 2500])
    args = case.args("cuda")
    want = qsa.select_tokens(*args, compress_ratio=RATIO)
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        got = qsa.select_tokens(*args, compress_ratio=RATIO)
    finally:
        torch.cuda.set_sync_debug_mode(before)
    assert torch.equal(got, want)


@pytest.mark.parametrize(("cache_positions", "cache_dtype"), list(itertools.product([True, False], ["auto", "fp8"])))
def test_a_layer_equals_its_dense_recomputation(cache_positions, cache_dtype):
    for seed in range(2):
        run_layer(seed, "cuda", cache_positions=cache_positions, cache_dtype=cache_dtype)
