"""Layers that compute in float32 inside of a float16 model, and all else as before."""

import copy
import gc
import pickle
import warnings
import weakref
from abc import ABC
from collections import deque
from dataclasses import dataclass
from typing import NamedTuple

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
import pytest
from helpers import Traced
from mlx.utils import tree_flatten, tree_map, tree_map_with_path

from benchmarks.counting import kernels
from mlx_gradscale import GradScaler, LossScaleOptimizer, float32_layers
from mlx_gradscale.islands import (
    float32_gradients,
    kept_in_float32,
    list_float32_layers,
    remove_float32_layers,
)

HALF = mx.float16


def relu(x):
    return mx.maximum(x, 0)


class Mlp(nn.Module):
    """Its hidden values are 8e4 and more; what comes out is small."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(8, 8, bias=False)
        self.down = nn.Linear(8, 8, bias=False)
        self.up.weight = mx.eye(8) * 400
        self.down.weight = mx.eye(8) / 2e5
        self.act = relu

    def __call__(self, x):
        return self.down(mx.square(self.act(self.up(x))))


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
        # No list, which would be a tree of parameters.
        self.dtypes = deque(maxlen=3)

    def __call__(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
            self.dtypes.append(x.dtype)
        return self.embed.as_linear(self.norm(x))


TOKENS = mx.arange(8)
MLPS = "blocks.*.mlp"


def net(dtype=HALF):
    mx.random.seed(0)
    model = Net()
    model.set_dtype(dtype)
    return model


def loss_of(model):
    def loss_fn(tokens):
        logits = model(tokens).astype(mx.float32)
        return nn.losses.cross_entropy(logits, (tokens + 1) % 16).mean()

    return loss_fn


def finite(tree):
    return all(mx.isfinite(x).all().item() for _, x in tree_flatten(tree))


def as_float32(model):
    if hasattr(model, "dtypes"):
        model.dtypes.clear()
    other = copy.deepcopy(model)
    other.set_dtype(mx.float32)
    return other


def close(a, b, rtol=2e-2):
    pairs = zip(tree_flatten(a), tree_flatten(b), strict=True)
    for (path, x), (_, y) in pairs:
        x, y = (np.array(z.astype(mx.float32)) for z in (x, y))
        scale = np.abs(y).max() + 1e-12
        assert np.abs(x - y).max() <= rtol * scale, path


def snapshot(model):
    types = [(p, type(m), dict(vars(m))) for p, m in model.named_modules()]
    values = [(p, x.dtype, np.array(x)) for p, x in tree_flatten(model.parameters())]
    return types, values


def assert_same(model, before):
    types, values = snapshot(model)
    assert types == before[0]
    for (p, dtype, x), (q, other, y) in zip(values, before[1], strict=True):
        assert (p, dtype) == (q, other)
        assert np.array_equal(x, y)


def test_a_float16_model_overflows_and_with_islands_it_does_not():
    model = net()
    assert not finite(model(TOKENS))
    expected = as_float32(model)(TOKENS)
    float32_layers(model, MLPS)
    logits = model(TOKENS)
    assert logits.dtype == HALF
    assert set(model.dtypes) == {HALF}
    close(logits, expected)


def test_undo_leaves_the_model_as_it_was():
    model = net()
    before = snapshot(model)
    layers = float32_layers(model, MLPS)
    assert layers.paths == [f"blocks.{i}.mlp" for i in range(3)]
    assert finite(model(TOKENS))
    layers.undo()
    layers.undo()
    model.dtypes.clear()
    assert_same(model, before)
    with float32_layers(model, MLPS):
        assert finite(model(TOKENS))
    assert not finite(model(TOKENS))


def test_islands_are_undone_in_any_order():
    model = net()
    before = snapshot(model)
    first = float32_layers(model, "blocks.0.mlp")
    second = float32_layers(model, MLPS)
    first.undo()
    assert finite(model(TOKENS))
    second.undo()
    model.dtypes.clear()
    assert_same(model, before)


def test_parameters_names_repr_and_classes_are_the_same():
    model = net()
    names = [p for p, _ in tree_flatten(model.parameters())]
    text = repr(model)
    float32_layers(model, MLPS)
    assert repr(model) == text
    assert [p for p, _ in tree_flatten(model.parameters())] == names
    assert {x.dtype for _, x in tree_flatten(model.parameters())} == {HALF}
    model(TOKENS)
    assert {x.dtype for _, x in tree_flatten(model.parameters())} == {HALF}
    assert isinstance(model.blocks[0].mlp, Mlp)
    model.blocks[0].mlp.freeze()
    trainable = [p for p, _ in tree_flatten(model.trainable_parameters())]
    assert trainable == [p for p in names if not p.startswith("blocks.0.mlp")]


def test_an_error_in_the_call_leaves_the_parameters():
    model = net()
    float32_layers(model, MLPS)
    before = snapshot(model)
    with pytest.raises(TypeError):
        model.blocks[0].mlp("no array")
    assert_same(model, before)


@pytest.mark.parametrize("checkpointed", [False, True])
def test_gradients_are_those_of_float32(checkpointed):
    model = net()
    _, expected = nn.value_and_grad(*differentiated(as_float32(model)))(TOKENS)
    float32_layers(model, MLPS)
    if checkpointed:
        model.blocks = [Checkpointed(block) for block in model.blocks]
    loss, grads = nn.value_and_grad(*differentiated(model))(TOKENS)
    if checkpointed:
        grads["blocks"] = [block["block"] for block in grads["blocks"]]
    assert finite(loss)
    assert {x.dtype for _, x in tree_flatten(grads)} == {HALF}
    close(grads, expected, rtol=5e-2)


class Checkpointed(nn.Module):
    def __init__(self, block):
        super().__init__()
        self.block = block

    def __call__(self, x):
        return nn.utils.checkpoint(self.block)(x)


def differentiated(model):
    return model, loss_of(model)


def test_a_module_checkpointed_inside_of_an_island_keeps_its_gradients():
    model = net()
    _, expected = nn.value_and_grad(*differentiated(as_float32(model)))(TOKENS)
    model.blocks = [Checkpointed(block) for block in model.blocks]
    float32_layers(model, "blocks.*")
    _, grads = nn.value_and_grad(*differentiated(model))(TOKENS)
    grads["blocks"] = [block["block"] for block in grads["blocks"]]
    close(grads, expected, rtol=5e-2)


def test_gradients_stay_float32_where_that_is_asked_for():
    model = net()
    float32_layers(model, MLPS)

    def loss_fn(tokens):
        return loss_of(model)(tokens) * 2.0**8

    function = nn.value_and_grad(model, loss_fn)
    _, grads = function(TOKENS)
    assert grads["blocks"][0]["mlp"]["down"]["weight"].dtype == HALF
    with float32_gradients():
        _, grads = function(TOKENS)
    weight = grads["blocks"][2]["mlp"]["down"]["weight"]
    assert weight.dtype == mx.float32
    assert finite(weight)
    assert mx.abs(weight).max().item() > 65504
    assert grads["norm"]["weight"].dtype == HALF


@pytest.mark.filterwarnings("ignore:Some parameters are float16")
@pytest.mark.parametrize("wrapped", [True, False])
def test_parameters_stay_float16_in_training(wrapped):
    model = net()
    float32_layers(model, MLPS)
    optimizer, scaler = optim.SGD(1e-3), GradScaler(1.0)
    if wrapped:
        optimizer = LossScaleOptimizer(optimizer, scaler)
        loss_fn = optimizer.scale_loss(loss_of(model), model)
        optimizer.update(model, nn.value_and_grad(model, loss_fn)(TOKENS)[1])
    else:
        _, grads = scaler.value_and_grad(*differentiated(model))(TOKENS)
        scaler.minimize(optimizer, model, grads)
    assert scaler.last_step_applied.item()
    assert {x.dtype for _, x in tree_flatten(model.parameters())} == {HALF}


def test_a_compiled_step_traces_once_and_agrees():
    model = net()
    float32_layers(model, MLPS)
    function = Traced(nn.value_and_grad(*differentiated(model)))
    step = mx.compile(function, inputs=model.state, outputs=model.state)
    eager = nn.value_and_grad(*differentiated(model))(TOKENS)
    for _ in range(2):
        close(step(TOKENS), eager, rtol=5e-3)
    assert function.count == 1
    model.blocks[0].mlp.down.weight = model.blocks[0].mlp.down.weight * 2
    assert step(TOKENS)[0].item() != eager[0].item()


@pytest.mark.parametrize("dtype", [HALF, mx.bfloat16])
def test_value_and_grad_in_a_compute_dtype(dtype):
    model = net(mx.float32)
    _, expected = nn.value_and_grad(*differentiated(model))(TOKENS)
    scaler = GradScaler(init_scale=1.0, dynamic=False)
    function = scaler.value_and_grad(*differentiated(model), dtype)
    with float32_layers(model, MLPS):
        loss, grads = function(TOKENS)
        assert set(model.dtypes) == {dtype}
    assert finite(loss)
    close(grads, expected, rtol=5e-2 if dtype == HALF else 0.3)
    if dtype == HALF:
        assert not finite(function(TOKENS))


def test_in_a_float32_model_nothing_changes():
    model = net(mx.float32)
    expected = model(TOKENS)
    float32_layers(model, ["blocks.0 to norm", "embed"])
    assert mx.array_equal(model(TOKENS), expected)
    assert model(TOKENS).dtype == mx.float32


class Stream(nn.Module):
    """A residual stream that passes 65504 in the second block."""

    class Add(nn.Module):
        def __init__(self, gain):
            super().__init__()
            self.weight = mx.full((8,), gain)

        def __call__(self, x):
            return x + self.weight * mx.sign(x)

    class Mean(nn.Module):
        """Holds no parameter that could say in which dtype it is to answer."""

        def __call__(self, x):
            return x / mx.abs(x).max()

    def __init__(self):
        super().__init__()
        self.layers = [self.Add(1.0), self.Add(6e4), self.Add(6e4), self.Add(6e4)]
        self.norm = self.Mean()
        self.head = nn.Linear(8, 4, bias=False)
        self.dtypes = deque(maxlen=5)

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
            self.dtypes.append(x.dtype)
        x = self.norm(x)
        self.dtypes.append(x.dtype)
        return self.head(x)


def stream(dtype=HALF):
    mx.random.seed(0)
    model = Stream()
    model.set_dtype(dtype)
    return model


def test_a_residual_stream_stays_float32_from_layer_to_layer():
    x = mx.random.normal((2, 8)).astype(HALF)
    model = stream()
    expected = as_float32(model)(x.astype(mx.float32))
    float32_layers(model, "layers.*")
    assert not finite(model(x))
    remove_float32_layers(model)
    layers = float32_layers(model, "layers.1 to norm")
    assert layers.paths == ["layers.1", "layers.2", "layers.3", "norm"]
    assert layers.where == ["layers.1 to norm"] == list_float32_layers(model)
    close(model(x), expected)
    assert list(model.dtypes) == [HALF, mx.float32, mx.float32, mx.float32, HALF]
    # Nothing of the half run is remembered when the model is float32.
    model.set_dtype(mx.float32)
    assert model(x.astype(mx.float32)).dtype == mx.float32


@pytest.mark.parametrize("at_once", [False, True])
def test_a_layer_in_two_islands_casts_back_only_if_both_say_so(at_once):
    x = mx.random.normal((2, 8)).astype(HALF)
    model = stream()
    where = ["layers.1", "layers.1 to layers.2", "layers.2 to norm", "layers.3"]
    entries = [where] if at_once else where
    handles = [float32_layers(model, entry) for entry in entries]
    assert finite(model(x))
    assert list(model.dtypes) == [HALF, mx.float32, mx.float32, mx.float32, HALF]
    assert list_float32_layers(model) == where
    for handle in handles:
        handle.undo()
    assert list_float32_layers(model) == []
    assert type(model.norm) is Stream.Mean


def test_a_chain_is_named_one_by_one():
    x = mx.random.normal((2, 8)).astype(HALF)
    model = stream()
    float32_layers(model, [["layers.1", "layers.2", "layers.3", "norm"]])
    assert finite(model(x))
    assert list(model.dtypes) == [HALF, mx.float32, mx.float32, mx.float32, HALF]


def test_a_loss_function_may_be_handed_float32():
    x = mx.random.normal((2, 8)).astype(HALF)
    model = stream()
    for where in ("layers.1 to the loss", [["layers.1", "layers.2", "the loss"]]):
        with float32_layers(model, where):
            logits = model(x)
        assert logits.dtype == mx.float32
        assert finite(logits)


class Pair(NamedTuple):
    first: mx.array
    second: mx.array


@dataclass(frozen=True)
class Output:
    logits: mx.array
    extra: object = None


class Ordered(dict):
    pass


class Returns(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.weight = mx.ones((4,), HALF)
        self.function = function

    def __call__(self, *args, **kwargs):
        return self.function(self.weight, *args, **kwargs)


RETURNS = {
    "tuple": lambda w, x: (x * w, [x], None, "a"),
    "dict": lambda w, x: {"x": x * w, "state": (x, {"n": 3})},
    "named": lambda w, x: Pair(x * w, x),
    "dataclass": lambda w, x: Output(x * w, extra=[x]),
    "own dict": lambda w, x: Ordered(x=x * w),
    "integers": lambda w, x: (x * w, mx.arange(3), mx.array([True])),
}


@pytest.mark.parametrize("name", list(RETURNS))
def test_outputs_of_every_kind_come_back_in_float16(name):
    model = nn.Sequential(Returns(RETURNS[name]))
    x = mx.ones((4,), HALF)
    plain = model(x)
    float32_layers(model, "layers.0")
    outputs = model(x)
    assert type(outputs) is type(plain)

    def kinds(tree):
        tree = vars(tree) if isinstance(tree, Output) else tree
        return tree_map(lambda v: v.dtype if isinstance(v, mx.array) else v, [tree])

    assert kinds(outputs) == kinds(plain)


def test_what_a_module_writes_into_its_arguments_is_there_and_float16():
    class Cache:
        def __init__(self):
            self.keys = None
            self.pair = (mx.zeros((4,), HALF), mx.zeros((4,)))
            self.inner = [{"seen": mx.zeros((4,), HALF)}]

        def update(self, x):
            self.keys = x if self.keys is None else mx.concatenate([self.keys, x])
            self.pair = (x, self.pair[1] + x)
            self.inner[0]["seen"] = x
            return self.keys

    seen = []

    def function(weight, x, cache, states, table=None):
        seen.append((states[0].dtype, table["a"].dtype))
        states.append(x * weight)
        states[0] = x
        table["b"] = x
        return cache.update(x * weight).sum() + table["a"].sum()

    model = nn.Sequential(Returns(function))
    float32_layers(model, "layers.0")
    cache, states = Cache(), [mx.zeros((4,), HALF), mx.ones((4,), HALF)]
    given, table = states[1], {"a": mx.ones((4,), HALF), "c": mx.ones((4,))}
    layer = model.layers[0]
    for _ in range(2):
        out = layer(mx.full((4,), 3.0, HALF), cache, states, table=table)
    assert out.dtype == HALF
    assert seen == [(mx.float32, mx.float32)] * 2
    assert [x.dtype for x in states] == [HALF] * 4
    assert states[1] is given
    assert states[0].tolist() == [3.0] * 4
    assert {k: x.dtype for k, x in table.items()} == {
        "a": HALF,
        "b": HALF,
        "c": mx.float32,
    }
    assert cache.keys.dtype == HALF
    assert cache.keys.shape == (8,)
    assert [x.dtype for x in cache.pair] == [HALF, mx.float32]
    assert cache.inner[0]["seen"].dtype == HALF


def test_running_statistics_are_float32_in_an_island():
    model = nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.BatchNorm(8)))
    model.set_dtype(HALF)
    norm = model.layers[1].layers[0]
    with float32_layers(model, "layers.1"):
        # Of a variance of 250,000, where float16 has inf.
        for _ in range(80):
            model.layers[1](mx.array([[500.0], [-500.0]] * 4, HALF) * mx.ones(8, HALF))
        assert norm.running_var.dtype == norm.running_mean.dtype == mx.float32
        assert norm.weight.dtype == HALF
        model.eval()
        x = mx.random.normal((4, 8)).astype(HALF) * 500
        found = model.layers[1](x)
        assert found.dtype == HALF
        assert mx.allclose(found, x / 500, rtol=0.1).item()
    assert norm.running_mean.dtype == HALF


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_half_statistics_are_told_and_the_cure_works(dtype):
    def losses(cure):
        model = nn.Sequential(nn.BatchNorm(4), nn.Linear(4, 1))
        model.set_dtype(dtype)
        if cure:
            # As the warning says.
            float32_layers(model, lambda path, layer: isinstance(layer, nn.BatchNorm))
        scaler = GradScaler()
        loss_and_grad = scaler.value_and_grad(
            model, lambda x: model(x).astype(mx.float32).mean()
        )
        loss_and_grad(mx.ones((4, 4), dtype))

    with pytest.warns(UserWarning, match=r"'layers.0' keeps its running statistics"):
        losses(cure=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        losses(cure=True)


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_a_copy_is_an_island_of_its_own(how):
    model = net()
    layers = float32_layers(model, MLPS)
    model(TOKENS)
    model.dtypes.clear()
    other = copy.deepcopy(model) if how == "deepcopy" else pickled(model)
    layers.undo()
    assert not finite(model(TOKENS))
    assert finite(other(TOKENS))
    assert isinstance(other.blocks[0].mlp, Mlp)
    assert list_float32_layers(other) == [f"blocks.{i}.mlp" for i in range(3)]
    remove_float32_layers(other)
    assert type(other.blocks[0].mlp) is Mlp
    assert list_float32_layers(other) == []
    assert not finite(other(TOKENS))


def pickled(model):
    return pickle.loads(pickle.dumps(model))


def test_weights_are_saved_loaded_and_cast_as_before(tmp_path):
    model = net()
    path = str(tmp_path / "weights.safetensors")
    float32_layers(model, MLPS)
    model.save_weights(path)
    other = net(mx.bfloat16)
    other.load_weights(path)
    assert not finite(other(TOKENS))
    model.load_weights(path)
    assert finite(model(TOKENS))
    model.set_dtype(mx.bfloat16)
    assert model(TOKENS).dtype == mx.bfloat16


def test_quantizing_and_its_island():
    mx.random.seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    model.set_dtype(HALF)
    model.layers[0].weight = mx.full((64, 64), 3e3, HALF)
    model.layers[1].weight = mx.full((64, 64), 1e-5, HALF)
    x = mx.ones((2, 64), HALF)
    layers = float32_layers(model, "layers.0 to layers.1")
    nn.quantize(model)
    assert isinstance(model.layers[0], nn.QuantizedLinear)
    assert model.layers[0].scales.dtype == HALF
    assert model(x).dtype == HALF
    assert finite(model(x))
    layers.undo()
    assert type(model.layers[0]) is nn.QuantizedLinear
    assert not finite(model(x))


def test_a_class_with_a_metaclass_and_a_call_that_is_inherited():
    class Scaled(nn.Linear, ABC):
        def __call__(self, x):
            return super().__call__(x) * 1e5 / 1e6

    class Named(Scaled):
        pass

    model = nn.Sequential(Named(8, 8), Scaled(8, 8))
    model.set_dtype(HALF)
    x = mx.ones((2, 8), HALF)
    expected = as_float32(model)(x.astype(mx.float32))
    float32_layers(model, "layers.*")
    close(model(x), expected)


def test_a_class_that_was_made_for_a_while_is_not_kept():
    def made():
        class Mine(nn.Linear):
            pass

        layer = Mine(2, 2)
        float32_layers(layer, "").undo()
        return weakref.ref(Mine)

    reference = made()
    gc.collect()
    assert reference() is None


def test_another_instance_of_its_class_is_no_island():
    layer = nn.Linear(8, 8)
    float32_layers(layer, "")
    other = type(layer)(8, 8)
    other.set_dtype(HALF)
    x = mx.full((2, 8), 6e4, HALF)
    other.weight = mx.ones((8, 8), HALF)
    assert not finite(other(x))


@pytest.mark.parametrize("compiled", [False, True])
def test_an_island_costs_its_casts_and_no_other_kernel(compiled):
    def counted(where):
        model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8))
        model.set_dtype(HALF)
        x = mx.ones((2, 8), HALF)
        mx.eval(model.parameters(), x)
        float32_layers(model, where)
        function = nn.value_and_grad(model, lambda x: model(x).sum())
        if compiled:
            function = mx.compile(function, inputs=model.state, outputs=model.state)
        return kernels(function(x))

    plain = counted([])
    if compiled:
        # A cast may become part of a kernel that is there anyway.
        assert counted("layers.1").total() - plain.total() <= 8
        return
    # The input, the weight, the bias and the output, and each again on the way back;
    # in the first layer nobody asks for the gradient of the input.
    assert counted("layers.1") - plain == {"AsType": 8}
    assert counted("layers.0") - plain == {"AsType": 5}


def test_a_tied_embedding_is_called_in_two_ways():
    model = net()
    float32_layers(model, [MLPS, "embed"])
    model.embed.weight = model.embed.weight * 1e4
    assert model.embed(TOKENS).dtype == HALF
    x = mx.full((1, 8), 1e2, HALF)
    assert model.embed.as_linear(x).dtype == HALF


def test_keep_runs_the_modules_that_hold_a_parameter_as_islands():
    model = net(mx.float32)
    before = snapshot(model)

    def keep(path, parameter):
        return "norm" in path or path.startswith("embed")

    with kept_in_float32(model, HALF, keep) as kept:
        parameters = dict(tree_flatten(model.parameters()))
        names = [p for p, x in parameters.items() if kept(p, x)]
        assert len(names) == 5
        assert all("norm" in p or "embed" in p for p in names)
        # What is kept stays, all else is cast; then the model runs in float16.
        assert model.embed(TOKENS).dtype == HALF
        assert model.norm(mx.ones((2, 8), HALF)).dtype == HALF
    assert_same(model, before)
    assert model.norm(mx.ones((2, 8), HALF)).dtype == mx.float32


def test_keep_of_a_module_that_holds_others_casts_its_output_and_not_theirs():
    class Gated(nn.Module):
        def __init__(self):
            super().__init__()
            self.gates = [mx.ones((8,))]
            self.inner = nn.Linear(8, 8)

        def __call__(self, x):
            return self.inner(x).astype(mx.float32) * self.gates[0]

    model = nn.Sequential(Gated())
    model.scale = mx.ones((8,))
    model.layers[0].inner.set_dtype(HALF)
    x = mx.ones((2, 8), HALF)
    with kept_in_float32(model, HALF, lambda path, _: "gates" in path):
        assert model(x).dtype == HALF
    with kept_in_float32(model, HALF, lambda path, _: path == "scale"):
        assert model(x).dtype == mx.float32


def test_gradients_of_an_island_can_be_unscaled_on_their_way_out():
    @mx.custom_function
    def unscaled(x):
        return x

    @unscaled.vjp
    def unscaled_vjp(_, cotangent, __):
        return cotangent.astype(mx.float32) / 2**8

    model = net()
    float32_layers(model, MLPS)

    def loss_fn(parameters, scale=2.0**8):
        model.update(tree_map(unscaled, parameters))
        return loss_of(model)(TOKENS) * scale

    with kept_in_float32(model):
        grads = mx.grad(loss_fn)(model.trainable_parameters())
    assert {x.dtype for _, x in tree_flatten(grads)} == {mx.float32}
    # Times the scale this is more than float16 can hold, also on the way out.
    weight = grads["blocks"][2]["mlp"]["down"]["weight"]
    assert mx.abs(weight).max().item() * 2**8 > 65504
    model = as_float32(net())
    _, expected = nn.value_and_grad(*differentiated(model))(TOKENS)
    close(grads, expected, rtol=5e-2)


def test_a_parameter_beside_one_that_is_kept_may_be_cast():
    model = net(mx.float32)
    model.embed.bias = mx.zeros((8,))

    def loss_fn(parameters):
        kept_or_cast = tree_map_with_path(
            lambda path, x: x if kept(path, x) else x.astype(HALF), parameters
        )
        model.update(kept_or_cast)
        return model.blocks[0].norm(model.embed(TOKENS)).astype(mx.float32).sum()

    with kept_in_float32(model, HALF, lambda path, _: path == "embed.bias") as kept:
        grads = mx.grad(loss_fn)(model.trainable_parameters())
    assert grads["embed"]["weight"].dtype == mx.float32


def test_parameters_in_islands_are_kept():
    model = net(mx.float32)
    with float32_layers(model, MLPS), kept_in_float32(model, HALF) as kept:
        names = [p for p, x in tree_flatten(model.parameters()) if kept(p, x)]
    assert names == [f"blocks.{i}.mlp.{n}.weight" for i in range(3) for n in WEIGHTS]


WEIGHTS = ("up", "down")
