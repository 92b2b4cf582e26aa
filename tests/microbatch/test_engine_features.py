"""Each rejection of an engine's features, and the neighbouring case that is allowed."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from tpoverlap.errors import ConfigError
from tpoverlap.microbatch import EngineFeatures, check_supported

DENSE = EngineFeatures(
    tensor_parallel_size=2,
    pipeline_parallel_size=1,
    data_parallel_size=1,
    decode_context_parallel_size=1,
    is_encoder_decoder=False,
    lora=False,
    kv_transfer=False,
    per_layer_embedding_offload=False,
    recurrent_state_cache_mode="none",
    deepstack_num_level=0,
    deepstack_layer_indices=(),
    num_experts=0,
    experts_use_group=False,
    collective_operators=frozenset(),
)

# Field, what is asked, words of the answer besides both, and what is allowed instead; other fields where they matter.
CASES: list[tuple[str, Any, str, Any, dict[str, Any]]] = [
    ("tensor_parallel_size", 1, "at least 2 is supported", 2, {}),
    ("pipeline_parallel_size", 2, "only 1 is supported", 1, {}),
    ("data_parallel_size", 3, "only 1 is supported", 1, {}),
    ("decode_context_parallel_size", 2, "only 1 is supported", 1, {}),
    ("is_encoder_decoder", True, "decoder-only models are supported", False, {}),
    ("lora", True, "without LoRA are supported", False, {}),
    ("kv_transfer", True, "cache of this instance is supported", False, {}),
    ("per_layer_embedding_offload", True, "on the device are supported", False, {}),
    ("recurrent_state_cache_mode", "all", "'none' and 'align' are supported", "align", {}),
    ("recurrent_state_cache_mode", "new", "'none' and 'align' are supported", "none", {}),
    ("deepstack_num_level", 3, "only 0", 0, {}),
    ("deepstack_layer_indices", (0, 1, 2), "only an empty list", (), {}),
    ("experts_use_group", False, "the executor's own group", True, {"num_experts": 8}),
]


@pytest.mark.parametrize(
    ("field", "asked", "supported", "allowed", "others"), CASES, ids=[f"{case[0]}-{case[1]}" for case in CASES]
)
def test_rejected_and_allowed(field: str, asked: Any, supported: str, allowed: Any, others: dict[str, Any]) -> None:
    check_supported(dataclasses.replace(DENSE, **others, **{field: allowed}))
    with pytest.raises(ConfigError) as caught:
        check_supported(dataclasses.replace(DENSE, **others, **{field: asked}))
    message = str(caught.value)
    assert f"{field}={asked!r}" in message
    assert supported in message
    assert ";" not in message, "one reason for one field"


def test_every_field_that_can_be_wrong_has_a_case() -> None:
    rejected = {case[0] for case in CASES}
    assert rejected == {f.name for f in dataclasses.fields(EngineFeatures)} - {"num_experts", "collective_operators"}


def test_a_dense_model_needs_no_expert_exchange() -> None:
    check_supported(dataclasses.replace(DENSE, num_experts=0, experts_use_group=False))


def test_all_reasons_are_named_at_once() -> None:
    with pytest.raises(ConfigError, match=r"pipeline_parallel_size=2.*; lora=True"):
        check_supported(dataclasses.replace(DENSE, pipeline_parallel_size=2, lora=True))


def test_no_field_is_allowed_by_being_forgotten() -> None:
    values = {f.name: getattr(DENSE, f.name) for f in dataclasses.fields(EngineFeatures)}
    for name in values:
        with pytest.raises(TypeError, match=name):
            EngineFeatures(**{k: v for k, v in values.items() if k != name})
