"""NVFP4 as nvidia-modelopt packs it: values equal to its own dequantization, and its exported checkpoints load."""

from pathlib import Path

import modelopt.torch.quantization as mtq
import pytest
import torch
from modelopt.torch.export import export_hf_checkpoint
from modelopt.torch.quantization.qtensor import NVFP4QTensor
from test_nvfp4_checkpoint import PROMPT, load, logits_of
from tiny_models import ThreadGroup, make_model, run_ranks

from tpoverlap.model.nvfp4_checkpoint import NVFP4Source
from tpoverlap.model.quantized_format import find_convention, read_quantization
from tpoverlap.quant.nvfp4 import dequantize, from_modelopt, quantize

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}


def random_weight(seed: int, dtype: torch.dtype) -> torch.Tensor:
    g = torch.Generator().manual_seed(seed)
    return (torch.randn(96, 256, generator=g) * torch.randn(96, 1, generator=g).exp() / 16).to(dtype)


@pytest.mark.parametrize("stored", DTYPES, ids=str)
@pytest.mark.parametrize("seed", [1, 2])
def test_values_equal_its_own_dequantization(stored: torch.dtype, seed: int) -> None:
    packed, scale, scale_2 = NVFP4QTensor.quantize(random_weight(seed, stored), 16)
    weight = from_modelopt(packed._quantized_data, scale, scale_2)
    for dtype in DTYPES:
        theirs = packed.dequantize(dtype, scale=scale, double_scale=scale_2, block_sizes={-1: 16})
        assert torch.equal(dequantize(weight, dtype), theirs), dtype


@pytest.mark.parametrize("seed", [3, 4])
def test_quantization_agrees(seed: int) -> None:
    """Same global scale, same group scales, same codes for all but quotients that differ in rounding at a tie."""
    w = random_weight(seed, torch.float32)
    packed, scale, scale_2 = NVFP4QTensor.quantize(w, 16)
    ours = quantize(w)
    assert torch.allclose(ours.global_scale, scale_2, rtol=2**-22, atol=0)
    same_scales = ours.scales.view(torch.uint8) == scale.view(torch.uint8)
    assert same_scales.float().mean() > 0.999
    same_codes = dequantize(ours, torch.float32) == dequantize(
        from_modelopt(packed._quantized_data, scale, scale_2), torch.float32
    )
    assert same_codes.float().mean() > 0.99


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_exported_checkpoints_load_on_any_number_of_ranks(tmp_path: Path, family: str) -> None:
    model = make_model(family, 5).to(torch.bfloat16)
    model.config.architectures = [ARCHITECTURES[family]]
    model = mtq.quantize(model, mtq.NVFP4_DEFAULT_CFG, lambda m: m(torch.tensor([PROMPT])))
    export_hf_checkpoint(model, export_dir=tmp_path)
    quantization = read_quantization(tmp_path)
    assert quantization is not None
    assert quantization["quant_algo"] == "NVFP4"
    source = NVFP4Source(tmp_path, find_convention(quantization))
    reference = make_model(family, 5)
    with torch.no_grad():
        for name, parameter in reference.named_parameters():
            assert source.is_packed(name) == name.endswith("_proj.weight")
            parameter.copy_(source.rows(name, 0, parameter.shape[0]))
        expected = reference(torch.tensor([PROMPT])).logits[0]
    for ranks in (1, 2, 3):

        def work(group: ThreadGroup) -> torch.Tensor:
            return logits_of(load(tmp_path, reference, group))

        for logits in run_ranks(ranks, work):
            assert (logits - expected).abs().max() <= 2e-3 * expected.abs().max()
