from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from nvfp4_checkpoints import QUANTIZATION, Library, edit_config, save_nvfp4_model
from safetensors.torch import load_file, save_file
from tiny_models import ThreadGroup, make_model, run_ranks, save_model

from tpoverlap.attention import BlockTables
from tpoverlap.errors import ConfigError, UnsupportedError
from tpoverlap.model import checkpoint
from tpoverlap.model.config import from_transformers
from tpoverlap.model.decoder import Decoder
from tpoverlap.model.linears import DenseLinear
from tpoverlap.model.nvfp4_checkpoint import NVFP4CheckpointFactory, NVFP4Source
from tpoverlap.model.quantized_format import find_convention, read_quantization
from tpoverlap.model.reference import load_reference
from tpoverlap.model.runner import Runner
from tpoverlap.model.tensor_source import SafetensorsSource
from tpoverlap.quant import NVFP4Linear, nvfp4

LIBRARIES: tuple[Library, ...] = ("modelopt", "compressed-tensors")
PROMPT = torch.randint(90, (19,), generator=torch.Generator().manual_seed(1)).tolist()
CPU = torch.device("cpu")


def load(folder: Path, model: torch.nn.Module, group: object = None, dtype: torch.dtype = torch.float32) -> Decoder:
    quantization = read_quantization(folder)
    assert quantization is not None
    source = NVFP4Source(folder, find_convention(quantization))
    config = from_transformers(model.config)
    checkpoint.check_tensors(source, config, folder)
    factory = NVFP4CheckpointFactory(source, dtype, CPU)
    return checkpoint._Loader(config, source, factory, group, dtype, CPU).decoder(lambda done, total: None)


def logits_of(model: Decoder) -> torch.Tensor:
    model.allocate_kv_cache(16, 4)
    runner = Runner(model, BlockTables(16, 4), [PROMPT])
    return torch.cat([model.logits(chunk.hidden) for chunk in runner.prefill(8)])


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize(("family", "seed"), [("llama", 20), ("qwen3", 21), ("qwen2", 22)])
def test_logits_are_those_of_the_stored_values_on_any_number_of_ranks(
    tmp_path: Path, family: str, seed: int, library: Library, world_size: int
) -> None:
    model = save_nvfp4_model(tmp_path, library, family, seed)
    with torch.no_grad():
        expected = model(torch.tensor([PROMPT])).logits[0]

    def work(group: ThreadGroup) -> torch.Tensor:
        return logits_of(load(tmp_path, model, group))

    for logits in run_ranks(world_size, work):
        assert (logits - expected).abs().max() <= 2e-3 * expected.abs().max()


@pytest.mark.parametrize("library", LIBRARIES)
def test_fused_layers_carry_the_global_scale_of_each_part(tmp_path: Path, library: Library) -> None:
    model = save_nvfp4_model(tmp_path, library, "llama", 23)
    layer = load(tmp_path, model).get_submodule("layers.1")
    parameters = dict(model.named_parameters())
    for fused, parts in {
        "attention.qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        "mlp.gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    }.items():
        linear = layer.get_submodule(fused)
        assert isinstance(linear, NVFP4Linear)
        assert linear.global_scale.unique().numel() == len(parts)
        expected = torch.cat([parameters[f"model.layers.1.{part}.weight"] for part in parts])
        assert torch.equal(nvfp4.dequantize(linear.weight, torch.float32), expected)


@pytest.mark.parametrize("projection", ["gate_proj", "down_proj"])
def test_a_global_scale_a_row_follows_its_rows(tmp_path: Path, projection: str) -> None:
    model = save_nvfp4_model(tmp_path, "modelopt", "llama", 35)
    name = f"model.layers.0.mlp.{projection}"
    factors = torch.rand(model.get_submodule(name).weight.shape[0], generator=torch.Generator().manual_seed(1)) + 0.5
    edit_tensors(tmp_path, f"{name}.weight_scale_2", lambda t: t * factors)
    source = NVFP4Source(tmp_path, find_convention(QUANTIZATION["modelopt"]))
    stored = load_file(tmp_path / "model.safetensors")
    whole = nvfp4.from_modelopt(
        *(stored[f"{name}.{ending}"] for ending in ("weight", "weight_scale", "weight_scale_2"))
    )
    want = nvfp4.dequantize(whole, torch.float32)
    assert torch.equal(source.rows(f"{name}.weight", 3, 40), want[3:40])
    assert torch.equal(source.columns(f"{name}.weight", 16, 48), want[:, 16:48])


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_rank_reads_its_own_part_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, library: Library) -> None:
    sizes = {"num_attention_heads": 8, "num_key_value_heads": 4, "intermediate_size": 256, "hidden_size": 128}
    model = save_nvfp4_model(tmp_path, library, "llama", 24, **sizes)
    packed = sum(p.numel() for name, p in model.named_parameters() if name.endswith("_proj.weight")) // 2
    read: list[int] = []
    for method in ("rows", "columns"):
        original = getattr(SafetensorsSource, method)

        def spy(self: SafetensorsSource, name: str, start: int, stop: int, original: object = original) -> torch.Tensor:
            tensor = original(self, name, start, stop)  # type: ignore[operator]
            if tensor.dtype == torch.uint8:
                read.append(tensor.numel())
            return tensor

        monkeypatch.setattr(SafetensorsSource, method, spy)

    class Rank:
        rank_in_group = 1
        world_size = 4

    load(tmp_path, model, Rank())
    assert sum(read) == packed // 4


def test_layers_that_are_not_quantized_stay_dense(tmp_path: Path) -> None:
    """Attention ignored in layer 0, the value projection alone in layer 1."""
    ignored = ("layers.0.self_attn", "layers.1.self_attn.v_proj")
    model = save_nvfp4_model(
        tmp_path,
        "compressed-tensors",
        "llama",
        25,
        quantized=lambda name: name.endswith("_proj.weight") and not any(part in name for part in ignored),
    )
    decoder = load(tmp_path, model)
    dense = {name for name, module in decoder.named_modules() if isinstance(module, DenseLinear)}
    assert dense == {"layers.0.attention.qkv", "layers.0.attention.o.linear", "layers.1.attention.qkv"}
    with torch.no_grad():
        expected = model(torch.tensor([PROMPT])).logits[0]
    assert (logits_of(decoder) - expected).abs().max() <= 2e-3 * expected.abs().max()


def test_a_quantized_output_projection_is_dequantized(tmp_path: Path) -> None:
    model = save_nvfp4_model(
        tmp_path, "modelopt", "llama", 26, quantized=lambda name: name == "lm_head.weight", tie_word_embeddings=False
    )
    assert torch.equal(load(tmp_path, model).lm_head, model.lm_head.weight)


def test_columns_off_the_group_borders_have_the_stored_values(tmp_path: Path) -> None:
    model = save_nvfp4_model(tmp_path, "modelopt", "llama", 27)
    source = NVFP4Source(tmp_path, find_convention(QUANTIZATION["modelopt"]))
    name = "model.layers.0.mlp.down_proj.weight"
    assert torch.equal(source.columns(name, 5, 41), dict(model.named_parameters())[name][:, 5:41])


def test_values_beyond_fp16_are_refused_by_name_unless_bf16_was_asked(tmp_path: Path) -> None:
    model = save_nvfp4_model(tmp_path, "modelopt", "llama", 28)
    edit_tensors(tmp_path, "model.layers.1.mlp.down_proj.weight_scale_2", lambda t: t * 0 + 1e3)
    with pytest.raises(ConfigError, match=r"model\.layers\.1\.mlp\.down_proj\.weight.*overflows FP16"):
        load(tmp_path, model, dtype=torch.float16)
    load(tmp_path, model, dtype=torch.bfloat16)


def edit_tensors(folder: Path, name: str, edit: object) -> None:
    tensors = load_file(folder / "model.safetensors")
    value = edit(tensors.pop(name))  # type: ignore[operator]
    if value is not None:
        tensors[name] = value
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("ending", "edit", "error", "message"),
    [
        ("weight_scale", lambda t: None, ConfigError, "no tensor model.layers.0.mlp.up_proj.weight_scale"),
        ("weight_scale", lambda t: t[:, :3].contiguous(), ConfigError, "up_proj.weight is no NVFP4 weight"),
        (
            "weight_scale",
            lambda t: t.repeat(1, 2),
            ConfigError,
            r"no NVFP4 weight.*weight_scale is \[80, 12\], not \[80, 6\]",
        ),
        ("weight_scale", lambda t: t.repeat(2, 1), ConfigError, r"no NVFP4 weight.*weight_scale is \[160, 6\]"),
        ("weight_scale_2", lambda t: t.repeat(81), ConfigError, r"weight_scale_2 is \[81\], not one number or \[80\]"),
        ("weight", lambda t: t.to(torch.int8), ConfigError, "up_proj.weight is no NVFP4 weight"),
        ("weight", lambda t: t[:, :8].contiguous(), ConfigError, r"up_proj\.weight is \[80, 16\]"),
        ("weight_scale_2", lambda t: None, UnsupportedError, "not as NVFP4"),
    ],
)
def test_broken_weights_are_named(
    tmp_path: Path, ending: str, edit: object, error: type[Exception], message: str
) -> None:
    model = save_nvfp4_model(tmp_path, "modelopt", "llama", 29)
    edit_tensors(tmp_path, f"model.layers.0.mlp.up_proj.{ending}", edit)
    with pytest.raises(error, match=message):
        load(tmp_path, model)


def test_smoothed_checkpoints_are_refused(tmp_path: Path) -> None:
    model = save_nvfp4_model(tmp_path, "modelopt", "llama", 30)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.0.mlp.up_proj.pre_quant_scale"] = torch.ones(96)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UnsupportedError, match="pre_quant_scale"):
        load(tmp_path, model)


@pytest.mark.parametrize(
    ("quantization", "named"),
    [
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, "'modelopt' as 'FP8'"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4_AWQ"}, "NVFP4_AWQ"),
        ({"quant_method": "compressed-tensors", "format": "pack-quantized"}, "'pack-quantized'"),
        ({"quant_method": "compressed-tensors", "format": "mixed-precision"}, "mixed-precision"),
        (
            QUANTIZATION["compressed-tensors"] | {"transform_config": {"config_groups": {"R1": {"type": "hadamard"}}}},
            "transforms",
        ),
        ({"quant_method": "gptq", "bits": 4}, "'gptq'"),
        ({"bits": 4}, "None"),
        ({"quant_algo": "NVFP4", "group_size": 32}, "groups of 32"),
        (
            {"quant_method": "modelopt", "quant_algo": "NVFP4", "config_groups": {"g": {"weights": {"group_size": 8}}}},
            "groups of 16, 8",
        ),
    ],
)
def test_other_quantizations_are_refused_by_name(quantization: dict[str, object], named: str) -> None:
    with pytest.raises(UnsupportedError, match=named):
        find_convention(quantization)


def test_quantization_is_read_from_either_file(tmp_path: Path) -> None:
    save_model(tmp_path, "llama", 31)
    assert read_quantization(tmp_path) is None
    older = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4", "group_size": 16}}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(older))
    found = read_quantization(tmp_path)
    assert found == older["quantization"]
    assert find_convention(found).library == "nvidia-modelopt"
    edit_config(tmp_path, lambda config: config.update(quantization_config=QUANTIZATION["compressed-tensors"]))
    found = read_quantization(tmp_path)
    assert found is not None
    assert find_convention(found).library == "compressed-tensors"
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"config\.json"):
        read_quantization(tmp_path)


def test_the_writer_of_these_checkpoints_keeps_the_other_parameters(tmp_path: Path) -> None:
    model = save_nvfp4_model(tmp_path, "modelopt", "qwen3", 32)
    original = dict(make_model("qwen3", 32).named_parameters())
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, original[name]) == (not name.endswith("_proj.weight")), name


# Through the functions that every checkpoint is loaded by


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_load_decoder_takes_the_stored_weights(tmp_path: Path, family: str, library: Library) -> None:
    model = save_nvfp4_model(tmp_path, library, family, 33)
    with torch.no_grad():
        expected = model(torch.tensor([PROMPT])).logits[0]
        referred = load_reference(tmp_path, weights="nvfp4")(torch.tensor([PROMPT])).logits[0]
    assert (referred - expected).abs().max() <= 1e-4 * expected.abs().max()
    packed = checkpoint.load_decoder(tmp_path, weights="nvfp4")
    assert sum(isinstance(module, NVFP4Linear) for module in packed.modules()) == 8
    dense = checkpoint.load_decoder(tmp_path, weights="fp32")
    assert not any(isinstance(module, NVFP4Linear) for module in dense.modules())
    for decoder in (packed, dense):
        assert (logits_of(decoder) - expected).abs().max() <= 2e-3 * expected.abs().max()


def test_load_decoder_refuses_other_quantizations(tmp_path: Path) -> None:
    save_model(tmp_path, "llama", 34)
    edit_config(tmp_path, lambda config: config.update(quantization_config={"quant_method": "gptq", "bits": 4}))
    with pytest.raises(UnsupportedError, match=r"'gptq'.*unquantized"):
        checkpoint.load_decoder(tmp_path)
