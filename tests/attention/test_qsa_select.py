"""QSA scores and selection in torch on the CPU: against loops, independence of how the work is cut, and the checks."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from qsa_cases import exact_scores, loop_select, score_words, select_case

from tpoverlap.attention import qsa
from tpoverlap.errors import UnsupportedError


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    batch=st.lists(st.tuples(st.integers(0, 6), st.integers(0, 60)), min_size=1, max_size=4),
    ratio=st.integers(1, 8),
    storage_block_size=st.sampled_from([1, 4, 8]),
    heads=st.sampled_from([1, 3, 4, 8]),
    top_k=st.sampled_from([1, 3, 12, 40]),
    padding=st.integers(0, 3),
    padding_request=st.sampled_from([0, -1]),
    holes=st.booleans(),
    extra_width=st.sampled_from([-2, 0, 1]),
)
def test_torch_version_follows_the_definition(seed, batch, top_k, extra_width, **options):
    query_lens = [n for n, _ in batch]
    seq_lens = [n + prefix for n, prefix in batch]
    case = select_case(seed, query_lens, seq_lens, extra_width=extra_width, **options)
    args = case.args("cpu")
    visible = torch.tensor(case.visible, dtype=torch.int32)
    want = exact_scores(case)
    scores = qsa.score_paged(*args[:4], visible)
    for row, expected in zip(scores.tolist(), want, strict=True):
        assert row[: len(expected)] == expected
    got, report = qsa.select_tokens(*args, compress_ratio=case.compress_ratio, top_k=top_k, return_report=True)
    assert got.tolist() == loop_select(case, top_k)
    assert report.visible_blocks.tolist() == case.visible
    small = qsa.select_tokens(*args, compress_ratio=case.compress_ratio, top_k=top_k, workspace_bytes=1)
    assert torch.equal(small, got)


def test_unseen_columns_keep_their_bytes():
    case = select_case(1, [3, 2], [50, 21], padding=2)
    visible = torch.tensor(case.visible, dtype=torch.int32)
    args = case.args("cpu")[:4]
    for scorer in (qsa.score_paged, qsa.score_request_segments):
        out = torch.full((7, args[2].shape[1] * 8), 5.0)
        assert scorer(*args, visible, out=out) is out
        for row, n in zip(out, case.visible, strict=True):
            assert bool((row[n:] == 5.0).all())
    assert score_words(out, case.visible) == score_words(qsa.score_paged(*args, visible), case.visible)


@pytest.mark.parametrize("keys", [torch.float8_e4m3fn, torch.bfloat16])
@pytest.mark.parametrize("queries", [torch.float16, torch.bfloat16])
def test_dtype_pairs(queries, keys):
    case = select_case(2, [2, 3], [40, 60])
    args = list(case.args("cpu"))
    args[0], args[1] = args[0].to(queries), args[1].to(keys)
    call = lambda: qsa.select_tokens(*args, compress_ratio=4, top_k=4)  # noqa: E731
    if (queries, keys) == (torch.float16, torch.bfloat16):
        with pytest.raises(ValueError, match=r"supported are torch.float16 with torch.float16 or torch.float8_e4m3fn"):
            call()
    else:
        assert call().tolist() == loop_select(case, 4)


DECODES = ([4] * 4, [200] * 4)
ROUTES = {
    "decode batch": (DECODES, {}, {}, "request_segments", "share"),
    "switched off": (DECODES, {}, {"request_segments": False}, "paged", "request_segments=False"),
    "one request": (([4], [200]), {}, {}, "paged", "two requests"),
    "one row a request": (([1] * 6, [200] * 6), {}, {}, "paged", "two unpadded rows"),
    "ragged": (([1, 5, 3], [90, 200, 120]), {}, {}, "request_segments", "share"),
    "padding": (([2, 2], [200, 90]), {"padding": 1}, {"num_padding_tokens": 1}, "request_segments", "share"),
    "mostly padding": (([1, 1], [200, 90]), {"padding": 6}, {"num_padding_tokens": 6}, "paged", "two unpadded rows"),
    "eight heads": (DECODES, {"heads": 8}, {}, "paged", "4 heads"),
    "several chunks": (DECODES, {}, {"workspace_bytes": 60_000}, "request_segments", "share"),
    "long chunk": (([150, 150], [200, 200]), {}, {}, "paged", "at most 256 rows"),
    "prefill, split unknown": (([4, 4, 300], [200, 90, 300]), {}, {}, "paged", "at most 256 rows"),
    "prefill, split known": (
        ([4, 4, 300], [200, 90, 300]),
        {},
        {"num_decodes": 2, "num_decode_tokens": 8},
        "request_segments + paged",
        "share",
    ),
    "nothing to rank": (DECODES, {}, {"top_k": 512}, "none", "all are listed"),
}


@pytest.mark.parametrize("name", ROUTES)
def test_routes_are_reported_and_do_not_change_the_selection(name):
    batch, options, arguments, scorer, reason = ROUTES[name]
    case = select_case(3, *batch, **options)
    args, arguments = case.args("cpu"), {"top_k": 6, "compress_ratio": 4} | arguments
    got, report = qsa.select_tokens(*args, return_report=True, **arguments)
    assert report.scorer == scorer
    assert reason in report.reason
    assert (report.chunks > 1) == (name in ("several chunks", "prefill, split known"))
    plain = qsa.select_tokens(*args, **arguments | {"request_segments": False})
    assert torch.equal(got, plain)
    forced = arguments | {"request_segments": True}
    if scorer.startswith("request_segments") or scorer == "none" or name == "switched off":
        assert torch.equal(qsa.select_tokens(*args, **forced), plain)
    else:
        with pytest.raises(UnsupportedError, match=f"request_segments=True is not supported here: .*{reason}"):
            qsa.select_tokens(*args, **forced)


@pytest.mark.parametrize("segments", [True, "auto"])
def test_a_batch_without_rows(segments):
    case = select_case(4, [0, 0], [200, 90])
    got, report = qsa.select_tokens(
        *case.args("cpu"), compress_ratio=4, top_k=6, request_segments=segments, return_report=True
    )
    assert got.shape == (0, 27)
    assert (report.scorer, report.reason, report.chunks) == ("none", "there are no rows", 0)


@pytest.mark.parametrize("request_id", [-1, 2])
def test_rows_of_no_request_are_refused(request_id):
    case = select_case(4, [2, 2], [200, 90])
    q, keys, table, request, position, lens = case.args("cpu")
    visible = torch.tensor(case.visible, dtype=torch.int32)
    request[3] = request_id
    message = f"token_to_req must be from 0 to 1, got {request_id} for row 3"
    for scorer in (qsa.score_paged, qsa.score_request_segments):
        with pytest.raises(ValueError, match=message):
            scorer(q, keys, table, request, visible)
        visible[3] = 0
        scorer(q, keys, table, request, visible)
        visible[3] = 10
    with pytest.raises(ValueError, match=message):
        qsa.select_tokens(q, keys, table, request, position, lens, compress_ratio=4, top_k=6)


def test_int64_indices_keep_the_paged_scorer():
    case = select_case(4, *DECODES)
    q, keys, table, request, position, lens = case.args("cpu")
    plain = qsa.select_tokens(q, keys, table, request, position, lens, compress_ratio=4, top_k=6)
    for wide in ((table.long(), request, lens), (table, request.long(), lens), (table, request, lens.long())):
        got, report = qsa.select_tokens(
            q, keys, wide[0], wide[1], position, wide[2], compress_ratio=4, top_k=6, return_report=True
        )
        assert torch.equal(got, plain)
        assert (report.scorer, "int32" in report.reason) == ("paged", True)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": torch.zeros(8, 4, 64, dtype=torch.float16)}, r"q must be \[tokens, heads, 128\]"),
        ({"q": torch.zeros(8, 4, 128)}, "q and key_cache of dtypes torch.float32"),
        ({"key_cache": torch.zeros(4, 8, 64, dtype=torch.float16)}, r"key_cache must be \[blocks, rows, 128\]"),
        ({"block_table": torch.zeros(2, dtype=torch.int32)}, r"block_table must be \[requests, width\]"),
        ({"token_to_req": torch.zeros(7, dtype=torch.int32)}, r"token_to_req must be \[8\]"),
        ({"token_to_req": torch.zeros(8)}, "token_to_req must be int32 or int64"),
        ({"logical_positions": torch.zeros(7)}, r"logical_positions must be int32 or int64 \[8\]"),
        ({"seq_lens": torch.zeros(3, dtype=torch.int32)}, r"seq_lens must be int32 or int64 \[2\]"),
        ({"visible_blocks": torch.zeros(7, dtype=torch.int32)}, r"visible_blocks must be \[8\], a row of q each"),
        ({"visible_blocks": torch.zeros(8)}, "visible_blocks must be int32 or int64, got torch.float32"),
        (
            {"visible_blocks": torch.zeros(8, dtype=torch.int32, device="meta")},
            "visible_blocks must be on the device of q, cpu, got meta",
        ),
        ({"request_segments": 1}, "request_segments must be 'auto', True or False, got 1"),
        ({"scale": float("nan")}, "scale must be None"),
        ({"top_k": 0}, "top_k must be an int of at least 1"),
        ({"compress_ratio": 0}, "compress_ratio must be an int of at least 1"),
        ({"max_segment": 3}, "max_segment must be one of"),
        ({"request_segments": "yes"}, "request_segments must be 'auto', True or False"),
        ({"num_decodes": 1}, "num_decodes and num_decode_tokens together"),
        ({"num_decodes": 3, "num_decode_tokens": 4}, "num_decodes must be from 0 to 2"),
        ({"num_padding_tokens": 9}, "num_padding_tokens must be from 0 to 8"),
        ({"out": torch.zeros(8, 7, dtype=torch.int32)}, r"out must be int32 \[8, 19\]"),
    ],
)
def test_wrong_arguments_say_what_is_expected(change, message):
    case = select_case(5, [4, 4], [60, 70])
    names = ("q", "key_cache", "block_table", "token_to_req", "logical_positions", "seq_lens")
    arguments = dict(zip(names, case.args("cpu"), strict=True)) | {"compress_ratio": 4, "top_k": 4}
    with pytest.raises(ValueError, match=message):
        qsa.select_tokens(**(arguments | change))


def test_segments_say_what_they_need():
    case = select_case(6, [2, 2], [40, 40], heads=8)
    visible = torch.tensor(case.visible, dtype=torch.int32)
    with pytest.raises(UnsupportedError, match="4 heads of 128, q has 8"):
        qsa.score_request_segments(*case.args("cpu")[:4], visible)
    with pytest.raises(ValueError, match="max_segment must be one of"):
        qsa.score_request_segments(*case.args("cpu")[:4], visible, max_segment=8)
    with pytest.raises(ValueError, match=r"out must be float32 \[4, "):
        qsa.score_paged(*case.args("cpu")[:4], visible, out=torch.zeros(4, 3))
