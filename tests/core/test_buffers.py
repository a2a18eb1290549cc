"""A buffer that a forward pass writes never becomes non-finite."""

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import pytest
from mlx.utils import tree_map
from support.helpers import INF, NAN, Traced, batch, bits, mse

from mlx_gradscale import GradScaler, GuardedOptimizer, LossScaleOptimizer


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


def all_finite(arrays):
    return all(mx.all(mx.isfinite(x)).item() for x in arrays)


class Run:
    """A model trained in one of the modes; the step compiled as a whole, or in two."""

    def __init__(self, mode, compiled):
        mx.random.seed(2)
        self.model = model = Normed()
        self.scaler = scaler = GradScaler(1024.0)
        inner = optim.SGD(0.01)
        self.optimizer = optimizer = LossScaleOptimizer(inner, scaler)
        if mode == "GradScaler":
            self.optimizer = inner
            gradients = scaler.value_and_grad(model, mse(model), mx.float16)
        elif mode == "value_and_grad":
            gradients = optimizer.value_and_grad(model, mse(model), mx.float16)
        else:
            loss_fn = optimizer.scale_loss(lambda model, x, y: mse(model)(x, y))
            of_model = nn.value_and_grad(model, loss_fn)
            gradients = lambda x, y: of_model(model, x, y)  # noqa: E731
        self.optimizer.init(model.trainable_parameters())
        if mode == "GradScaler":
            update = lambda grads: scaler.minimize(inner, model, grads)  # noqa: E731
        else:
            update = lambda grads: optimizer.update(model, grads)  # noqa: E731
        self.state = [model.state, self.optimizer.state, scaler.state]
        keys = {"inputs": self.state, "outputs": self.state}
        if compiled == "separately":
            gradients, update = (
                mx.compile(gradients, **keys),
                mx.compile(update, **keys),
            )

        def step(x, y):
            loss, grads = gradients(x, y)
            update(grads)
            return loss

        self.traced = self.step = Traced(step)
        if compiled == "whole":
            self.step = mx.compile(self.traced, **keys)


# A BatchNorm takes 20 kernels.
compiled_only = [pytest.mark.compiles, pytest.mark.many_kernels]


@pytest.mark.parametrize(
    ("mode", "compiled"),
    [
        ("GradScaler", "eager"),
        ("value_and_grad", "eager"),
        ("scale_loss", "eager"),
        pytest.param("GradScaler", "whole", marks=compiled_only),
        pytest.param("value_and_grad", "separately", marks=compiled_only),
    ],
)
def test_statistics_stay_finite_after_an_infinite_batch(mode, compiled):
    run = Run(mode, compiled)
    names = sorted(run.scaler.state)
    x, y = batch(0)
    run.step(x, y)
    moved = bits(buffers(run.model))
    trained = bits(run.model.trainable_parameters())
    for value in (INF, NAN):
        run.step(x * value, y)
        assert bits(buffers(run.model)) == moved
        assert bits(run.model.trainable_parameters()) == trained
    assert run.scaler.skipped_steps.item() == 2
    run.model.layers[1].running_mean = mx.full((8,), 7.0)
    run.step(x * INF, y)
    assert run.model.layers[1].running_mean.tolist() == [7.0] * 8
    # As in PyTorch, the forward pass of a skipped step may move statistics.
    run.step(x, y * NAN)
    assert run.scaler.skipped_steps.item() == 4
    run.step(*batch(2))
    assert bits(buffers(run.model)) != moved
    assert all_finite(buffers(run.model))
    # Nothing about buffers is kept in the state of the scaler.
    assert sorted(run.scaler.state) == names


@pytest.mark.parametrize("make", [LossScaleOptimizer, GuardedOptimizer])
def test_accumulated_passes_each_keep_the_statistics_finite(make):
    mx.random.seed(2)
    model, optimizer = Normed(), make(optim.SGD(0.01))
    loss_and_grad = optimizer.value_and_grad(model, mse(model))
    total = None
    for factor in (1.0, INF, 1.0):
        x, y = batch(3)
        before = bits(buffers(model))
        _, grads = loss_and_grad(x * factor, y)
        assert (bits(buffers(model)) == before) == (factor == INF)
        total = grads if total is None else tree_map(mx.add, total, grads)
    optimizer.update(model, total)
    assert not optimizer.scaler.last_step_applied.item()
    assert all_finite(buffers(model))


def test_a_validation_loss_of_scale_loss_writes_nothing_non_finite():
    mx.random.seed(2)
    model, scaler = Normed(), GradScaler(16.0)
    loss_fn = scaler.scale_loss(lambda model, x, y: mse(model)(x, y))
    x, y = batch(0)
    loss_fn(model, x, y)
    before = bits(buffers(model))
    assert mx.isnan(loss_fn(model, x * NAN, y)).item()
    assert bits(buffers(model)) == before


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


@pytest.mark.parametrize("kind", ["value_and_grad", "cast", "scale_loss"])
def test_the_model_and_its_statistics_are_restored_when_the_loss_raises(kind):
    model, scaler = Normed(), GradScaler()
    before = bits(model.parameters())

    def loss_fn(x):
        model(x)
        raise KeyError("no such batch")

    if kind == "scale_loss":
        function = scaler.scale_loss(loss_fn, model)
    else:
        compute_dtype = mx.float16 if kind == "cast" else None
        function = scaler.value_and_grad(model, loss_fn, compute_dtype)
    with pytest.raises(KeyError, match="no such batch"):
        function(mx.ones((4, 8)))
    assert bits(model.parameters()) == before
