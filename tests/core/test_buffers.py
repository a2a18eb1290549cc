"""A buffer that a forward pass writes never becomes non-finite."""

from functools import partial

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import pytest
from mlx.utils import tree_flatten
from support.helpers import INF, NAN, Traced, batch, bits, mse
from support.optimizer_helpers import loop_of

from mlx_gradscale import GradScaler, LossScaleOptimizer, all_finite


class Normed(nn.Module):
    """A model with running statistics, and a buffer of its own kind."""

    def __init__(self):
        super().__init__()
        self.layers = [nn.Linear(8, 8), nn.BatchNorm(8), nn.Linear(8, 1)]
        self.codes = {"count": mx.zeros(8)}
        self.freeze(keys=["codes"])
        self.frozen = nn.Linear(8, 8)
        self.frozen.freeze()

    def __call__(self, x):
        hidden = self.layers[1](self.layers[0](x))
        self.codes["count"] = self.codes["count"] + mx.mean(hidden, 0)
        return self.layers[2](nn.relu(hidden))


def buffers(model):
    norm = model.layers[1]
    return [norm.running_mean, norm.running_var, model.codes["count"]]


@pytest.mark.parametrize("mode", ["scaler", "wrapper", "scale_loss"])
def test_statistics_stay_finite_after_an_infinite_batch(mode):
    mx.random.seed(2)
    model, scaler = Normed(), GradScaler(1024.0)
    optimizer, gradients, update = loop_of(
        mode, model, optim.SGD(0.01), scaler, dtype=mx.float16
    )
    if mode == "scale_loss":
        loss_fn = optimizer.scale_loss(lambda model, x, y: mse(model)(x, y))
        gradients = partial(nn.value_and_grad(model, loss_fn), model)
    names = sorted(scaler.state)

    def step(x, y):
        update(model, gradients(x, y)[1])

    x, y = batch(0)
    step(x, y)
    moved = bits(buffers(model))
    trained = bits(model.trainable_parameters())
    for value in (INF, NAN):
        _, grads = gradients(x * value, y)
        assert bits(buffers(model)) == moved  # also for accumulated gradients
        update(model, grads)
        assert bits(model.trainable_parameters()) == trained
    assert scaler.skipped_steps.item() == 2
    model.layers[1].running_mean = mx.full((8,), 7.0)
    step(x * INF, y)
    assert model.layers[1].running_mean.tolist() == [7.0] * 8
    # As in PyTorch, the forward pass of a skipped step may move statistics.
    step(x, y * NAN)
    assert scaler.skipped_steps.item() == 4
    before = bits(buffers(model))
    step(*batch(2))
    assert not before.items() & bits(buffers(model)).items()
    assert all_finite(buffers(model)).item()
    assert {x.dtype for x in buffers(model)} == {mx.float32}
    # Nothing about buffers is kept in the state of the scaler.
    assert sorted(scaler.state) == names


class Counts(nn.Module):
    """Writes to arrays in its forward pass that nobody froze."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 1)
        self.center = mx.zeros(8)
        self.calls = mx.array(0)

    def __call__(self, x):
        self.center = mx.stop_gradient(0.9 * self.center + 0.1 * mx.mean(x, axis=0))
        self.calls = self.calls + 1
        return self.layer(x)


def test_trainable_array_written_by_the_forward_pass_is_kept_as_in_mlx():
    scaler = GradScaler(64.0)
    found = []
    for kind in ("mlx", "value_and_grad", "scale_loss"):
        model = Counts()
        make = scaler.value_and_grad if kind == "value_and_grad" else nn.value_and_grad
        loss_fn = mse(model)
        if kind == "scale_loss":
            loss_fn = scaler.scale_loss(loss_fn, model)
        function = make(model, loss_fn)
        function(*batch())
        function(*batch(1))
        found.append((model.center, model.calls))
    assert bits(found[0]) == bits(found[1]) == bits(found[2])
    assert found[0][1].item() == 2


@pytest.mark.compiles
@pytest.mark.parametrize("compiled", ["whole", "separately"])
def test_buffers_stay_finite_in_a_compiled_step(compiled):
    model, optimizer = Counts(), LossScaleOptimizer(optim.SGD(0.01))
    model.freeze(keys=["center", "calls"], recurse=False)
    optimizer.init(model.trainable_parameters())
    gradients = optimizer.value_and_grad(model, mse(model))
    update = partial(optimizer.update, model)
    state = {"inputs": [model.state, optimizer.state]}
    state["outputs"] = state["inputs"]
    if compiled == "separately":
        gradients, update = (mx.compile(f, **state) for f in (gradients, update))

    def step(x, y):
        update(gradients(x, y)[1])

    traced = Traced(step)
    step = mx.compile(traced, **state) if compiled == "whole" else traced
    x, y = batch()
    for factor in (1.0, INF, NAN, 1.0):
        before = bits(model.center)
        step(x * factor, y)
        assert (bits(model.center) == before) == (factor != 1.0)
    assert all_finite(model.center).item()
    assert model.calls.item() == 4
    assert optimizer.scaler.skipped_steps.item() == 2
    assert traced.count == (1 if compiled == "whole" else 4)


@pytest.mark.parametrize("kind", ["value_and_grad", "cast", "scale_loss"])
def test_model_and_its_statistics_are_restored_when_the_loss_raises(kind):
    model, scaler = Normed(), GradScaler()
    before = [id(x) for _, x in tree_flatten(model.parameters())]

    def loss_fn(x):
        model(x)
        model.new = mx.zeros(1)
        raise KeyError("no such batch")

    if kind == "scale_loss":
        function = scaler.scale_loss(loss_fn, model)
    else:
        compute_dtype = mx.float16 if kind == "cast" else None
        function = scaler.value_and_grad(model, loss_fn, compute_dtype)
    with pytest.raises(KeyError, match="no such batch"):
        function(mx.ones((4, 8)))
    assert [id(x) for _, x in tree_flatten(model.parameters())] == before


class InPlace(nn.Module):
    """Changes a buffer and, if nobody froze it, a trainable array in place."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 1)
        self.mean, self.queue = mx.zeros(8), [mx.zeros(1), mx.ones(1)]

    def __call__(self, x):
        self.mean *= 0.5
        self.mean += mx.stop_gradient(mx.mean(x, axis=0))
        self.queue.append(self.queue.pop(0))
        return self.layer(x)


@pytest.mark.parametrize("frozen", [True, False])
@pytest.mark.parametrize("kind", ["value_and_grad", "scale_loss"])
def test_arrays_changed_in_place_or_moved_are_kept_and_buffers_stay_finite(
    kind, frozen
):
    found = []
    for scaler in (None, GradScaler(64.0)):
        model = InPlace()
        if frozen:
            model.freeze(keys=["mean"], recurse=False)
        loss_fn, make = mse(model), nn.value_and_grad
        if scaler is not None and kind == "scale_loss":
            loss_fn = scaler.scale_loss(loss_fn, model)
        elif scaler is not None:
            make = scaler.value_and_grad
        make(model, loss_fn)(*batch())
        found.append((model.mean, model.queue))
    assert bits(found[0]) == bits(found[1])
    if frozen:
        x, y = batch()
        make(model, loss_fn)(x * INF, y)
        assert bits(model.mean) == bits(found[1][0])


@pytest.mark.parametrize("kind", ["value_and_grad", "scale_loss"])
def test_forward_pass_copies_no_weights(kind):
    model = nn.Sequential(nn.Linear(512, 512), nn.Linear(512, 512))
    model.layers[0].freeze()
    scaler, x = GradScaler(64.0), mx.ones((1, 512))
    if kind == "scale_loss":
        function = scaler.scale_loss(lambda x: mx.sum(model(x)), model)
    else:
        function = scaler.value_and_grad(model, lambda x: mx.sum(model(x)))
    mx.eval(model, x, scaler.state)
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    found = function(x)
    mx.eval(found if kind == "scale_loss" else found[0])
    assert mx.get_peak_memory() - before < model.layers[0].weight.nbytes / 8
