"""The two side caches of a QSA layer: recent raw keys, one ring a request, and the compressed keys.

Each owns one storage that an engine allocates and binds. What it hands out are views made on access, so dropping the
storage frees it.
"""

from __future__ import annotations

from typing import Any

import torch

from tpoverlap.errors import UnsupportedError

MODEL_DTYPE = torch.bfloat16
CACHE_DTYPES = {
    "auto": MODEL_DTYPE,
    "bfloat16": MODEL_DTYPE,
    "fp8": torch.float8_e4m3fn,
    "fp8_e4m3": torch.float8_e4m3fn,
}
POSITION_AXES = 3
_ELEMENTS_PER_POSITION = 4
"""BF16 elements under one int64."""


class _SideCache:
    """Owner of one storage [blocks, rows, 1, width]. ``rows`` and ``width`` are per block and per row, in elements."""

    def __init__(
        self,
        head_size: int,
        compress_ratio: int,
        block_size: int,
        cache_dtype: str,
        decode_context_parallel_size: int,
    ) -> None:
        for name, value in (
            ("head_size", head_size),
            ("compress_ratio", compress_ratio),
            ("block_size", block_size),
        ):
            if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
                raise ValueError(f"{name} must be a positive int, got {value!r}")
        if block_size % compress_ratio:
            raise ValueError(f"block_size {block_size} must be a multiple of compress_ratio {compress_ratio}")
        if cache_dtype not in CACHE_DTYPES:
            raise ValueError(f"cache_dtype must be one of {', '.join(CACHE_DTYPES)}, got {cache_dtype!r}")
        if decode_context_parallel_size != 1:
            raise UnsupportedError(
                f"QSA caches do not split a context over ranks: decode_context_parallel_size must be 1, "
                f"got {decode_context_parallel_size}"
            )
        self.head_size = head_size
        self.compress_ratio = compress_ratio
        self.block_size = block_size
        self.rows = 0
        self.width = head_size
        self.dtype = MODEL_DTYPE
        self._storage: torch.Tensor | None = None

    def _register(self, layer_name: str | None, layers: dict[str, Any] | None) -> None:
        if (layer_name is None) != (layers is None):
            raise ValueError("give layer_name and layers together, or neither")
        if layer_name is None or layers is None:
            return
        if layer_name in layers:
            raise ValueError(f"layer name {layer_name!r} is taken: give every cache its own")
        layers[layer_name] = self

    def storage_shape(self, num_blocks: int) -> tuple[int, int, int, int]:
        """Shape that :meth:`bind` takes."""
        return num_blocks, 1, self.rows, self.width

    def bind(self, storage: torch.Tensor) -> None:
        """Take a storage [blocks, 1, rows, width]; raises ValueError, and keeps what it had, for another one."""
        self._check_storage(storage)
        self._storage = storage.transpose(1, 2)

    def _check_storage(self, storage: torch.Tensor) -> None:
        wanted = f"[blocks, 1, {self.rows}, {self.width}] of {self.dtype}"
        if storage.dim() != 4 or tuple(storage.shape[1:]) != (1, self.rows, self.width) or storage.dtype != self.dtype:
            raise ValueError(
                f"{type(self).__name__} takes a storage {wanted}, got {list(storage.shape)} of {storage.dtype}"
            )
        if storage.stride(3) != 1:
            raise ValueError(
                f"{type(self).__name__} takes a storage {wanted} with contiguous rows, got strides {storage.stride()}"
            )

    def unbind(self) -> None:
        """Forget the storage."""
        self._storage = None

    @property
    def storage(self) -> torch.Tensor:
        """[blocks, rows, 1, width]. Raises ValueError before :meth:`bind`."""
        if self._storage is None:
            raise ValueError(f"{type(self).__name__} has no storage: call bind() with one of {self.storage_shape(1)}")
        return self._storage

    @property
    def key_cache(self) -> torch.Tensor:
        """[blocks, rows, head_size], a view of the storage."""
        return self.storage[:, :, 0, : self.head_size]


class KeyStateCache(_SideCache):
    """The last raw keys of each request, in a ring of ``capacity`` rows: position p lies in row p % capacity.

    capacity is compress_ratio * ceil((compress_ratio + num_speculative_tokens) / compress_ratio): in a narrower ring a
    rejected draft row would overwrite a key of the group that is still open. It must divide block_size, the attention's
    block size. Keys are BF16 whatever the cache dtype, for they are averaged later. cache_rope_positions: keep the
    three rotary axes of each key behind it, as int64, at a multiple of 4 elements.

    Raises ValueError for sizes that do not fit and for a layer_name that ``layers`` already has.
    """

    def __init__(
        self,
        head_size: int,
        compress_ratio: int,
        block_size: int,
        cache_rope_positions: bool = False,
        num_speculative_tokens: int = 0,
        *,
        cache_dtype: str = "auto",
        layer_name: str | None = None,
        layers: dict[str, Any] | None = None,
        decode_context_parallel_size: int = 1,
    ) -> None:
        super().__init__(head_size, compress_ratio, block_size, cache_dtype, decode_context_parallel_size)
        if not isinstance(num_speculative_tokens, int) or num_speculative_tokens < 0:
            raise ValueError(f"num_speculative_tokens must be an int of at least 0, got {num_speculative_tokens!r}")
        self.capacity = compress_ratio * -(-(compress_ratio + num_speculative_tokens) // compress_ratio)
        if block_size % self.capacity:
            raise ValueError(
                f"the ring needs {self.capacity} rows for compress_ratio {compress_ratio} and {num_speculative_tokens} "
                f"speculative tokens, and that must divide block_size {block_size}"
            )
        self.rows = self.capacity
        self.position_offset: int | None = None
        if cache_rope_positions:
            self.position_offset = -(-head_size // _ELEMENTS_PER_POSITION) * _ELEMENTS_PER_POSITION
            self.width = self.position_offset + POSITION_AXES * _ELEMENTS_PER_POSITION
        self._register(layer_name, layers)

    def _check_storage(self, storage: torch.Tensor) -> None:
        super()._check_storage(storage)
        aligned = storage.data_ptr() % 8 == 0 and all(s % _ELEMENTS_PER_POSITION == 0 for s in storage.stride()[:3])
        if self.position_offset is not None and not aligned:
            raise ValueError(
                f"KeyStateCache with positions takes a storage whose rows are aligned to 8 bytes, "
                f"got strides {storage.stride()} of 2-byte elements"
            )

    @property
    def rope_position_cache(self) -> torch.Tensor | None:
        """int64 [blocks, rows, 3], a view of the storage; None where positions are not cached."""
        if self.position_offset is None:
            return None
        return self.storage[:, :, 0, self.position_offset :].view(torch.int64)


class CompressedKeyCache(_SideCache):
    """One key for each complete group of compress_ratio raw keys, block_size / compress_ratio rows a block.

    Rows are BF16, or e4m3 for the cache dtypes "fp8" and "fp8_e4m3"; :func:`compress_keys` makes them. Raises
    ValueError for sizes that do not fit and for a layer_name that ``layers`` already has.
    """

    def __init__(
        self,
        head_size: int,
        compress_ratio: int,
        block_size: int,
        *,
        cache_dtype: str = "auto",
        layer_name: str | None = None,
        layers: dict[str, Any] | None = None,
        decode_context_parallel_size: int = 1,
    ) -> None:
        super().__init__(head_size, compress_ratio, block_size, cache_dtype, decode_context_parallel_size)
        self.rows = block_size // compress_ratio
        self.dtype = CACHE_DTYPES[cache_dtype]
        self._register(layer_name, layers)
