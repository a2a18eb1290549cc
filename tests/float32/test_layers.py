"""Layers that compute in float32 inside a float16 model, and all else as before."""

import copy
import gc
import weakref
from collections import deque
from typing import NamedTuple

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten, tree_map
from support.helpers import bits, dtypes, model_state, pickled

from mlx_gradscale import GradScaler, all_finite, float32_layers
from mlx_gradscale.core.intercept import get_handlers

HALF = mx.float16
TOKENS = mx.arange(8)
MLPS = "blocks.*.mlp"


class Mlp(nn.Module):
    """Its hidden values are 8e4 and more; its output is small."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(8, 8, bias=False)
        self.down = nn.Linear(8, 8, bias=False)
        self.up.weight = mx.eye(8) * 400
        self.down.weight = mx.eye(8) / 2e5

    def __call__(self, x):
        return self.down(mx.square(mx.maximum(self.up(x), 0)))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.RMSNorm(8)
        self.mlp = Mlp()

    def __call__(self, x):
        return x + self.mlp(self.norm(x))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.blocks = [Block(), Block(), Block()]
        self.norm = nn.RMSNorm(8)
        # Not a list, which would be a tree of parameters.
        self.dtypes = deque(maxlen=3)

    def __call__(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
            self.dtypes.append(x.dtype)
        return self.embed.as_linear(self.norm(x))


def make_net(dtype=HALF):
    mx.random.seed(0)
    model = Net()
    model.set_dtype(dtype)
    return model


def loss_of(model):
    def loss_fn(tokens):
        logits = model(tokens).astype(mx.float32)
        return nn.losses.cross_entropy(logits, (tokens + 1) % 16).mean()

    return loss_fn


def gradients(model):
    return nn.value_and_grad(model, loss_of(model))(TOKENS)


def as_float32(model):
    # A Dtype cannot be copied.
    if hasattr(model, "dtypes"):
        model.dtypes.clear()
    other = copy.deepcopy(model)
    other.set_dtype(mx.float32)
    return other


def assert_close(a, b, rtol=2e-2):
    for (path, x), (_, y) in zip(tree_flatten(a), tree_flatten(b), strict=True):
        x, y = (np.array(z.astype(mx.float32)) for z in (x, y))
        assert np.abs(x - y).max() <= rtol * (np.abs(y).max() + 1e-12), path


def list_layers(model):
    modules = dict(model.named_modules())
    return sorted(p for p in modules if get_handlers(modules[p]))


def test_float32_layers_prevent_an_overflow_until_they_are_removed():
    model = make_net()
    expected = as_float32(model)(TOKENS)
    before = model_state(model)
    assert float32_layers(model, MLPS) == [f"blocks.{i}.mlp" for i in range(3)]
    logits = model(TOKENS)
    assert logits.dtype == HALF
    assert set(model.dtypes) == {HALF}
    assert_close(logits, expected)
    float32_layers(model, [])
    model.dtypes.clear()
    assert model_state(model) == before
    assert not all_finite(model(TOKENS))


def test_layer_that_was_replaced_is_selected_by_another_call():
    model = make_net()
    float32_layers(model, MLPS)
    model.blocks[0].mlp = Mlp()
    model.set_dtype(HALF)
    assert not all_finite(model(TOKENS))
    float32_layers(model, MLPS)
    assert all_finite(model(TOKENS))


def test_parameters_keep_names_dtypes_and_freezing_even_after_an_error():
    model = make_net()
    names = [p for p, _ in tree_flatten(model.parameters())]
    float32_layers(model, MLPS)
    with pytest.raises(TypeError):
        model.blocks[0].mlp("no array")
    assert dtypes(model.parameters()) == {HALF}
    assert all_finite(model(TOKENS))
    assert [p for p, _ in tree_flatten(model.parameters())] == names
    assert dtypes(model.parameters()) == {HALF}
    model.blocks[0].mlp.freeze()
    trainable = [p for p, _ in tree_flatten(model.trainable_parameters())]
    assert trainable == [p for p in names if not p.startswith("blocks.0.mlp")]


class Checkpointed(nn.Module):
    def __init__(self, block):
        super().__init__()
        self.block = block

    def __call__(self, x):
        return nn.utils.checkpoint(self.block)(x)


@pytest.mark.parametrize(
    "where", [MLPS, "blocks.*.block", "blocks.*.block.mlp", "blocks.*"]
)
def test_gradients_agree_with_float32_even_when_checkpointed(where):
    model = make_net()
    _, expected = gradients(as_float32(model))
    if where != MLPS:
        model.blocks = [Checkpointed(block) for block in model.blocks]
    float32_layers(model, where)
    loss, grads = gradients(model)
    if where != MLPS:
        grads["blocks"] = [block["block"] for block in grads["blocks"]]
    assert all_finite(loss)
    assert dtypes(grads) == {HALF}
    assert_close(grads, expected, rtol=5e-2)
    assert dtypes(model.parameters()) == {HALF}


@pytest.mark.compiles
def test_compiled_step_with_float32_layers_agrees_with_the_eager_step():
    model = make_net()
    float32_layers(model, MLPS)
    eager = gradients(model)
    function = nn.value_and_grad(model, loss_of(model))
    step = mx.compile(function, inputs=model.state, outputs=model.state)
    for _ in range(2):
        assert_close(step(TOKENS), eager, rtol=5e-3)
    model.blocks[0].mlp.down.weight = model.blocks[0].mlp.down.weight * 2
    assert step(TOKENS)[0].item() != eager[0].item()


@pytest.mark.parametrize("where", [MLPS, ["embed", MLPS]])
@pytest.mark.parametrize("dtype", [HALF, mx.bfloat16])
def test_compute_dtype_leaves_float32_layers_in_float32(dtype, where):
    model = make_net(mx.float32)
    _, expected = gradients(model)
    scaler = GradScaler(init_scale=1.0, dynamic=False)
    function = scaler.value_and_grad(model, loss_of(model), dtype)
    float32_layers(model, where)
    assert bits(gradients(model)[1]) == bits(expected)  # without compute_dtype
    loss, grads = function(TOKENS)
    # Also where the layer sees only integers and float32 parameters, as embed.
    assert set(model.dtypes) == {dtype}
    assert all_finite(loss)
    assert_close(grads, expected, rtol=5e-2 if dtype == HALF else 0.3)
    if dtype == HALF:
        float32_layers(model, [])
        assert not all_finite(function(TOKENS))


class Add(nn.Module):
    def __init__(self, gain):
        super().__init__()
        self.weight = mx.full((8,), gain, HALF)

    def __call__(self, x):
        return x + self.weight * mx.sign(x)


class Mean(nn.Module):
    """Holds no parameter that could show the dtype of the model."""

    def __call__(self, x):
        return x / mx.abs(x).max()


@pytest.mark.parametrize(
    "where",
    [
        ["layers.1 to layers.4"],
        # A layer in two chains casts back only if it ends both.
        ["layers.1", "layers.1 to layers.2", "layers.2 to layers.4"],
    ],
)
def test_chain_passes_float32_from_layer_to_layer(where):
    mx.random.seed(0)
    model = nn.Sequential(*map(Add, (1.0, 6e4, 6e4, 6e4)), Mean(), Add(1.0))
    x = mx.random.normal((2, 8)).astype(HALF)
    expected = as_float32(model)(x.astype(mx.float32))
    float32_layers(model, "layers.*")
    assert not all_finite(model(x))
    paths = float32_layers(model, where)
    assert paths == [f"layers.{i}" for i in (1, 2, 3, 4)] == list_layers(model)
    assert model(x).dtype == HALF
    assert_close(model(x), expected)
    float32_layers(model, [*where, "layers.4 to layers.5 to the loss"])
    assert model(x).dtype == mx.float32
    assert_close(model(x), expected)


class Pair(NamedTuple):
    first: mx.array
    second: mx.array


class Returns(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.weight = mx.ones((4,), HALF)
        self.function = function

    def __call__(self, *args, **kwargs):
        return self.function(self.weight, *args, **kwargs)


def test_outputs_of_every_kind_are_cast_back_to_float16():
    def function(w, x):
        others = mx.arange(3), mx.array([True]), None, "a", {"n": 3}
        return {"tuple": (x * w, [x]), "named": Pair(x * w, x), "others": others}

    model, x = nn.Sequential(Returns(function)), mx.ones((4,), HALF)
    plain = model(x)
    float32_layers(model, "layers.0")
    outputs = model(x)

    def kinds(tree):
        return tree_map(lambda v: v.dtype if isinstance(v, mx.array) else v, [tree])

    assert kinds(outputs) == kinds(plain)
    assert type(outputs["named"]) is Pair


def test_arguments_are_cast_in_tuples_but_not_in_lists_and_caches():
    class Cache:
        keys = None

    seen = []

    def function(weight, pair, cache, states, *, mask):
        seen.append([pair[0].dtype, mask.dtype, states[0].dtype])
        states.append(3)
        cache.keys = pair[0]
        return pair[0] * weight + mask

    model = nn.Sequential(Returns(function))
    float32_layers(model, "layers.0")
    x, cache = mx.ones((4,), HALF), Cache()
    states = [x]
    assert model.layers[0]((x, 1), cache, states, mask=x).dtype == HALF
    assert seen == [[mx.float32, mx.float32, HALF]]
    assert states[0] is x
    assert states[1] == 3
    # What the layer stores stays as it computed it.
    assert cache.keys.dtype == mx.float32


def test_running_statistics_are_float32_in_a_float32_layer():
    model = nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.BatchNorm(8)))
    model.set_dtype(HALF)
    norm = model.layers[1].layers[0]
    float32_layers(model, "layers.1")
    # A variance of 250,000 would be inf in float16.
    for _ in range(80):
        model.layers[1](mx.array([[500.0], [-500.0]] * 4, HALF) * mx.ones(8, HALF))
    assert norm.running_var.dtype == norm.running_mean.dtype == mx.float32
    assert norm.weight.dtype == HALF
    model.eval()
    x = mx.random.normal((4, 8)).astype(HALF) * 500
    found = model.layers[1](x)
    assert found.dtype == HALF
    assert mx.allclose(found, x / 500, rtol=0.1).item()


@pytest.mark.parametrize("copied", [copy.deepcopy, pickled])
def test_copied_model_has_its_own_float32_layers(copied):
    model = make_net()
    float32_layers(model, MLPS)
    other = copied(model)
    float32_layers(model, [])
    assert not all_finite(model(TOKENS))
    assert all_finite(other(TOKENS))
    assert list_layers(other) == [f"blocks.{i}.mlp" for i in range(3)]


def test_model_with_float32_layers_is_freed_without_the_garbage_collector():
    gc.disable()
    try:
        model = make_net()
        float32_layers(model, [MLPS, "norm"])
        reference = weakref.ref(model)
        del model
        assert reference() is None
    finally:
        gc.enable()


def test_float32_layer_inside_another_passes_float32_on():
    model = nn.Sequential(Mlp(), nn.RMSNorm(8))
    model.up = model.layers[0].up
    model.set_dtype(HALF)
    x = mx.full((2, 8), 200, HALF)
    expected = as_float32(model)(x.astype(mx.float32))
    float32_layers(model, ["layers.0", "up"])
    assert_close(model(x), expected)


def test_tied_embedding_computes_in_float32_in_both_uses():
    model = make_net()
    model.embed.weight = mx.full((16, 8), 3e4, HALF)
    x = mx.full((1, 8), 1e2, HALF)
    assert not all_finite(model.embed.as_linear(x))
    float32_layers(model, "embed to the loss")
    assert model.embed(TOKENS).dtype == mx.float32
    assert all_finite(model.embed.as_linear(x))
