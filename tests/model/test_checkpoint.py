from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import ThreadGroup, make_model, run_ranks, save_model
from transformers import AutoConfig
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from tpoverlap.attention import BlockTables
from tpoverlap.errors import ConfigError, UnsupportedError
from tpoverlap.model.checkpoint import load_decoder
from tpoverlap.model.config import from_transformers, load_config
from tpoverlap.model.decoder import Decoder
from tpoverlap.model.linears import DenseLinear
from tpoverlap.model.open_source import open_source
from tpoverlap.model.reference import load_reference
from tpoverlap.model.runner import Runner
from tpoverlap.model.tensor_source import SafetensorsSource
from tpoverlap.quant import NVFP4Linear

gguf = pytest.importorskip("gguf")
GGMLQuantizationType, GGUFWriter, quants = gguf.GGMLQuantizationType, gguf.GGUFWriter, gguf.quants

PROMPT = torch.randint(90, (19,), generator=torch.Generator().manual_seed(1)).tolist()


def logits_of(model: Decoder) -> torch.Tensor:
    model.allocate_kv_cache(16, 4)
    runner = Runner(model, BlockTables(16, 4), [PROMPT])
    return torch.cat([model.logits(chunk.hidden) for chunk in runner.prefill(8)])


def transformers_logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.tensor([PROMPT])).logits[0]


# NVFP4


@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
@pytest.mark.parametrize(("family", "seed"), [("llama", 0), ("qwen2", 1), ("qwen3", 2)])
def test_nvfp4_weights_have_the_same_values_on_any_number_of_ranks(
    tmp_path: Path, family: str, seed: int, world_size: int
) -> None:
    save_model(
        tmp_path, family, seed, intermediate_size=75, num_attention_heads=9, num_key_value_heads=3, hidden_size=144
    )
    expected = transformers_logits(load_reference(tmp_path, weights="nvfp4"))
    unquantized = transformers_logits(load_reference(tmp_path, weights="fp32"))
    assert (expected - unquantized).abs().max() > 0.05  # or the comparison below would show nothing

    def work(group: ThreadGroup) -> torch.Tensor:
        return logits_of(load_decoder(tmp_path, weights="nvfp4", group=group))

    for logits in run_ranks(world_size, work):
        assert (logits - expected).abs().max() <= 1e-3


def test_nvfp4_keeps_embeddings_norms_and_output_projection_in_fp32_on_cpu(tmp_path: Path) -> None:
    save_model(tmp_path, "qwen2", 3)
    model = load_decoder(tmp_path)
    quantized = {name for name, module in model.named_modules() if isinstance(module, NVFP4Linear)}
    dense = {name for name, module in model.named_modules() if isinstance(module, DenseLinear)}
    linears = {"attention.qkv", "attention.o.linear", "mlp.gate_up", "mlp.down.linear"}
    assert quantized == {f"layers.{layer}.{name}" for layer in (0, 1) for name in linears}
    assert not dense
    for name, tensor in model.named_buffers():
        if not name.endswith(("codes", "scales", "global_scale")):
            assert tensor.dtype == torch.float32, name
    fused = model.get_submodule("layers.0.attention.qkv")
    assert fused.global_scale.unique().numel() == 3  # those of Q, K and V, one a row


@pytest.mark.parametrize(
    ("overrides", "named"), [({"hidden_size": 72}, "hidden_size=72"), ({"head_dim": 8}, "head_dim=8")]
)
def test_nvfp4_refuses_sizes_off_the_group_borders(tmp_path: Path, overrides: dict[str, int], named: str) -> None:
    save_model(tmp_path, "llama", 4, **overrides)
    with pytest.raises(UnsupportedError, match=f"{named}.*multiples of 16"):
        load_decoder(tmp_path, weights="nvfp4")
    assert logits_of(load_decoder(tmp_path, weights="fp32")).isfinite().all()


def test_nvfp4_names_the_tensor_that_is_not_finite(tmp_path: Path) -> None:
    save_model(tmp_path, "llama", 5)
    edit_tensors(tmp_path, lambda t: t["model.layers.1.mlp.up_proj.weight"].view(-1)[7:8].fill_(float("nan")))
    with pytest.raises(ConfigError, match=r"model\.layers\.1\.mlp\.up_proj\.weight: weight\[0, 7\] is nan"):
        load_decoder(tmp_path, weights="nvfp4")


# Folders


def edit_tensors(folder: Path, edit: object) -> None:
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)  # type: ignore[operator]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def test_a_rank_reads_its_own_part_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = save_model(tmp_path, "llama", 6, num_attention_heads=8, num_key_value_heads=4, intermediate_size=256)
    linear = sum(p.numel() for name, p in model.named_parameters() if "_proj" in name or "lm_head" in name)
    read: list[tuple[str, int]] = []
    for method in ("rows", "columns"):
        original = getattr(SafetensorsSource, method)

        def spy(self: SafetensorsSource, name: str, start: int, stop: int, original: object = original) -> torch.Tensor:
            tensor = original(self, name, start, stop)  # type: ignore[operator]
            read.append((name, tensor.numel()))
            return tensor

        monkeypatch.setattr(SafetensorsSource, method, spy)

    class Rank:
        rank_in_group = 1
        world_size = 4

    load_decoder(tmp_path, weights="fp32", group=Rank())  # type: ignore[arg-type]
    mine = sum(count for name, count in read if "_proj" in name or "lm_head" in name)
    assert mine <= linear / 4 + model.config.hidden_size  # the vocabulary of 101 does not divide by 4


def test_checkpoints_in_several_files_load_through_their_index(tmp_path: Path) -> None:
    reference = make_model("qwen2", 8)
    reference.save_pretrained(tmp_path, max_shard_size="100KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    assert (logits_of(load_decoder(tmp_path, weights="fp32")) - transformers_logits(reference)).abs().max() <= 1e-3


def test_progress_counts_the_layers(tmp_path: Path) -> None:
    save_model(tmp_path, "llama", 9, num_hidden_layers=3)
    calls: list[tuple[int, int]] = []
    load_decoder(tmp_path, progress=lambda done, total: calls.append((done, total)))
    assert calls == [(0, 3), (1, 3), (2, 3), (3, 3)]


def test_missing_and_misshapen_tensors_are_named(tmp_path: Path) -> None:
    save_model(tmp_path, "qwen3", 10)
    backup = tmp_path / "backup"
    shutil.copytree(tmp_path, backup)
    edit_tensors(tmp_path, lambda t: t.pop("model.layers.1.self_attn.k_norm.weight"))
    with pytest.raises(ConfigError, match=r"no tensor model\.layers\.1\.self_attn\.k_norm\.weight.*Qwen3"):
        load_decoder(tmp_path)
    edit_tensors(backup, lambda t: t.update({"model.norm.weight": torch.ones(5)}))
    with pytest.raises(ConfigError, match=r"model\.norm\.weight is \[5\].*\[96\]"):
        load_decoder(backup)


def test_unreadable_weights_are_a_clear_error(tmp_path: Path) -> None:
    save_model(tmp_path, "llama", 11)
    (tmp_path / "model.safetensors").write_bytes(b"not safetensors at all")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_decoder(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"no \*\.safetensors file"):
        load_decoder(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "gone.safetensors"}}))
    with pytest.raises(ConfigError, match="cannot be read"):
        load_decoder(tmp_path)
    for text in ("{}", "[]", '{"weight_map": 5}'):
        (tmp_path / "model.safetensors.index.json").write_text(text)
        with pytest.raises(ConfigError, match=r"cannot be read: model\.safetensors\.index\.json has no weight_map"):
            load_decoder(tmp_path)


def test_an_unknown_weight_format_is_refused(tmp_path: Path) -> None:
    save_model(tmp_path, "llama", 12)
    with pytest.raises(ConfigError, match=r"weights='int8'.*fp32, bf16, fp16, nvfp4"):
        load_decoder(tmp_path, weights="int8")  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["model.layers.0.mlp.down_proj.weight", "model.norm.weight"])
def test_values_that_overflow_fp16_are_refused_by_name_and_load_as_bf16(tmp_path: Path, name: str) -> None:
    save_model(tmp_path, "llama", 13)
    edit_tensors(tmp_path, lambda t: t[name].view(-1)[3:4].fill_(7e4))
    with pytest.raises(ConfigError, match=f"{name.replace('.', '[.]')} has values that overflow FP16.*bf16"):
        load_decoder(tmp_path, weights="fp16")
    load_decoder(tmp_path, weights="bf16")


# GGUF files


def write_gguf(path: Path, family: str, model: torch.nn.Module, *, q4: bool, **extra: object) -> None:
    """What llama.cpp's converter writes for such a model: its names, and Llama's rotary pairs side by side."""
    config = model.config
    writer = GGUFWriter(path, family)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    if family == "llama":
        writer.add_rope_dimension_count(config.head_dim)
    for key, value in extra.items():
        writer.add_key_value(key.replace("__", "."), value, *_gguf_type(value))
    names = {
        "model.embed_tokens": "token_embd",
        "model.norm": "output_norm",
        "lm_head": "output",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "self_attn.q_norm": "attn_q_norm",
        "self_attn.k_norm": "attn_k_norm",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
    }
    for name, tensor in model.state_dict().items():
        base, suffix = name.rsplit(".", 1)
        stored = names.get(base) or f"blk.{base.split('.')[2]}.{names[base.split('.', 3)[3]]}"
        values = tensor.numpy()
        if family == "llama" and stored.endswith(("attn_q", "attn_k")):
            head_dim = config.head_dim
            values = np.stack(np.split(values.reshape(-1, head_dim, values.shape[1]), 2, axis=1), axis=2).reshape(
                values.shape
            )
        if q4 and values.ndim == 2 and values.shape[1] % 32 == 0:
            packed = quants.quantize(values, GGMLQuantizationType.Q4_1)
            writer.add_tensor(f"{stored}.{suffix}", packed, raw_dtype=GGMLQuantizationType.Q4_1)
        else:
            writer.add_tensor(f"{stored}.{suffix}", np.ascontiguousarray(values))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _gguf_type(value: object) -> tuple[object, ...]:
    from gguf import GGUFValueType

    return (GGUFValueType.STRING if isinstance(value, str) else GGUFValueType.UINT32,)


@pytest.mark.parametrize(("family", "head_dim"), [("llama", 24), ("qwen2", 16), ("qwen3", 128)])
def test_gguf_configuration_is_that_of_transformers(tmp_path: Path, family: str, head_dim: int) -> None:
    model = make_model(family, 23, head_dim=head_dim, tie_word_embeddings=family == "qwen2")
    write_gguf(tmp_path / "model.gguf", family, model, q4=False)
    assert load_config(tmp_path / "model.gguf") == from_transformers(
        AutoConfig.from_pretrained(tmp_path, gguf_file="model.gguf")
    )


def test_the_head_size_of_a_gguf_file_is_that_of_its_tensors(tmp_path: Path) -> None:
    model = make_model("qwen3", 24, head_dim=32)
    write_gguf(tmp_path / "model.gguf", "qwen3", model, q4=False)
    expected = transformers_logits(model)
    assert (logits_of(load_decoder(tmp_path / "model.gguf", weights="fp32")) - expected).abs().max() <= 1e-3


@pytest.mark.parametrize("q4", [False, True])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_gguf_weights_are_those_that_transformers_reads(tmp_path: Path, family: str, q4: bool) -> None:
    model = make_model(family, 20, head_dim=128 if family == "qwen3" else 16)
    path = tmp_path / "model.gguf"
    write_gguf(path, family, model, q4=q4)
    expected = load_gguf_checkpoint(path, return_tensors=True, model_to_load=model)["tensors"]
    source = open_source(path)
    assert set(expected) == set(model.state_dict())
    for name, tensor in expected.items():
        assert torch.equal(source.rows(name, 0, tensor.shape[0]), tensor), name
    assert source.shape("model.layers.7.mlp.up_proj.weight") is None
    q_name = "model.layers.1.self_attn.q_proj.weight"
    head_dim = model.config.head_dim if family != "qwen2" else 16
    assert torch.equal(source.rows(q_name, head_dim, 3 * head_dim), expected[q_name][head_dim : 3 * head_dim])
    assert torch.equal(source.columns(q_name, 32, 64), expected[q_name][:, 32:64])
    if not q4:
        assert torch.equal(expected[q_name], model.state_dict()[q_name])


@pytest.mark.parametrize("world_size", [1, 2, 8])
@pytest.mark.parametrize("q4", [False, True])
def test_a_gguf_model_runs_like_the_one_that_it_was_made_from(tmp_path: Path, q4: bool, world_size: int) -> None:
    model = make_model("llama", 21, num_attention_heads=9, num_key_value_heads=3, hidden_size=288, head_dim=32)
    path = tmp_path / "model.gguf"
    write_gguf(path, "llama", model, q4=q4)
    model.load_state_dict(load_gguf_checkpoint(path, return_tensors=True, model_to_load=model)["tensors"])

    def work(group: ThreadGroup) -> torch.Tensor:
        return logits_of(load_decoder(path, weights="fp32", group=group))

    for logits in run_ranks(world_size, work):
        assert (logits - transformers_logits(model)).abs().max() <= 1e-3


@pytest.mark.parametrize(
    ("family", "extra", "message"),
    [
        ("mamba", {}, "'mamba' is not supported.*Llama"),
        ("llama", {"llama__expert_count": 8}, "mixture of experts"),
        ("llama", {"llama__rope__scaling__type": "linear"}, "scales its rotary positions.*Hugging Face folder"),
    ],
)
def test_gguf_files_of_other_models_are_refused(
    tmp_path: Path, family: str, extra: dict[str, object], message: str
) -> None:
    write_gguf(tmp_path / "model.gguf", family, make_model("llama", 22), q4=False, **extra)
    with pytest.raises(UnsupportedError, match=message):
        load_config(tmp_path / "model.gguf")


@pytest.mark.parametrize("content", [b"", b"GGUF", b"something else entirely" * 10])
def test_files_that_are_no_gguf_are_a_clear_error(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.gguf").write_bytes(content)
    with pytest.raises(ConfigError, match=r"model\.gguf cannot be read as a GGUF file"):
        load_decoder(tmp_path / "model.gguf")
