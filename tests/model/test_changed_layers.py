"""A decoder whose layers and norms are listened to, replaced or used alone computes what it did, through them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import save_model
from torch import nn

from tpoverlap.attention import BlockTables
from tpoverlap.model.checkpoint import load_decoder
from tpoverlap.model.decoder import Decoder
from tpoverlap.model.layers import DecoderLayer, RMSNorm
from tpoverlap.model.runner import Runner

PROMPT = list(range(3, 24))


def hidden_states(model: Decoder) -> torch.Tensor:
    model.allocate_kv_cache(16, 4)
    return torch.cat([chunk.hidden for chunk in Runner(model, BlockTables(16, 4), [PROMPT]).prefill(9)])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    save_model(folder, "qwen3", 3, num_hidden_layers=3)
    return folder


class Counted(nn.Module):
    """Another module in a module's place."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.calls = inner, 0

    def forward(self, *arguments: Any) -> Any:
        self.calls += 1
        return self.inner(*arguments)


PLACES: dict[str, Callable[[Decoder], tuple[nn.Module, str]]] = {
    "first layer": lambda model: (model.layers, "0"),
    "last layer": lambda model: (model.layers, "2"),
    "norm before attention": lambda model: (model.layers[1], "input_norm"),
    "norm before the MLP": lambda model: (model.layers[1], "post_attention_norm"),
    "last norm": lambda model: (model, "norm"),
}


@pytest.mark.parametrize("place", PLACES)
def test_hooks_are_called_and_replaced_modules_run(folder: Path, place: str) -> None:
    expected = hidden_states(load_decoder(folder, weights="fp32"))
    model = load_decoder(folder, weights="fp32")
    parent, name = PLACES[place](model)
    module = parent.get_submodule(name)
    seen: list[torch.Tensor] = []
    for hooked in (
        module.register_forward_hook(lambda module, inputs, output: seen.append(output)),
        module.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0])),
        nn.modules.module.register_module_forward_hook(
            lambda called, inputs, output: seen.append(output) if called is module else None
        ),
    ):
        with hooked:
            before = len(seen)
            assert torch.equal(hidden_states(model), expected)
            assert len(seen) - before >= 3
    counted = Counted(module)
    parent.add_module(name, counted)
    assert torch.equal(hidden_states(model), expected)
    assert counted.calls == 3
    parent.add_module(name, module)
    forward = module.forward
    module.forward = lambda *arguments: -forward(*arguments)  # type: ignore[method-assign]
    assert not torch.equal(hidden_states(model), expected)


def test_a_hook_changes_what_a_layer_gives(folder: Path) -> None:
    model = load_decoder(folder, weights="fp32")
    for layer in model.layers:
        layer.register_forward_hook(lambda module, inputs, output: torch.zeros_like(output))
    assert not hidden_states(model).any()


def test_a_layer_alone_gives_the_sum(folder: Path) -> None:
    model = load_decoder(folder, weights="fp32")
    first = model.layers[0]
    assert isinstance(first, DecoderLayer)
    seen: list[tuple[Any, torch.Tensor]] = []
    with first.register_forward_hook(lambda module, inputs, output: seen.append((inputs, output))):
        hidden_states(model)
    model.allocate_kv_cache(16, 4)
    (hidden, rotary, metadata), output = seen[0]
    with torch.inference_mode():
        attended = hidden + first.attention(first.input_norm(hidden), rotary, metadata)
        assert isinstance(first.post_attention_norm, RMSNorm)
        assert torch.equal(output, attended + first.mlp(first.post_attention_norm(attended)))
