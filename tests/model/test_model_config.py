from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import AutoConfig, LlamaConfig, Qwen2Config, Qwen3Config

from tpoverlap.errors import ConfigError, UnsupportedError
from tpoverlap.model.config import from_transformers, load_config


def test_fields_come_from_each_architecture() -> None:
    llama = from_transformers(LlamaConfig(hidden_size=64, num_attention_heads=4, num_key_value_heads=2))
    assert (llama.architecture, llama.head_dim, llama.qkv_bias, llama.o_bias, llama.qk_norm) == (
        "Llama",
        16,
        False,
        False,
        False,
    )
    qwen2 = from_transformers(Qwen2Config(hidden_size=64, num_attention_heads=4, num_key_value_heads=4))
    assert (qwen2.architecture, qwen2.head_dim, qwen2.qkv_bias, qwen2.o_bias) == ("Qwen2", 16, True, False)
    qwen3 = from_transformers(Qwen3Config(hidden_size=64, num_attention_heads=4, num_key_value_heads=4, head_dim=32))
    assert (qwen3.architecture, qwen3.head_dim, qwen3.qkv_bias, qwen3.qk_norm) == ("Qwen3", 32, False, True)


def test_older_folders_with_rope_scaling_and_theta_at_top_level_still_load(tmp_path: Path) -> None:
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    stored = {"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4, "rope_theta": 5e5}
    (tmp_path / "config.json").write_text(json.dumps(stored | {"rope_scaling": scaling}))
    scaled = load_config(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(stored))
    plain = load_config(tmp_path)
    assert plain.rope_inv_freq == pytest.approx([5e5 ** (-2 * i / 16) for i in range(8)], rel=1e-6)
    assert scaled.rope_inv_freq[0] == pytest.approx(plain.rope_inv_freq[0])
    assert scaled.rope_inv_freq[-1] == pytest.approx(plain.rope_inv_freq[-1] / 8)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (LlamaConfig(hidden_act="gelu"), "hidden_act='gelu'.*'silu' is"),
        (Qwen2Config(use_sliding_window=True, max_window_layers=30, num_hidden_layers=32), "2 sliding-window layers"),
        (LlamaConfig(rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}), "scaling 'dynamic'"),
        (LlamaConfig(quantization_config={"quant_method": "gptq", "bits": 4}), "quantized with 'gptq'"),
    ],
)
def test_features_that_are_not_computed_are_refused_by_name(config: LlamaConfig, message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        from_transformers(config)


def test_sliding_window_size_without_window_layers_is_no_obstacle() -> None:
    assert from_transformers(Qwen2Config(use_sliding_window=False, sliding_window=128)).architecture == "Qwen2"


@pytest.mark.parametrize("model_type", ["mixtral", "qwen3_moe", "gemma2", "never-heard-of"])
def test_other_architectures_are_refused_with_the_supported_ones(tmp_path: Path, model_type: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    with pytest.raises(UnsupportedError, match=f"'{model_type}'.*Llama, Qwen2, Qwen3"):
        load_config(tmp_path)


def test_paths_that_hold_no_model_say_what_is_wanted(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "absent", tmp_path / "absent.gguf"):
        with pytest.raises(ConfigError, match=r"no model at .*config\.json.*\.gguf"):
            load_config(path)


@pytest.mark.parametrize("text", ["{", "[]", "{}", '"llama"'])
def test_a_broken_config_file_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=r"config\.json is no model configuration"):
        load_config(tmp_path)


def test_what_transformers_rejects_is_passed_on_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "hidden_size": "wide"}))
    with pytest.raises(ConfigError, match="transformers rejects") as caught:
        load_config(tmp_path)
    assert "\n" not in str(caught.value)


def test_saved_and_loaded_configurations_agree(tmp_path: Path) -> None:
    config = Qwen3Config(hidden_size=64, num_attention_heads=4, num_key_value_heads=2, head_dim=32)
    config.save_pretrained(tmp_path)
    assert load_config(tmp_path) == from_transformers(AutoConfig.from_pretrained(tmp_path))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("vocab_size", 0),
        ("hidden_size", 0),
        ("intermediate_size", -4),
        ("num_hidden_layers", 0),
        ("num_hidden_layers", -1),
        ("num_key_value_heads", 0),
        ("num_attention_heads", 6),
        ("max_position_embeddings", 0),
        ("rms_norm_eps", -1.0),
        ("rope_theta", 0),
        ("rope_theta", "x"),
        ("factor", 0.0),
    ],
)
def test_values_that_no_model_can_have_are_refused_by_name(tmp_path: Path, field: str, value: object) -> None:
    stored = {
        "model_type": "llama",
        "hidden_size": 96,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 8,
    }
    if field in ("rope_theta", "factor"):
        rotary = {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}
        stored["rope_parameters"] = rotary  # type: ignore[assignment]
        (tmp_path / "config.json").write_text(json.dumps(stored))
        load_config(tmp_path)
        rotary[field] = value  # type: ignore[assignment]
    else:
        stored[field] = value  # type: ignore[assignment]
    (tmp_path / "config.json").write_text(json.dumps(stored))
    with pytest.raises(ConfigError, match=f"Llama with {field}={value!r} .*is not supported"):
        load_config(tmp_path)
