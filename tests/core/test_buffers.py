"""A buffer that a forward pass writes never becomes non-finite."""

from contextlib import nullcontext
from functools import partial

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import pytest
from mlx.utils import tree_flatten
from support.helpers import (
    INF,
    NAN,
    Traced,
    batch,
    bits,
    compiled_if,
    dtypes,
    gradient_of,
    mse,
)
from support.optimizer_helpers import loop_of

from mlx_gradscale import GradScaler, LossScaleOptimizer, all_finite

each_source = pytest.mark.parametrize("source", ["value_and_grad", "scale_loss"])


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
    assert dtypes(buffers(model)) == {mx.float32}
    # Nothing about buffers is kept in the state of the scaler.
    assert sorted(scaler.state) == names


class Writes(nn.Module):
    """Writes to arrays in its forward pass: anew, in place, and in a list."""

    def __init__(self, frozen):
        super().__init__()
        self.layer = nn.Linear(8, 1)
        self.center, self.mean, self.calls = mx.zeros(8), mx.zeros(8), mx.array(0)
        self.queue = [mx.zeros(1), mx.ones(1)]
        if frozen:
            self.freeze(keys=["center", "mean", "calls"], recurse=False)

    def __call__(self, x):
        self.center = mx.stop_gradient(0.9 * self.center + 0.1 * mx.mean(x, axis=0))
        self.mean *= 0.5
        self.mean += mx.stop_gradient(mx.mean(x, axis=0))
        self.calls = self.calls + 1
        self.queue.append(self.queue.pop(0))
        return self.layer(x)

    def written(self):
        return [self.center, self.mean, self.calls, self.queue]


@pytest.mark.parametrize("frozen", [True, False])
@each_source
def test_written_arrays_are_kept_as_in_mlx_and_frozen_ones_stay_finite(source, frozen):
    found = []
    for kind in ("mlx", source):
        model = Writes(frozen)
        function = gradient_of(kind, GradScaler(64.0), model, mse(model))
        function(*batch())
        function(*batch(1))
        found.append(bits(model.written()))
    assert found[0] == found[1]
    assert model.calls.item() == 2
    if frozen:
        x, y = batch()
        before = bits([model.center, model.mean])
        function(x * INF, y)
        assert bits([model.center, model.mean]) == before


@pytest.mark.compiles
@pytest.mark.parametrize("compiled", ["whole", "separately"])
def test_buffers_stay_finite_in_a_compiled_step(compiled):
    model, optimizer = Writes(frozen=True), LossScaleOptimizer(optim.SGD(0.01))
    optimizer.init(model.trainable_parameters())
    gradients = optimizer.value_and_grad(model, mse(model))
    update = partial(optimizer.update, model)
    gradients, update = (
        compiled_if(compiled == "separately", f, model.state, optimizer.state)
        for f in (gradients, update)
    )
    traced = Traced(lambda x, y: update(gradients(x, y)[1]))
    step = compiled_if(compiled == "whole", traced, model.state, optimizer.state)
    x, y = batch()
    for factor in (1.0, INF, NAN, 1.0):
        before = bits([model.center, model.mean])
        step(x * factor, y)
        assert (bits([model.center, model.mean]) == before) == (factor != 1.0)
    assert all_finite(model.written()).item()
    assert model.calls.item() == 4
    assert optimizer.scaler.skipped_steps.item() == 2
    assert traced.count == (1 if compiled == "whole" else 4)


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("kind", ["value_and_grad", "compute_dtype", "scale_loss"])
def test_loss_may_shorten_a_list_and_the_model_is_restored_if_it_raises(kind, fails):
    model = Normed()
    model.fifo = [mx.zeros(2), mx.ones(2)]
    before = dict(tree_flatten(model.parameters()))

    def loss_fn(x):
        model.fifo.pop()
        out = model(x)
        if fails:
            model.new = mx.zeros(1)
            raise KeyError("no such batch")
        return mx.mean(out.astype(mx.float32))

    function = gradient_of(kind, GradScaler(), model, loss_fn)
    if kind == "scale_loss":  # MLX's own does not restore the model
        function = mx.grad(GradScaler().scale_loss(loss_fn, model))
    with pytest.raises(KeyError, match="no such batch") if fails else nullcontext():
        function(mx.ones((4, 8)))
    after = dict(tree_flatten(model.parameters()))
    assert after.keys() == before.keys() - {"fifo.1"}
    assert dtypes(after) == {mx.float32}
    assert not fails or all(x is before[path] for path, x in after.items())


@each_source
def test_forward_pass_copies_no_weights(source):
    model = nn.Sequential(nn.Linear(512, 512), nn.Linear(512, 512))
    model.layers[0].freeze()
    scaler, x = GradScaler(64.0), mx.ones((1, 512))
    loss_fn = lambda x: mx.sum(model(x))  # noqa: E731
    if source == "scale_loss":
        function = scaler.scale_loss(loss_fn, model)
    else:
        function = scaler.value_and_grad(model, loss_fn)
    mx.eval(model, x, scaler.state)
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    found = function(x)
    mx.eval(found if source == "scale_loss" else found[0])
    assert mx.get_peak_memory() - before < model.layers[0].weight.nbytes / 8
