"""DSA and the shared top-k on a GPU: against the loops, against the torch version at full width, and captured."""

from __future__ import annotations

import math

import pytest
import torch
from dsa_cases import check_case, random_case, same_bits
from topk_cases import check_topk, random_scores

from tpoverlap.attention import dsa
from tpoverlap.attention.dsa import torch_backend
from tpoverlap.attention.topk import topk_indices, topk_torch

pytestmark = pytest.mark.gpu

WIDE = 1 << 20


def fill_special(logits: torch.Tensor, seed: int) -> None:
    """Normal values, ties among them, with NaN, infinities and both zeros."""
    g = torch.Generator(logits.device).manual_seed(seed)
    logits.normal_(generator=g)
    kind = torch.rand(logits.shape, generator=g, device=logits.device)
    for low, high, value in (
        (0, 1e-4, math.nan),
        (1e-4, 3e-4, math.inf),
        (3e-4, 0.1, -math.inf),
        (0.1, 0.15, -0.0),
        (0.15, 0.2, 0.0),
        (0.2, 0.5, 1.5),
    ):
        logits.masked_fill_((kind >= low) & (kind < high), value)


def assert_as_torch(logits, starts, ends, num_blocks, block_size, row_repeat):
    """The three functions on the GPU equal the torch versions there; the mask to the bit, also past every end."""
    args = (starts, ends)
    scores = dsa.block_scores(logits, *args, block_size, row_repeat=row_repeat)
    want_scores = torch_backend.block_scores(logits, *args, block_size, row_repeat)
    torch.testing.assert_close(scores, want_scores, rtol=0, atol=0, equal_nan=True)
    candidates = dsa.select_candidate_blocks(logits, *args, num_blocks, block_size, row_repeat=row_repeat)
    lengths = torch.full(scores.shape[:1], scores.shape[1], dtype=torch.int32, device="cuda")
    want = topk_torch(want_scores, lengths, num_blocks, order="score", skip_neg_inf=True)
    assert torch.equal(candidates, want)
    expected = logits.clone()
    torch_backend.apply_candidate_mask(expected, *args, candidates, block_size, row_repeat)
    dsa.apply_candidate_mask(logits, *args, candidates, block_size, row_repeat=row_repeat)
    assert same_bits(logits, expected)


@pytest.mark.parametrize("values", ["normal", "ties", "special"])
@pytest.mark.parametrize("width", [73, 97, 3000])
@pytest.mark.parametrize("block_size", [3, 8, 16])
@pytest.mark.parametrize("row_repeat", [1, 4])
@pytest.mark.parametrize("strided", [False, True])
def test_by_the_definition(values, width, block_size, row_repeat, strided):
    case = random_case(
        width * block_size + row_repeat,
        rows=8,
        width=width,
        block_size=block_size,
        num_blocks=21,
        row_repeat=row_repeat,
        values=values,
    )
    check_case(case, "cuda", strided=strided, bounds_dtype=torch.int64 if strided else torch.int32)


@pytest.mark.parametrize("block_size", [3, 8, 16, 128])
@pytest.mark.parametrize("with_starts", [False, True])
def test_a_million_columns(block_size, with_starts):
    ends = torch.tensor(
        [0, 1, 9, 300, 1025, 131072, WIDE - 3, WIDE, WIDE + 20, 70_001], dtype=torch.int32, device="cuda"
    )
    starts = torch.tensor([0, 0, 9, 5, 1000, 17, 3, 70_000, 900_000, 70_002], dtype=torch.int32, device="cuda")
    logits = torch.empty(len(ends), WIDE, device="cuda")
    fill_special(logits, block_size)
    assert_as_torch(logits, starts if with_starts else None, ends, 2048, block_size, 1)


def test_odd_width_and_strides():
    storage = torch.empty(6, 3 * 50_021, device="cuda")
    fill_special(storage, 1)
    logits = storage[:, 1::3]
    before = storage.clone()
    ends = torch.tensor([50_021, 20_000], dtype=torch.int64, device="cuda")
    assert_as_torch(logits, None, ends, 700, 8, 3)
    for column in (0, 2):
        assert same_bits(storage[:, column::3], before[:, column::3])


def test_one_graph_serves_every_length():
    rows, width, size, count = 6, WIDE, 8, 2048
    logits = torch.empty(rows, width, device="cuda")
    ends = torch.zeros(rows // 2, dtype=torch.int32, device="cuda")
    starts = torch.zeros_like(ends)
    args = (logits, starts, ends)

    def step():
        scores = dsa.block_scores(*args, size, row_repeat=2)
        candidates = dsa.select_candidate_blocks(*args, count, size, row_repeat=2)
        dsa.apply_candidate_mask(*args, candidates, size, row_repeat=2)
        return scores, candidates

    fill_special(logits, 0)
    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        scores, candidates = step()
    lengths = [[0, 1, 7], [8, 9, 511], [1024, 1025, 8191], [131072, 999_999, width], [width + 5, width + 900, 3]]
    for seed, chosen in enumerate([*lengths, [0, 0, 0], lengths[3]]):
        fill_special(logits, seed)
        ends.copy_(torch.tensor(chosen))
        starts.copy_(ends * (seed % 2) // 3)
        expected = logits.clone()
        graph.replay()
        want = torch_backend.block_scores(expected, starts, ends, size, 2)
        torch.testing.assert_close(scores, want, rtol=0, atol=0, equal_nan=True)
        all_blocks = torch.full((rows,), want.shape[1], dtype=torch.int32, device="cuda")
        assert torch.equal(candidates, topk_torch(want, all_blocks, count, order="score", skip_neg_inf=True))
        torch_backend.apply_candidate_mask(expected, starts, ends, candidates, size, 2)
        assert same_bits(logits, expected)


def test_offsets_past_2_to_the_31():
    width = 5000
    storage = torch.empty(2**31 + 4096 + width, device="cuda")
    logits = storage.as_strided((2, width), (2**31 + 4096, 1))
    fill_special(logits, 3)
    guard = storage[width : width + 100].fill_(3.0)
    ends = torch.tensor([4000, 4990], dtype=torch.int32, device="cuda")
    assert_as_torch(logits, None, ends, 50, 8, 1)
    assert bool((guard == 3.0).all())


@pytest.mark.parametrize("values", ["normal", "ties", "equal", "special", "descending"])
@pytest.mark.parametrize(
    ("width", "k"), [(100, 2048), (5000, 2048), (20_000, 2048), (9000, 512), (3000, 37), (9000, 4096)]
)
@pytest.mark.parametrize("order", ["score", "index"])
def test_topk_by_the_definition(values, width, k, order):
    check_topk(width + k, "cuda", rows=4, width=width, k=k, values=values, order=order, skip_neg_inf=order == "score")


@pytest.mark.parametrize("values", ["normal", "ties", "equal", "special", "descending"])
@pytest.mark.parametrize(("rows", "width", "k"), [(40, 65_536, 512), (3, 131_072, 2048), (2, 1_000_003, 2048)])
def test_topk_of_long_rows(values, rows, width, k):
    scores = random_scores(width, rows, width, values).cuda()
    lengths = torch.randint(0, width + 1, (rows,), generator=torch.Generator().manual_seed(k)).int()
    lengths[0] = width
    lengths = lengths.cuda()
    for order in ("score", "index"):
        want = topk_torch(scores, lengths, k, order=order, skip_neg_inf=False)
        for _ in range(3):
            assert torch.equal(topk_indices(scores, lengths, k, order=order), want)


def test_no_call_waits_for_the_gpu():
    logits = torch.randn(4, 20_000, device="cuda")
    ends = torch.tensor([5, 100, 20_000, 7], dtype=torch.int32, device="cuda")
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        candidates = dsa.select_candidate_blocks(logits, None, ends, 64, 8)
        dsa.apply_candidate_mask(logits, None, ends, candidates, 8)
    finally:
        torch.cuda.set_sync_debug_mode(before)
