"""A tiny QSA layer driven like an engine drives one, against a dense recomputation of its keys and selections.

Requests join and leave, prompts arrive in chunks beside decodes, and decodes bring draft rows of which some are
rejected: their positions come again with other keys.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import torch
from strided_views import spaced

from tpoverlap.attention import qsa

HEAD, HEADS, RATIO, BLOCK, DRAFTS, TOP_K = 128, 4, 4, 16, 3, 3
ROTARY_DIM, SECTION = 64, (12, 10, 10)


@dataclass
class Request:
    """committed: tokens whose keys are final. keys, axes: of every token written so far, drafts last."""

    prompt_chunks: list[int]
    state_block: int
    blocks: list[int]
    committed: int = 0
    keys: torch.Tensor = field(default_factory=lambda: torch.empty(0, HEAD, dtype=torch.bfloat16))
    axes: torch.Tensor = field(default_factory=lambda: torch.empty(0, 3, dtype=torch.int64))


class LayerUnderTest:
    def __init__(self, seed: int, device: str, *, cache_positions: bool, cache_dtype: str = "auto") -> None:
        self.g = torch.Generator().manual_seed(seed)
        self.rng = random.Random(seed)
        self.device = device
        self.cache_positions = cache_positions
        layers: dict[str, object] = {}
        self.state = qsa.KeyStateCache(
            HEAD, RATIO, BLOCK, cache_positions, DRAFTS, cache_dtype=cache_dtype, layer_name="state", layers=layers
        )
        self.compressed = qsa.CompressedKeyCache(
            HEAD, RATIO, BLOCK, cache_dtype=cache_dtype, layer_name="compressed", layers=layers
        )
        for cache, blocks in ((self.state, 6), (self.compressed, 60)):
            storage = torch.zeros(cache.storage_shape(blocks), dtype=cache.dtype, device=device)
            cache.bind(storage)
        self.free_state, self.free_blocks = list(range(6)), self.rng.sample(range(60), 60)
        common = {"compress_ratio": RATIO, "num_speculative_tokens": DRAFTS, "device": device}
        self.ring_builder = qsa.QSAMetadataBuilder(
            64, 8, storage_block_size=BLOCK, circular_buffer_size=self.state.capacity, **common
        )
        self.builder = qsa.QSAMetadataBuilder(64, 8, storage_block_size=self.compressed.rows, **common)
        angles = torch.arange(4096).unsqueeze(1) / 10000 ** (torch.arange(ROTARY_DIM // 2) / (ROTARY_DIM // 2))
        self.transform = qsa.KeyTransform(
            norm_weight=(torch.randn(HEAD, generator=self.g) * 0.2).to(device),
            cos_sin=torch.cat([angles.cos(), angles.sin()], dim=1).to(device),
            mrope_section=SECTION if cache_positions else None,
        )
        self.requests: list[Request] = []

    def join(self, chunks: list[int]) -> None:
        blocks = [self.free_blocks.pop() for _ in range(8)]
        self.requests.append(Request(chunks, self.free_state.pop(), blocks))

    def leave(self, index: int) -> None:
        request = self.requests.pop(index)
        self.free_state.append(request.state_block)
        self.free_blocks = request.blocks + self.free_blocks

    def step(self, padding: int = 0) -> None:
        """One batch: decodes with their drafts first, then a prompt chunk of every other request."""
        self.requests.sort(key=lambda r: bool(r.prompt_chunks))
        query_lens = [r.prompt_chunks[0] if r.prompt_chunks else 1 + DRAFTS for r in self.requests]
        for request, n in zip(self.requests, query_lens, strict=True):
            fresh = torch.randn(n, HEAD, generator=self.g).bfloat16()
            positions = torch.arange(request.committed, request.committed + n)
            axes = torch.stack([positions, positions // 2, positions % 7], dim=1)
            if not self.cache_positions:
                axes = positions.unsqueeze(1).expand(n, 3)
            request.keys = torch.cat([request.keys[: request.committed], fresh])
            request.axes = torch.cat([request.axes[: request.committed], axes])
        self._run(query_lens, padding)
        for request, n in zip(self.requests, query_lens, strict=True):
            if request.prompt_chunks:
                request.prompt_chunks.pop(0)
                request.committed += n
            else:
                request.committed += self.rng.randint(1, n)

    def _run(self, query_lens: list[int], padding: int) -> None:
        device, total = self.device, sum(query_lens)
        seq_lens = [len(r.keys) for r in self.requests]
        starts = torch.tensor([0, *query_lens]).cumsum(0).int().to(device)
        lens = torch.tensor(seq_lens, dtype=torch.int32, device=device)
        state_table = torch.tensor([[r.state_block] for r in self.requests], dtype=torch.int32, device=device)
        table = torch.tensor([r.blocks for r in self.requests], dtype=torch.int32, device=device)
        slots = torch.cat([torch.arange(total), torch.full((padding,), -1)]).to(device)
        host = {"query_lens": query_lens, "host_seq_lens": seq_lens, "num_tokens": total + padding}
        ring = self.ring_builder.build(starts, lens, slots, state_table, **host).tensors
        batch = self.builder.build(starts, lens, slots, table, **host)

        new = [(r.keys[-n:], r.axes[-n:]) for r, n in zip(self.requests, query_lens, strict=True)]
        keys = torch.cat([k for k, _ in new] + [torch.full((padding, HEAD), torch.nan, dtype=torch.bfloat16)])
        axes = torch.cat([a for _, a in new] + [torch.zeros(padding, 3, dtype=torch.int64)])
        qsa.update_key_caches(
            keys.to(device),
            qsa.canonical_rope_positions(axes.t()).to(device),
            self.state,
            self.compressed,
            query_start_loc=spaced(starts),
            seq_lens=spaced(lens),
            state_block_table=state_table,
            state_slots=spaced(ring.slot_mapping),
            compressed_slots=spaced(batch.tensors.slot_mapping),
            k_work=spaced(batch.tensors.k_work),
            transform=self.transform,
        )
        dtype = torch.float16 if self.device == "cpu" and self.compressed.dtype != torch.bfloat16 else torch.bfloat16
        q = torch.randn(total + padding, HEADS, HEAD, generator=self.g).to(dtype)
        dense = self._check_keys(table)
        got, report = qsa.select_tokens(
            q.to(device),
            self.compressed.key_cache,
            table,
            batch.tensors.token_to_req,
            batch.tensors.logical_positions,
            lens,
            visible_blocks=batch.tensors.visible_blocks,
            num_decodes=batch.num_decodes,
            num_decode_tokens=batch.num_decode_tokens,
            num_padding_tokens=padding,
            compress_ratio=RATIO,
            top_k=TOP_K,
            return_report=True,
        )
        assert report.scorer.startswith("request_segments" if batch.num_decodes > 1 else "paged"), report
        rows = 0
        for i, n in enumerate(query_lens):
            for row in range(n):
                want = dense_selection(q[rows + row], dense[i], seq_lens[i] - n + row)
                assert got[rows + row].tolist() == want, (i, row)
            rows += n
        assert bool((got[rows:] == -1).all())

    def _check_keys(self, table: torch.Tensor) -> list[torch.Tensor]:
        """Every complete group's cached key, after comparing it with the one made of all raw keys at once."""
        transform = qsa.KeyTransform(
            self.transform.norm_weight.cpu(),
            self.transform.cos_sin.cpu(),
            self.transform.eps,
            self.transform.mrope_section,
        )
        result = []
        for i, request in enumerate(self.requests):
            groups = len(request.keys) // RATIO
            raw = request.keys[: groups * RATIO].view(groups, RATIO, HEAD)
            want = qsa.compress_keys(raw, request.axes[: groups * RATIO : RATIO], transform)
            pages = self.compressed.key_cache.view(
                torch.uint8 if self.compressed.dtype == torch.float8_e4m3fn else torch.bfloat16
            )[table[i].long()]
            got = pages.flatten(0, 1)[:groups].view(self.compressed.dtype).cpu()
            # One step of the cache's format where a device sums in another order.
            tolerance = 2**-7 if got.dtype == torch.bfloat16 else 2**-2
            torch.testing.assert_close(got.float(), want.float(), rtol=tolerance, atol=tolerance / 2**3)
            result.append(got)
        return result


def dense_selection(q: torch.Tensor, keys: torch.Tensor, position: int) -> list[int]:
    """Positions that one query selects among its request's keys, laid out one after the other."""
    visible = (position + 1) // RATIO
    scores = (q.double() @ keys[:visible].double().t()).relu().sum(dim=0).tolist()
    best = sorted(sorted(range(visible), key=lambda c: (-scores[c], c))[:TOP_K])
    tokens = [b * RATIO + j for b in best for j in range(RATIO)] + list(range(visible * RATIO, position + 1))
    return tokens + [-1] * (TOP_K * RATIO + RATIO - 1 - len(tokens))


def run_layer(seed: int, device: str, *, cache_positions: bool, cache_dtype: str = "auto", steps: int = 8) -> None:
    """Two requests join, a third joins while they decode, one leaves, another takes its blocks."""
    layer = LayerUnderTest(seed, device, cache_positions=cache_positions, cache_dtype=cache_dtype)
    layer.join([16, 16, 5])
    layer.join([9])
    for step in range(steps):
        if step == 3:
            layer.join([13, 6])
        if step == 5:
            layer.leave(0)
            layer.join([7])
        layer.step(padding=step % 3)
