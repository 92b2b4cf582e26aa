"""What an engine is set up to do, and which of it the executor cannot run in pieces.

Each rejection is one function of the features: the reason, or None.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tpoverlap.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class EngineFeatures:
    """Filled by an engine's adapter. No field has a default, so that none is allowed by being forgotten.

    tensor_parallel_size, pipeline_parallel_size, data_parallel_size, decode_context_parallel_size: ranks along each
    axis, 1 where the engine does not know it. is_encoder_decoder: cross-attention to an encoder's output. lora:
    adapters are switched on. kv_transfer: keys and values are sent to, or fetched from, another instance.
    per_layer_embedding_offload: a model's per-layer embeddings live on the host and are fetched for each batch.
    recurrent_state_cache_mode: "none", or how states of linear-attention layers are cached: "align" (one slot a block
    of tokens) or "all" (states of all blocks). deepstack_num_level: visual feature levels that are added to the first
    layers; deepstack_layer_indices: the layers, where a model lists them (``_ds_layer_indices``). num_experts: 0 for
    a dense model. experts_use_group: whether tokens reach the experts and come back through collectives of the
    executor's own group, and none else. collective_operators: operators ("namespace::name") that may run inside the
    forward pass and issue a collective themselves, such as fused all-reduce and norm; see
    :mod:`~tpoverlap.microbatch.foreign_collectives`.
    """

    tensor_parallel_size: int
    pipeline_parallel_size: int
    data_parallel_size: int
    decode_context_parallel_size: int
    is_encoder_decoder: bool
    lora: bool
    kv_transfer: bool
    per_layer_embedding_offload: bool
    recurrent_state_cache_mode: str
    deepstack_num_level: int
    deepstack_layer_indices: tuple[int, ...]
    num_experts: int
    experts_use_group: bool
    collective_operators: frozenset[str]


def check_supported(features: EngineFeatures) -> None:
    """Raises ConfigError, with all reasons, where batches of this engine cannot run in pieces."""
    reasons = [reason for check in _CHECKS if (reason := check(features)) is not None]
    if reasons:
        raise ConfigError("batches cannot run in pieces: " + "; ".join(reasons))


def _tensor_parallel(features: EngineFeatures) -> str | None:
    if features.tensor_parallel_size >= 2:
        return None
    return (
        f"tensor_parallel_size={features.tensor_parallel_size}: at least 2 is supported, there is no communication "
        "to hide otherwise"
    )


def _pipeline_parallel(features: EngineFeatures) -> str | None:
    return _single("pipeline_parallel_size", features.pipeline_parallel_size)


def _data_parallel(features: EngineFeatures) -> str | None:
    return _single("data_parallel_size", features.data_parallel_size)


def _decode_context_parallel(features: EngineFeatures) -> str | None:
    return _single("decode_context_parallel_size", features.decode_context_parallel_size)


def _encoder_decoder(features: EngineFeatures) -> str | None:
    return _off("is_encoder_decoder", features.is_encoder_decoder, "decoder-only models are supported")


def _lora(features: EngineFeatures) -> str | None:
    return _off(
        "lora", features.lora, "only models without LoRA are supported, because its token mapping is made per batch"
    )


def _kv_transfer(features: EngineFeatures) -> str | None:
    return _off("kv_transfer", features.kv_transfer, "only a key/value cache of this instance is supported")


def _per_layer_embedding_offload(features: EngineFeatures) -> str | None:
    return _off(
        "per_layer_embedding_offload",
        features.per_layer_embedding_offload,
        "only embeddings on the device are supported",
    )


def _recurrent_state_cache(features: EngineFeatures) -> str | None:
    if features.recurrent_state_cache_mode in ("none", "align"):
        return None
    return (
        f"recurrent_state_cache_mode={features.recurrent_state_cache_mode!r}: 'none' and 'align' are supported "
        "(give the executor state_block with 'align')"
    )


def _deepstack(features: EngineFeatures) -> str | None:
    """Each piece would read the feature buffers from token 0."""
    if features.deepstack_num_level == 0:
        return None
    return f"deepstack_num_level={features.deepstack_num_level}: only 0, no deepstack features, is supported"


def _deepstack_layers(features: EngineFeatures) -> str | None:
    if not features.deepstack_layer_indices:
        return None
    return (
        f"deepstack_layer_indices={features.deepstack_layer_indices!r}: only an empty list, no deepstack features, is "
        "supported"
    )


def _experts(features: EngineFeatures) -> str | None:
    if features.num_experts == 0 or features.experts_use_group:
        return None
    return (
        f"experts_use_group=False with num_experts={features.num_experts}: mixture-of-experts models are supported "
        "where the expert exchange goes through collectives of the executor's own group"
    )


_CHECKS: tuple[Callable[[EngineFeatures], str | None], ...] = (
    _tensor_parallel,
    _pipeline_parallel,
    _data_parallel,
    _decode_context_parallel,
    _encoder_decoder,
    _lora,
    _kv_transfer,
    _per_layer_embedding_offload,
    _recurrent_state_cache,
    _deepstack,
    _deepstack_layers,
    _experts,
)


def _single(field: str, size: int) -> str | None:
    return None if size == 1 else f"{field}={size}: only 1 is supported"


def _off(field: str, value: bool, supported: str) -> str | None:
    return f"{field}={value}: {supported}" if value else None
