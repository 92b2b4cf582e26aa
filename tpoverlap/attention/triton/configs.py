"""Tile shapes of the Triton attention kernels, as data.

Looked up, never tuned at run time: a row's bits depend on them. Those of Hopper were chosen on an H200
(docs/decisions/0003-attention-tiles.md has the measurements). The others follow from what the architecture offers
(kind of tensor instruction, shared memory, registers) and are only known to compile and to fit.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

Capability = tuple[int, int]


@dataclass(frozen=True)
class PrefillTiles:
    """block_m: query rows (tokens x heads of a group) of a program. block_n: keys of a step. part_keys: rows are cut at
    its multiples, which are multiples of block_n. specialized_stages: of the warp-specialized kernel, 0: there is none.
    The rest as Triton's. A row's bits depend on block_n and part_keys alone.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    part_keys: int = 16384
    specialized_stages: int = 0


@dataclass(frozen=True)
class DecodeTiles:
    """block_n: keys of a step. part_keys: a row's parts are multiples of it (itself one of block_n). ring_stages: steps
    that the Gluon kernel of one warp holds; 0: there is none. few_ring_stages: those where a multiprocessor has few
    programs. The rest as Triton's. A row's bits depend on block_n and part_keys alone.
    """

    block_n: int
    part_keys: int
    num_warps: int
    num_stages: int
    ring_stages: int = 0
    few_ring_stages: int = 0


# Up to LONG_PART_KEYS keys a part only FEW_PARTS of a row's splits are used, or half of fewer: fewer starts and merges
# serve a full GPU better, and more programs a short row little.
LONG_PART_KEYS = 256
FEW_PARTS = 8


def most_parts(num_splits: int, max_keys: int) -> int:
    """Parts that a row of up to ``max_keys`` keys is cut into at most."""
    few = min(FEW_PARTS, (num_splits + 1) // 2)
    return min(num_splits, max(few, -(-max_keys // LONG_PART_KEYS)))


# generation -> {padded head_dim: tiles}; num_stages - 1 steps of keys are in flight.
_PREFILL_HALF: dict[str, dict[int, PrefillTiles]] = {
    # No tensor instructions through Triton (3.x): FMA tiles that the register file holds, whichever Triton compiles.
    "volta_turing": {
        64: PrefillTiles(32, 16, 4, 1),
        128: PrefillTiles(32, 16, 8, 1),
        256: PrefillTiles(32, 16, 8, 1),
    },
    # mma.sync, 99 KB of shared memory on 8.6, 8.9 and 12.x: what fits there serves 8.0 too.
    "ampere": {
        64: PrefillTiles(128, 64, 8, 3),
        128: PrefillTiles(128, 32, 8, 3),
        256: PrefillTiles(64, 32, 8, 2),
    },
    # Those of the warp-specialized kernel; the plain one serves what it does not, with the same bits. TFLOPS of an 8192
    # prompt / of 2048 tokens after 32768, 12 query and 2 KV heads. 64: 401 / 414; with 64 keys and 4 stages 301 / 307.
    # 128: 558 / 571; with 64 keys and 3 stages 503 / 514. 256: 604 / 592; with 32 keys and 4 stages 469 / 473.
    "hopper": {
        64: PrefillTiles(128, 128, 8, 3, specialized_stages=3),
        128: PrefillTiles(128, 128, 8, 2, specialized_stages=2),
        256: PrefillTiles(128, 64, 8, 2, specialized_stages=2),
    },
    "blackwell": {
        64: PrefillTiles(128, 128, 8, 3),
        128: PrefillTiles(128, 64, 8, 3),
        256: PrefillTiles(128, 32, 8, 3),
    },
    # Small tiles and parts: short test problems then still cross their borders.
    "interpreter": dict.fromkeys((64, 128, 256), PrefillTiles(32, 32, 4, 1, part_keys=64)),
}
# IEEE products run on FMA units everywhere.
_PREFILL_FP32 = {64: PrefillTiles(32, 32, 4, 1), 128: PrefillTiles(32, 32, 8, 1), 256: PrefillTiles(32, 16, 8, 1)}

_DECODE_HALF: dict[str, dict[int, DecodeTiles]] = {
    "volta_turing": {
        64: DecodeTiles(32, 128, 4, 1),
        128: DecodeTiles(32, 128, 4, 1),
        256: DecodeTiles(16, 128, 8, 1),
    },
    "ampere": {64: DecodeTiles(64, 128, 4, 3), 128: DecodeTiles(64, 128, 4, 2), 256: DecodeTiles(32, 128, 4, 2)},
    # One warp a program: warps that share keys meet at barriers in every step. Stages of the Gluon kernel's ring: few
    # serve a full GPU best. 16 query and 2 KV heads of 128, us with 2 / 3 / 4 / 6 stages: 16 x 8192 39.1 / 36.6 / 37.0
    # / 37.6, 64 x 2048 37.8 / 38.1 / 40.6 / 41.1; of 256 with 2 / 3 / 4: 67.6 / 69.0 / 80.6 and 72.8 / 72.8 / 75.4. Few
    # programs (1 x 8192, 16 heads of 128), 3 / 4 / 6: 22.0 / 20.8 / 20.6. A head_dim of 64 has no ring: none was timed.
    # 1 x 512 takes 7.3 us with parts of 64 keys, 8.7 us with 128 (an earlier kernel).
    "hopper": {
        64: DecodeTiles(16, 64, 1, 3),
        128: DecodeTiles(16, 64, 1, 3, ring_stages=3, few_ring_stages=6),
        256: DecodeTiles(16, 64, 1, 3, ring_stages=3, few_ring_stages=3),
    },
    "blackwell": {64: DecodeTiles(16, 64, 1, 3), 128: DecodeTiles(16, 64, 1, 3), 256: DecodeTiles(16, 64, 1, 3)},
    "interpreter": {64: DecodeTiles(32, 64, 4, 1), 128: DecodeTiles(32, 64, 4, 1), 256: DecodeTiles(32, 64, 4, 1)},
}
# Whoever asks for more splits than this has few programs on a GPU, whose steps are then worth being long.
# 1 x 131072, 16 query and 2 KV heads of 128, 128 splits: 37.2 us with 32 keys and 3 stages, 37.9 with 16 and 6.
_FEW_SPLITS = 64
_DECODE_HALF_MANY_SPLITS: dict[str, dict[int, DecodeTiles]] = {
    "hopper": {
        64: DecodeTiles(64, 64, 4, 3),
        128: DecodeTiles(32, 64, 1, 3, ring_stages=3, few_ring_stages=3),
        256: DecodeTiles(16, 64, 1, 4, ring_stages=3, few_ring_stages=3),
    },
    "blackwell": {64: DecodeTiles(64, 64, 4, 3), 128: DecodeTiles(64, 64, 4, 3), 256: DecodeTiles(16, 64, 1, 4)},
}
_DECODE_FP32 = {64: DecodeTiles(32, 128, 4, 1), 128: DecodeTiles(32, 128, 4, 1), 256: DecodeTiles(16, 128, 8, 1)}


def prefill_tiles(capability: Capability | None, dtype: torch.dtype, head_dim: int) -> PrefillTiles:
    """Tiles of the packed prefill. capability None: the interpreter."""
    by_dim = _PREFILL_FP32 if dtype == torch.float32 else _PREFILL_HALF[generation(capability)]
    return by_dim[_row(head_dim)]


def decode_tiles(capability: Capability | None, dtype: torch.dtype, head_dim: int, num_splits: int = 16) -> DecodeTiles:
    """Tiles of the split-KV decode. capability None: the interpreter."""
    group = generation(capability)
    by_dim = _DECODE_FP32 if dtype == torch.float32 else _DECODE_HALF[group]
    if dtype != torch.float32 and num_splits > _FEW_SPLITS:
        by_dim = _DECODE_HALF_MANY_SPLITS.get(group, by_dim)
    return by_dim[_row(head_dim)]


def generation(capability: Capability | None) -> str:
    """The group of architectures whose tensor instructions and shared memory are alike."""
    if capability is None:
        return "interpreter"
    return {7: "volta_turing", 9: "hopper", 10: "blackwell", 11: "blackwell"}.get(capability[0], "ampere")


def _row(head_dim: int) -> int:
    return 64 if head_dim <= 64 else 128 if head_dim <= 128 else 256
