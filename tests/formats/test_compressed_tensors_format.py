"""NVFP4 as compressed-tensors (llm-compressor) packs it, and checkpoints that it writes.

It divides by its global scale where we multiply by the reciprocal, so FP32 products may differ in the last bit.
"""

from pathlib import Path

import pytest
import torch
from compressed_tensors.compressors import ModelCompressor
from compressed_tensors.compressors.nvfp4.base import NVFP4PackedCompressor
from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config, preset_name_to_scheme
from compressed_tensors.quantization.lifecycle.forward import dequantize as their_dequantize
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
from test_nvfp4_checkpoint import PROMPT, load, logits_of
from tiny_models import ThreadGroup, make_model, run_ranks

from tpoverlap.model.nvfp4_checkpoint import NVFP4Source
from tpoverlap.model.quantized_format import find_convention, read_quantization
from tpoverlap.quant.nvfp4 import dequantize, from_compressed_tensors

SCHEME = preset_name_to_scheme("NVFP4A16", targets=["Linear"])


def calibrate(w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(weight_scale [N, K // 16], weight_global_scale [1]) as the library computes them from a weight's extrema."""
    global_scale = generate_gparam(w.amin(), w.amax())
    groups = w.unflatten(1, (-1, 16))
    scale, _ = calculate_qparams(groups.amin(2), groups.amax(2), SCHEME.weights, global_scale=global_scale)
    return scale, global_scale


def pack(seed: int) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    w = torch.randn(256, 1024, generator=g) * torch.randn(256, 1, generator=g).exp() / 16
    scale, global_scale = calibrate(w)
    state = {"weight": w, "weight_scale": scale, "weight_global_scale": global_scale}
    return NVFP4PackedCompressor.compress(state, SCHEME)


@pytest.mark.parametrize("seed", range(6))
def test_values_equal_its_own_after_rounding_to_bf16(seed: int, record_property, capsys) -> None:
    state = pack(seed)
    weight = from_compressed_tensors(state["weight_packed"], state["weight_scale"], state["weight_global_scale"])
    theirs = {}
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        codes = unpack_fp4_from_uint8(state["weight_packed"], *weight.shape, dtype=torch.float32)
        theirs[dtype] = their_dequantize(
            x_q=codes,
            scale=state["weight_scale"].float(),
            args=SCHEME.weights,
            global_scale=state["weight_global_scale"],
            dtype=torch.float32,
        ).to(dtype)
    ours = dequantize(weight, torch.float32)
    assert torch.allclose(ours, theirs[torch.float32], rtol=2**-22, atol=0)
    assert torch.equal(ours.to(torch.bfloat16), theirs[torch.bfloat16])
    fp32 = float((ours != theirs[torch.float32]).float().mean())
    fp16 = int((ours.half() != theirs[torch.float16]).sum())
    record_property("fp32_different", fp32)
    record_property("fp16_different", fp16)
    with capsys.disabled():
        print(f"\ncompressed-tensors, seed {seed}: {fp32:.1%} of FP32, {fp16} of {ours.numel()} FP16 values differ")
    assert fp32 < 0.5
    assert fp16 <= ours.numel() * 1e-3
    decompressed = NVFP4PackedCompressor.decompress(state, SCHEME)["weight"]
    assert torch.equal(dequantize(weight, torch.bfloat16), decompressed)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_checkpoints_that_it_writes_load_on_any_number_of_ranks(tmp_path: Path, family: str) -> None:
    model = make_model(family, 6)
    config = QuantizationConfig(config_groups={"group_0": SCHEME}, ignore=["lm_head"], format="nvfp4-pack-quantized")
    apply_quantization_config(model, config)
    for module in model.modules():
        if hasattr(module, "weight_global_scale"):
            scale, global_scale = calibrate(module.weight.data)
            module.weight_scale.data = scale
            module.weight_global_scale.data = global_scale
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(tmp_path)
    compressor.update_config(str(tmp_path))
    quantization = read_quantization(tmp_path)
    assert quantization is not None
    assert quantization["format"] == "nvfp4-pack-quantized"
    source = NVFP4Source(tmp_path, find_convention(quantization))
    reference = make_model(family, 6)
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
