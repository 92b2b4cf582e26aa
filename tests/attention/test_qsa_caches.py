"""QSA side caches, compressed keys, the metadata builder, and a layer that uses them all, on the CPU."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from qsa_layer import run_layer

from tpoverlap.attention import qsa
from tpoverlap.errors import UnsupportedError


@pytest.mark.parametrize(("cache_positions", "cache_dtype"), [(True, "auto"), (False, "bfloat16"), (False, "fp8")])
@pytest.mark.parametrize("seed", range(4))
def test_a_layer_equals_its_dense_recomputation(seed, cache_positions, cache_dtype):
    run_layer(seed, "cpu", cache_positions=cache_positions, cache_dtype=cache_dtype)


@pytest.mark.parametrize(
    ("ratio", "drafts", "capacity"), [(4, 0, 4), (4, 1, 8), (4, 4, 8), (2, 3, 6), (8, 8, 16), (1, 3, 4)]
)
def test_ring_capacity(ratio, drafts, capacity):
    cache = qsa.KeyStateCache(128, ratio, 48, num_speculative_tokens=drafts)
    assert cache.capacity == capacity
    assert cache.storage_shape(5) == (5, 1, capacity, 128)


def test_positions_lie_behind_the_key():
    cache = qsa.KeyStateCache(130, 4, 16, cache_rope_positions=True)
    assert cache.storage_shape(3) == (3, 1, 4, 132 + 12)
    storage = torch.zeros(cache.storage_shape(3), dtype=torch.bfloat16)
    cache.bind(storage)
    positions = cache.rope_position_cache
    assert positions.shape == (3, 4, 3)
    positions[2, 1] = torch.tensor([2**40 + 1, -7, 3])
    cache.key_cache[2, 1] = 1.0
    row = storage[2, 0, 1]
    assert row[132:].view(torch.int64).tolist() == [2**40 + 1, -7, 3]
    assert row[:132].tolist() == [1.0] * 130 + [0.0] * 2
    assert storage.count_nonzero() == row.count_nonzero()
    plain = qsa.KeyStateCache(130, 4, 16)
    plain.bind(torch.zeros(plain.storage_shape(2), dtype=torch.bfloat16))
    assert plain.rope_position_cache is None
    assert plain.key_cache.shape == (2, 4, 130)


def test_dropping_the_storage_frees_it():
    cache = qsa.CompressedKeyCache(128, 4, 16)
    storage = torch.zeros(cache.storage_shape(3), dtype=torch.bfloat16)
    cache.bind(storage)
    assert cache.storage.shape == (3, 4, 1, 128)
    assert cache.key_cache.data_ptr() == storage.data_ptr()
    alive = weakref.ref(storage.untyped_storage())
    cache.unbind()
    del storage
    gc.collect()
    assert alive() is None
    with pytest.raises(ValueError, match=r"CompressedKeyCache has no storage: call bind\(\)"):
        _ = cache.key_cache


@pytest.mark.parametrize("cache_dtype", ["auto", "bfloat16", "fp8", "fp8_e4m3"])
def test_cache_dtypes(cache_dtype):
    e4m3 = cache_dtype.startswith("fp8")
    compressed = qsa.CompressedKeyCache(128, 4, 16, cache_dtype=cache_dtype)
    assert compressed.dtype == (torch.float8_e4m3fn if e4m3 else torch.bfloat16)
    assert qsa.KeyStateCache(128, 4, 16, cache_dtype=cache_dtype).dtype == torch.bfloat16


def test_a_refused_storage_leaves_the_one_that_was_bound():
    cache = qsa.KeyStateCache(128, 4, 16, cache_rope_positions=True)
    shape = cache.storage_shape(3)
    storage = torch.zeros(shape, dtype=torch.bfloat16)
    cache.bind(storage)
    odd_rows = torch.zeros(*shape[:3], shape[3] + 1, dtype=torch.bfloat16)[..., :-1]
    with pytest.raises(ValueError, match=r"rows are aligned to 8 bytes, got strides \(564, 564, 141, 1\)"):
        cache.bind(odd_rows)
    spaced_rows = torch.zeros(*shape[:3], 2 * shape[3], dtype=torch.bfloat16)[..., ::2]
    with pytest.raises(ValueError, match="with contiguous rows, got strides"):
        cache.bind(spaced_rows)
    assert cache.key_cache.data_ptr() == storage.data_ptr()
    plain = qsa.KeyStateCache(128, 4, 16)
    plain.bind(odd_rows[..., :128])
    assert plain.key_cache.shape == (3, 4, 128)


def bind(cache, shape, dtype=torch.bfloat16):
    cache.bind(torch.zeros(shape, dtype=dtype))


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: qsa.KeyStateCache(0, 4, 16), ValueError, "head_size must be a positive int, got 0"),
        (lambda: qsa.KeyStateCache(128, -1, 16), ValueError, "compress_ratio must be a positive int, got -1"),
        (lambda: qsa.CompressedKeyCache(128, 4, 0), ValueError, "block_size must be a positive int, got 0"),
        (
            lambda: qsa.CompressedKeyCache(128, 3, 16),
            ValueError,
            "block_size 16 must be a multiple of compress_ratio 3",
        ),
        (
            lambda: qsa.KeyStateCache(128, 4, 16, num_speculative_tokens=5),
            ValueError,
            "needs 12 rows .* must divide block_size 16",
        ),
        (
            lambda: qsa.KeyStateCache(128, 4, 16, num_speculative_tokens=-1),
            ValueError,
            "num_speculative_tokens must be",
        ),
        (lambda: qsa.CompressedKeyCache(128, 4, 16, cache_dtype="int8"), ValueError, "cache_dtype must be one of auto"),
        (
            lambda: qsa.CompressedKeyCache(128, 4, 16, decode_context_parallel_size=2),
            UnsupportedError,
            "decode_context_parallel_size must be 1",
        ),
        (
            lambda: qsa.CompressedKeyCache(128, 4, 16, layer_name="a", layers={"a": None}),
            ValueError,
            "layer name 'a' is taken",
        ),
        (
            lambda: qsa.CompressedKeyCache(128, 4, 16, layer_name="a"),
            ValueError,
            "layer_name and layers together",
        ),
        (
            lambda: bind(qsa.CompressedKeyCache(128, 4, 16), (3, 1, 4, 64)),
            ValueError,
            r"takes a storage \[blocks, 1, 4, 128\] of torch.bfloat16, got \[3, 1, 4, 64\]",
        ),
        (lambda: bind(qsa.CompressedKeyCache(128, 4, 16), (3, 4, 128)), ValueError, r"got \[3, 4, 128\]"),
        (
            lambda: bind(qsa.KeyStateCache(128, 4, 16), (3, 1, 4, 128), torch.float16),
            ValueError,
            r"of torch.bfloat16, got .* of torch.float16",
        ),
    ],
)
def test_caches_check_what_they_are_given(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_compress_keys_by_the_definition():
    g = torch.Generator().manual_seed(0)
    raw = torch.randn(5, 4, 16, generator=g).bfloat16()
    weight, angles = torch.randn(16, generator=g), torch.randn(40, 4, generator=g)
    transform = qsa.KeyTransform(weight, torch.cat([angles.cos(), angles.sin()], dim=1), mrope_section=(1, 2, 1))
    axes = torch.randint(0, 40, (5, 3), generator=g)
    got = qsa.compress_keys(raw, axes, transform)
    assert got.dtype == torch.bfloat16
    for group in range(5):
        mean = (sum(raw[group, j].float() for j in range(4)) / 4).bfloat16().double()
        normed = (mean / (mean.square().mean() + 1e-6).sqrt() * (weight.double() + 1)).bfloat16().double()
        for d in range(16):
            want = float(normed[d])
            if d < 8:
                angle = float(angles[axes[group, [0, 1, 1, 2][d % 4]], d % 4])
                cos, sin = torch.tensor(angle).cos().double(), torch.tensor(angle).sin().double()
                other = normed[d + 4] * -1 if d < 4 else normed[d - 4]
                want = float(normed[d] * cos + other * sin)
            assert abs(float(got[group, d]) - want) <= 2**-8 * abs(want) + 1e-6
    for empty in (axes[:0], axes[:0, 0]):
        assert qsa.compress_keys(raw[:0], empty, transform).shape == (0, 16)
    one = qsa.KeyTransform(weight, transform.cos_sin)
    same = axes[:, :1].expand(5, 3)
    assert torch.equal(qsa.compress_keys(raw, axes[:, 0], one), qsa.compress_keys(raw, same, transform))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: qsa.KeyTransform(torch.zeros(1, 8), torch.zeros(4, 4)), r"norm_weight must be \[head_size\]"),
        (lambda: qsa.KeyTransform(torch.zeros(8), torch.zeros(4, 10)), r"even rotary_dim from 2 to 8, got \[4, 10\]"),
        (lambda: qsa.KeyTransform(torch.zeros(8), torch.zeros(4, 0)), r"even rotary_dim from 2 to 8, got \[4, 0\]"),
        (lambda: qsa.KeyTransform(torch.zeros(8), torch.zeros(4, 4), mrope_section=(1, 1, 1)), "sum to rotary_dim / 2"),
        (
            lambda: qsa.compress_keys(
                torch.zeros(2, 4, 6), torch.zeros(2), qsa.KeyTransform(torch.zeros(8), torch.zeros(4, 4))
            ),
            r"raw_keys must be \[groups, compress_ratio, 8\]",
        ),
        (
            lambda: qsa.compress_keys(
                torch.zeros(2, 4, 8), torch.zeros(3), qsa.KeyTransform(torch.zeros(8), torch.zeros(4, 4))
            ),
            r"first_positions must be \[2\] or \[2, 3\]",
        ),
    ],
)
def test_compression_checks_its_arguments(call, message):
    with pytest.raises(ValueError, match=message):
        call()


GOOD_UPDATE = {
    "keys": torch.ones(3, 16, dtype=torch.bfloat16),
    "rope_positions": torch.zeros(3, 1, 3, dtype=torch.int64),
    "state": qsa.KeyStateCache(16, 4, 16),
    "compressed": qsa.CompressedKeyCache(16, 4, 16),
    "query_start_loc": torch.tensor([0, 3], dtype=torch.int32),
    "seq_lens": torch.tensor([3], dtype=torch.int32),
    "state_block_table": torch.zeros(1, 1, dtype=torch.int32),
    "state_slots": torch.arange(3),
    "compressed_slots": torch.full((3,), -1),
    "k_work": torch.zeros(1, 2, dtype=torch.int32),
    "transform": qsa.KeyTransform(torch.zeros(16), torch.zeros(4, 4)),
}
for cache in (GOOD_UPDATE["state"], GOOD_UPDATE["compressed"]):
    cache.bind(torch.zeros(cache.storage_shape(2), dtype=torch.bfloat16))


def test_a_batch_that_completes_no_group_keeps_its_raw_keys():
    qsa.update_key_caches(**GOOD_UPDATE)
    assert GOOD_UPDATE["state"].key_cache[0].tolist() == [[1.0] * 16] * 3 + [[0.0] * 16]
    assert not GOOD_UPDATE["compressed"].storage.any()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"keys": torch.zeros(3, 16)}, r"keys must be bfloat16 \[tokens, 16\]"),
        ({"rope_positions": torch.zeros(3, 3, dtype=torch.int64)}, r"rope_positions must be int64 \[3, 1, 3\]"),
        ({"compressed": qsa.CompressedKeyCache(16, 2, 16)}, "the caches belong to different layers"),
        ({"compressed": qsa.CompressedKeyCache(16, 4, 16)}, "CompressedKeyCache has no storage"),
        ({"query_start_loc": torch.zeros(3, dtype=torch.int32)}, r"query_start_loc must be \[requests \+ 1\]"),
        ({"seq_lens": torch.zeros(1, dtype=torch.int64)}, "seq_lens must be int32"),
        ({"state_block_table": torch.zeros(2, 1, dtype=torch.int32)}, r"state_block_table must be \[1, any\]"),
        ({"state_block_table": torch.zeros(1, 0, dtype=torch.int32)}, r"state_block_table must be \[1, at least 1\]"),
        ({"state_slots": torch.zeros(2, dtype=torch.int64)}, r"state_slots must be int64 \[3\]"),
        ({"k_work": torch.zeros(2, dtype=torch.int32)}, r"k_work must be int32 \[items, 2\]"),
        ({"k_work": torch.zeros(1, 2, dtype=torch.int32, device="meta")}, "k_work must be on the device of keys"),
        ({"transform": qsa.KeyTransform(torch.zeros(8), torch.zeros(4, 4))}, r"norm_weight must be \[16\]"),
    ],
)
def test_update_checks_its_arguments(change, message):
    with pytest.raises(ValueError, match=message):
        qsa.update_key_caches(**(GOOD_UPDATE | change))


def builder(**options):
    return qsa.QSAMetadataBuilder(32, 6, storage_block_size=4, compress_ratio=4, **options)


def build(owner, query_lens, seq_lens, **options):
    starts = torch.tensor([0, *query_lens]).cumsum(0).int()
    tokens = options.get("num_tokens", sum(query_lens))
    return owner.build(
        starts,
        torch.tensor(seq_lens, dtype=torch.int32),
        torch.arange(tokens),
        torch.arange(len(query_lens) * 8, dtype=torch.int32).view(-1, 8),
        query_lens=query_lens,
        host_seq_lens=seq_lens,
        **options,
    )


@pytest.mark.parametrize(
    ("query_lens", "want"),
    [
        ([1, 1, 9], (2, 2, 1, 9, 9, 1)),
        ([3, 3, 3], (3, 9, 0, 0, 3, 3)),
        ([9, 5], (0, 0, 2, 14, 9, 0)),
        ([2, 2, 0, 0], (2, 4, 0, 0, 2, 2)),
        ([2, 8, 0, 8], (1, 2, 2, 16, 8, 2)),
        ([], (0, 0, 0, 0, 0, 0)),
    ],
)
def test_builder_splits_the_batch(query_lens, want):
    owner = builder(num_speculative_tokens=2)
    seq_lens = [20 + n for n in query_lens]
    got = build(owner, query_lens, seq_lens, num_tokens=sum(query_lens) + 3)
    facts = (got.num_decodes, got.num_decode_tokens, got.num_prefills, got.num_prefill_tokens)
    assert (*facts, got.max_query_len, got.decode_query_len) == want
    assert got.max_seq_len == max(seq_lens, default=0)
    assert got.tensors.token_to_req.data_ptr() == owner.buffers.token_to_req.data_ptr()
    assert got.tensors.logical_positions.tolist()[-3:] == [-1] * 3
    assert got.tensors.k_work.shape[0] == qsa.k_work_capacity(sum(query_lens) + 3, len(query_lens), 4)


@pytest.mark.parametrize(
    ("query_lens", "options", "message"),
    [
        ([9, 1], {}, "decodes .* must come first: request 1 with 1 tokens follows a prefill"),
        ([1, 2, 9], {}, r"one common number of tokens above 0, got \[1, 2\]"),
        ([0, 2], {}, r"one common number of tokens above 0, got \[0, 2\]"),
        ([-1, 2], {}, r"query_lens must be at least 0, got \[-1, 2\]"),
        ([9, 9, 9, 9], {}, "holds 32 tokens and 6 requests, got 36 tokens"),
        ([1] * 7, {}, "got 7 tokens .* and 7 requests"),
        ([3, 3], {"num_tokens": 5}, r"got 5 tokens \(6 in queries\)"),
    ],
)
def test_builder_refuses_other_batches(query_lens, options, message):
    with pytest.raises(ValueError, match=message):
        build(builder(num_speculative_tokens=2), query_lens, [n + 4 for n in query_lens], **options)


def test_builder_checks_its_sizes():
    sizes = {"max_tokens": 8, "max_requests": 2, "storage_block_size": 4, "compress_ratio": 4}
    for name, value in (("max_tokens", 0), ("max_requests", 0), ("storage_block_size", 0), ("compress_ratio", 1.0)):
        with pytest.raises(ValueError, match=f"{name} must be an int of at least 1, got {value}"):
            qsa.QSAMetadataBuilder(**sizes | {name: value})
    with pytest.raises(ValueError, match="circular_buffer_size must be an int of at least 0, got -1"):
        qsa.QSAMetadataBuilder(**sizes, circular_buffer_size=-1)
    empty = torch.zeros(2, dtype=torch.int32)
    with pytest.raises(ValueError, match="query_lens, host_seq_lens and seq_lens must be one a request"):
        builder().build(empty, empty[:1], empty.long(), empty.view(1, 2), query_lens=[1], host_seq_lens=[])
