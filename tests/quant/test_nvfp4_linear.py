"""NVFP4Linear and the workspace that layers share."""

import copy
import io
import threading
import weakref

import pytest
import torch
from nvfp4_reference import random_weight

from tpoverlap.errors import ConfigError
from tpoverlap.quant import DequantWorkspace, NVFP4Linear
from tpoverlap.quant.nvfp4 import concat_rows, dequantize, quantize

DTYPES = (torch.float16, torch.bfloat16, torch.float32)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("leading", [(), (3,), (2, 5)])
def test_equals_the_dense_layer(dtype: torch.dtype, bias: bool, leading: tuple[int, ...]) -> None:
    g = torch.Generator().manual_seed(41)
    weight = random_weight(24, 64, seed=42, per_row=True)
    b = torch.randn(24, generator=g) if bias else None
    x = torch.randn(*leading, 64, generator=g).to(dtype)
    layer = NVFP4Linear(weight, b, dtype=dtype)
    wanted = torch.nn.functional.linear(x, dequantize(weight, dtype), None if b is None else b.to(dtype))
    assert torch.equal(layer(x), wanted)


def test_pieces_of_a_batch_share_each_dequantized_weight() -> None:
    """Layer by layer, piece 0 runs a segment's two linears and piece 1 the same two, twice a layer."""
    workspace = DequantWorkspace()
    shapes = {"qkv": (48, 32), "o": (32, 48), "gate_up": (128, 32), "down": (32, 64)}
    layers = [
        {
            name: NVFP4Linear(random_weight(*shape, seed=100 * i + j), dtype=torch.float32, workspace=workspace)
            for j, (name, shape) in enumerate(shapes.items())
        }
        for i in range(3)
    ]
    asked = 0
    for _chunk in range(2):
        for layer in layers:
            for segment in (("qkv", "o"), ("gate_up", "down")):
                for piece in range(3):
                    for name in segment:
                        linear = layer[name]
                        x = torch.randn(4, linear.in_features, generator=torch.Generator().manual_seed(piece))
                        wanted = x @ dequantize(linear.weight, torch.float32).T
                        assert torch.allclose(linear(x), wanted, atol=1e-4)
                        asked += 1
    assert asked == 2 * 3 * 4 * 3
    assert workspace.dequantizations == 2 * 3 * 4


def test_capacity_one_keeps_only_the_last_weight() -> None:
    workspace = DequantWorkspace(capacity=1)
    a, b = (random_weight(8, 32, seed=s) for s in (1, 2))
    for weight in (a, a, b, b, a):
        assert torch.equal(workspace.dense(weight, torch.float32), dequantize(weight, torch.float32))
    assert workspace.dequantizations == 3


def test_buffers_are_reused_and_grow() -> None:
    workspace = DequantWorkspace(capacity=1)
    large = workspace.dense(random_weight(16, 64, seed=1), torch.float32)
    address = large.data_ptr()
    assert workspace.dense(random_weight(8, 32, seed=2), torch.float16).data_ptr() == address
    grown = random_weight(32, 64, seed=3)
    assert torch.equal(workspace.dense(grown, torch.float32), dequantize(grown, torch.float32))


def test_dtypes_of_one_weight_are_kept_apart() -> None:
    workspace, weight = DequantWorkspace(), random_weight(8, 32, seed=4)
    for dtype in (torch.float16, torch.bfloat16, torch.float16, torch.bfloat16):
        assert workspace.dense(weight, dtype).dtype == dtype
    assert workspace.dequantizations == 2


def test_a_weight_changed_in_place_is_dequantized_again() -> None:
    workspace, weight = DequantWorkspace(), random_weight(8, 32, seed=5)
    workspace.dense(weight, torch.float32)
    for part in (weight.codes, weight.scales.view(torch.uint8), weight.global_scale):
        part.zero_() if part is not weight.codes else part.fill_(0x22)
        assert torch.equal(workspace.dense(weight, torch.float32), dequantize(weight, torch.float32))
    assert workspace.dequantizations == 4


def test_a_row_slice_that_starts_at_the_same_address_is_another_weight() -> None:
    workspace, weight = DequantWorkspace(), random_weight(8, 32, seed=6)
    assert workspace.dense(weight, torch.float32).shape == (8, 32)
    part = weight.slice_rows(0, 4)
    assert torch.equal(workspace.dense(part, torch.float32), dequantize(part, torch.float32))


def test_load_state_dict_reaches_the_next_forward() -> None:
    a, b = (NVFP4Linear(random_weight(8, 32, seed=s), dtype=torch.float32) for s in (1, 2))
    x = torch.ones(2, 32)
    before = a(x)
    a.load_state_dict(b.state_dict())
    assert torch.equal(a(x), b(x))
    assert not torch.equal(a(x), before)


def test_inference_mode_and_plain_mode_share_buffers() -> None:
    workspace = DequantWorkspace(capacity=1)
    first, second = (
        NVFP4Linear(random_weight(8, 32, seed=s), dtype=torch.float32, workspace=workspace) for s in (1, 2)
    )
    x = torch.ones(2, 32)
    with torch.inference_mode():
        inside = first(x).clone()
    second(x)
    assert torch.equal(first(x), inside)


def test_clear_frees_and_forgets() -> None:
    workspace, weight = DequantWorkspace(), random_weight(8, 32, seed=7)
    workspace.dense(weight, torch.float32)
    workspace.clear()
    workspace.dense(weight, torch.float32)
    assert workspace.dequantizations == 2


@pytest.mark.parametrize("capacity", [0, -1, 1.5, True])
def test_wrong_capacities_are_refused(capacity: object) -> None:
    with pytest.raises(ConfigError, match="capacity"):
        DequantWorkspace(capacity)  # type: ignore[arg-type]


def test_gradients_reach_the_input_although_buffers_are_reused() -> None:
    workspace = DequantWorkspace(capacity=1)
    chain = [NVFP4Linear(random_weight(32, 32, seed=s), dtype=torch.float32, workspace=workspace) for s in range(3)]
    x = torch.randn(2, 32, generator=torch.Generator().manual_seed(8), requires_grad=True)
    y = x
    for layer in chain:
        y = layer(y)
    y.sum().backward()
    wanted = torch.ones(2, 32)
    for layer in reversed(chain):
        wanted = wanted @ dequantize(layer.weight, torch.float32)
    assert x.grad is not None
    assert torch.allclose(x.grad, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("parts", [2, 3])
def test_column_parallel_shards_give_parts_of_the_output(parts: int) -> None:
    layer = NVFP4Linear(
        concat_rows([random_weight(24, 32, seed=9), random_weight(12, 32, seed=10)]),
        torch.arange(36.0),
        dtype=torch.float32,
    )
    x = torch.randn(5, 32, generator=torch.Generator().manual_seed(11))
    size = 36 // parts
    shards = [layer.shard_rows(i * size, (i + 1) * size) for i in range(parts)]
    assert torch.allclose(torch.cat([shard(x) for shard in shards], dim=-1), layer(x), rtol=1e-5, atol=1e-5)


def test_row_parallel_shards_sum_to_the_output() -> None:
    layer = NVFP4Linear(random_weight(24, 80, seed=12, per_row=True), torch.arange(24.0), dtype=torch.float32)
    x = torch.randn(5, 80, generator=torch.Generator().manual_seed(13))
    cuts = [(0, 32), (32, 48), (48, 80)]
    total = sum(layer.shard_columns(*cut)(x[:, cut[0] : cut[1]]) for cut in cuts)
    assert torch.allclose(total, layer(x), rtol=1e-5, atol=1e-4)
    with pytest.raises(ValueError, match="group borders"):
        layer.shard_columns(0, 24)


def test_dtype_casts_of_a_model_leave_the_format_alone() -> None:
    layer = NVFP4Linear(random_weight(8, 32, seed=14, per_row=True), torch.ones(8), dtype=torch.float16)
    x = torch.ones(1, 32, dtype=torch.float16)
    wanted = layer(x)
    model = torch.nn.Sequential(layer, torch.nn.Linear(8, 8)).to(torch.bfloat16).half().double()
    assert (layer.codes.dtype, layer.scales.dtype, layer.global_scale.dtype, layer.bias.dtype) == (
        torch.uint8,
        torch.float8_e4m3fn,
        torch.float32,
        torch.float16,
    )
    assert model[1].weight.dtype == torch.float64
    assert torch.equal(layer(x), wanted)
    assert layer.to("meta").codes.device.type == "meta"


def test_a_moved_layer_keeps_nothing_of_where_it_was() -> None:
    layer = NVFP4Linear(random_weight(8, 32, seed=14), dtype=torch.float32)
    layer(torch.ones(1, 32))
    layer.workspace.clear()
    former = [weakref.ref(x) for x in (layer.codes, layer.scales, layer.global_scale, layer.weight)]
    layer.to("meta")
    assert not any(one() is not None for one in former)


def test_inputs_and_biases_that_do_not_fit_are_refused() -> None:
    weight = random_weight(8, 32, seed=15)
    layer = NVFP4Linear(weight)
    for x in (torch.ones(2, 32), torch.ones(2, 16, dtype=torch.float16)):
        with pytest.raises(ValueError, match="this layer takes"):
            layer(x)
    with pytest.raises(ValueError, match="bias"):
        NVFP4Linear(weight, torch.ones(7))
    with pytest.raises(ValueError, match="float64"):
        NVFP4Linear(weight, dtype=torch.float64)


def test_quantized_layer_is_close_to_the_original() -> None:
    g = torch.Generator().manual_seed(16)
    w, x = torch.randn(128, 256, generator=g) / 16, torch.randn(32, 256, generator=g)
    layer, wanted = NVFP4Linear(quantize(w), dtype=torch.float32), x @ w.T
    assert (layer(x) - wanted).norm() / wanted.norm() < 0.12


def test_two_threads_that_take_turns_share_one_workspace() -> None:
    """As the executor runs pieces: a thread each, handed over between segments."""
    workspace = DequantWorkspace()
    linears = [NVFP4Linear(random_weight(32, 32, seed=s), dtype=torch.float32, workspace=workspace) for s in range(6)]
    x = torch.ones(1, 32)
    turn, results, lock = [0], {0: [], 1: []}, threading.Condition()

    def piece(me: int) -> None:
        for segment in range(3):
            with lock:
                assert lock.wait_for(lambda: turn[0] == me, timeout=30)
                for linear in linears[2 * segment : 2 * segment + 2]:
                    results[me].append(linear(x))
                turn[0] = 1 - me
                lock.notify_all()

    threads = [threading.Thread(target=piece, args=(i,)) for i in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert workspace.dequantizations == 6
    assert len(results[0]) == 6
    assert all(torch.equal(a, b) for a, b in zip(results[0], results[1], strict=True))


@pytest.mark.filterwarnings("ignore:Dynamo detected a call")
def test_a_compiled_layer_does_not_depend_on_the_workspace() -> None:
    workspace = DequantWorkspace(capacity=1)
    layer, other = (
        NVFP4Linear(random_weight(32, 32, seed=s), dtype=torch.float32, workspace=workspace) for s in (1, 2)
    )
    compiled = torch.compile(layer, backend="eager", fullgraph=True)
    x = torch.randn(3, 32, generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        for weights in (None, other.state_dict()):
            if weights is not None:
                layer.load_state_dict(weights)
            wanted = layer(x)
            asked = workspace.dequantizations
            assert torch.equal(compiled(x), wanted)
            assert workspace.dequantizations == asked


@pytest.mark.parametrize("saved", [True, False])
def test_layers_that_have_run_are_copied_and_saved_without_their_dense_weights(saved: bool) -> None:
    workspace = DequantWorkspace(capacity=3)
    layers = torch.nn.ModuleList(
        NVFP4Linear(random_weight(32, 64, seed=seed), dtype=torch.float32, workspace=workspace) for seed in range(2)
    )
    x = torch.randn(9, 64)
    wanted = [layer(x) for layer in layers]
    if saved:
        file = io.BytesIO()
        torch.save(layers, file)
        file.seek(0)
        copied = torch.load(file, weights_only=False)
    else:
        copied = copy.deepcopy(layers)
    assert copied[0].workspace is copied[1].workspace
    assert copied[0].workspace is not workspace
    assert (copied[0].workspace.capacity, copied[0].workspace.dequantizations) == (3, 0)
    for layer, expected in zip(copied, wanted, strict=True):
        assert torch.equal(layer(x), expected)
