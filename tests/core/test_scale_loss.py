"""``scale_loss``: unscaled gradients for other trainers, on both classes."""

import math
from typing import NamedTuple

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
import pytest
from mlx.utils import tree_flatten
from support.helpers import NAN, Mlp, batch, bits, each_mode, mse

from mlx_gradscale import GradScaler, LossScaleOptimizer

either = pytest.mark.parametrize("wrap", [False, True], ids=["scaler", "wrapper"])


def make(wrap, scale=256.0):
    scaler = GradScaler(scale)
    return LossScaleOptimizer(optim.SGD(0.1), scaler) if wrap else scaler


def model_of(seed=3):
    mx.random.seed(seed)
    return Mlp(dtype=mx.float16)


def loss_with_model(model, x, y):
    return mse(model)(x, y)


def half_batch(seed=0):
    return batch(seed, dtype=mx.float16)


def as_arrays(tree):
    return {path: np.array(x) for path, x in tree_flatten(tree)}


def check_close(found, expected):
    expected = as_arrays(expected)
    for path, x in as_arrays(found).items():
        assert x.dtype == np.float32
        assert np.allclose(x, expected[path], rtol=0.02, atol=1e-2), path


def differentiated(kind, source, model):
    if kind == "argument":
        fn = nn.value_and_grad(model, source.scale_loss(loss_with_model))
        return lambda x, y: fn(model, x, y)
    return nn.value_and_grad(model, source.scale_loss(mse(model), model))


@each_mode
@either
@pytest.mark.parametrize("kind", ["argument", "closure"])
def test_gradients_of_a_model_are_unscaled_and_float32_at_any_scale(
    kind, wrap, compiled
):
    model = model_of()
    loss, plain = nn.value_and_grad(model, mse(model))(*half_batch())
    for scale in (1.0, 2.0**10, 2.0**14):
        source = make(wrap, scale)
        fn = differentiated(kind, source, model)
        if compiled:
            state = [model.state, source.state]
            fn = mx.compile(fn, inputs=state, outputs=state)
        value, grads = fn(*half_batch())
        assert value.item() == pytest.approx(loss.item(), rel=1e-3)
        check_close(grads, plain)


@either
def test_gradients_of_a_plain_tree_are_unscaled_for_the_first_argument(wrap):
    loss_fn = make(wrap).scale_loss(
        lambda tree, k, *, j: (mx.sum(tree["w"] * k) + tree["b"][0].sum() * j, {"k": k})
    )
    tree = {"w": mx.array([0.5, 1.0], mx.float16), "b": [mx.ones(3)], "i": mx.array(2)}
    (loss, aux), grads = mx.value_and_grad(loss_fn)(tree, 3.0, j=2.0)
    assert (loss.item(), aux) == (10.5, {"k": 3.0})
    assert (grads["w"].dtype, grads["w"].tolist()) == (mx.float32, [3.0, 3.0])
    assert grads["b"][0].tolist() == [2.0] * 3


@either
def test_the_value_is_not_scaled_and_an_overflow_is_nan(wrap):
    source = make(wrap, 2.0**64)
    loss_fn = source.scale_loss(lambda w, k: mx.sum(w * k))
    loss, gradient = mx.value_and_grad(loss_fn)(mx.array([0.5, 1.0]), 2.0**64)
    assert loss.item() == 1.5 * 2.0**64  # times the scale it would be inf
    assert mx.isnan(gradient).all().item()


def test_models_are_found_in_arguments_once_and_at_any_depth():
    model = model_of()
    plain = nn.value_and_grad(model, mse(model))(*half_batch())[1]
    optimizer = make(True, 64.0)

    def loss_fn(options, layers, x, *, y):
        return mse(options["model"])(x, y), layers

    loss_and_grad = nn.value_and_grad(model, optimizer.scale_loss(loss_fn))
    x, y = half_batch()
    # The same model twice, and layers of it: its gradients are unscaled once.
    _, grads = loss_and_grad({"model": model, "again": [model]}, model.layers, x, y=y)
    for path, g in as_arrays(grads).items():
        assert np.allclose(g, as_arrays(plain)[path], rtol=0.02, atol=1e-2)


@either
def test_gradients_that_scale_loss_did_not_unscale_are_refused_at_the_step(wrap):
    student, teacher, source = model_of(), model_of(7), make(wrap)

    def distil(teacher, x):
        return mx.mean(mx.square(student(x) - teacher(x)).astype(mx.float32))

    fn = nn.value_and_grad(student, source.scale_loss(distil))
    _, grads = fn(teacher, half_batch()[0])
    before = bits(student.parameters())
    step = source.update
    if not wrap:
        student.set_dtype(mx.float32)
        before = bits(student.parameters())
        step = lambda model, g: source.step(optim.SGD(0.1), model, g)  # noqa: E731
    with pytest.raises(RuntimeError, match=r"scale_loss\(loss_fn, model\)"):
        step(student, grads)
    assert bits(student.parameters()) == before


def test_a_checkpointed_layer_may_replace_its_parameters():
    model = model_of()
    layer = nn.utils.checkpoint(model.layers[0])

    def loss_fn(model, x, y):
        out = model.layers[1](nn.relu(layer(x)))
        return mx.mean(mx.square(out.astype(mx.float32) - y))

    optimizer = LossScaleOptimizer(optim.SGD(0.1), GradScaler(64.0))
    scaled = optimizer.scale_loss(loss_fn)
    _, grads = nn.value_and_grad(model, scaled)(model, *half_batch())
    plain = nn.value_and_grad(model, mse(model))(*half_batch())[1]
    for path, x in as_arrays(grads).items():
        assert np.allclose(x, as_arrays(plain)[path], rtol=0.02, atol=1e-2)
    optimizer.update(model, grads)
    assert optimizer.scaler.last_step_applied.item()


def test_a_validation_loss_does_not_affect_the_next_step():
    model = model_of()
    optimizer = LossScaleOptimizer(optim.SGD(0.1), GradScaler(64.0))
    loss_fn = optimizer.scale_loss(loss_with_model)
    before = bits(model.parameters())
    x, y = half_batch()
    assert math.isnan(loss_fn(model, x * NAN, y).item())
    assert bits(model.parameters()) == before
    _, grads = nn.value_and_grad(model, loss_fn)(model, x, y)
    optimizer.update(model, grads)
    assert optimizer.scaler.last_step_applied.item()


def test_tied_weights_and_integer_parameters_are_differentiated_rightly():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(5, 4)
            self.count = mx.array([3])
            self.embedding.set_dtype(mx.float16)

        def __call__(self, tokens):
            hidden = self.embedding(tokens) * self.count.astype(mx.float16)
            return self.embedding.as_linear(hidden)

    mx.random.seed(0)
    model, tokens = Tied(), mx.array([[0, 1, 4]])

    def loss_fn(model, tokens):
        logits = model(tokens).astype(mx.float32)
        return nn.losses.cross_entropy(logits, tokens, reduction="mean")

    plain = nn.value_and_grad(model, loss_fn)(model, tokens)[1]
    optimizer = LossScaleOptimizer(optim.SGD(0.0), GradScaler(512.0))
    for loss_and_grad in (
        nn.value_and_grad(model, optimizer.scale_loss(loss_fn)),
        optimizer.value_and_grad(model, loss_fn),
    ):
        _, grads = loss_and_grad(model, tokens)
        assert grads["embedding"]["weight"].dtype == mx.float32
        assert np.allclose(
            np.array(grads["embedding"]["weight"]),
            np.array(plain["embedding"]["weight"]),
            rtol=0.02,
            atol=1e-3,
        )
        optimizer.update(model, grads)
        assert optimizer.scaler.last_step_applied.item()


def own_arrays(model):
    return {path: id(x) for path, x in tree_flatten(model.parameters())}


@pytest.mark.parametrize("fails", [False, True], ids=["returns", "raises"])
def test_loss_without_gradients_leaves_the_model_its_own_arrays(fails):
    model, optimizer = Mlp(dtype=mx.float16), LossScaleOptimizer(optim.SGD(0.1))

    def loss_fn(x, y):
        loss = mse(model)(x, y)
        if fails:
            raise KeyError("the user's")
        return loss

    # As for validation with the same function: MLX puts nothing back there.
    kept, before = model.parameters(), own_arrays(model)
    scaled = optimizer.scale_loss(loss_fn, model)
    if fails:
        with pytest.raises(KeyError, match="the user's"):
            scaled(*batch(dtype=mx.float16))
    else:
        expected = mse(model)(*batch(dtype=mx.float16))
        assert scaled(*batch(dtype=mx.float16)).item() == expected.item()
    assert own_arrays(model) == before
    assert kept.keys() == model.parameters().keys()


class Outputs(NamedTuple):
    loss: mx.array
    tokens: int


@pytest.mark.parametrize("wrap", [False, True], ids=["scaler", "wrapper"])
def test_named_tuple_returned_by_the_loss_function_keeps_its_names(wrap):
    model, scaler = Mlp(), GradScaler(4.0)

    def loss_fn(x, y):
        return Outputs(mse(model)(x, y), 7)

    if wrap:
        scaled = LossScaleOptimizer(optim.SGD(0.1), scaler).scale_loss(loss_fn, model)
    else:
        scaled = scaler.scale_loss(loss_fn, model)
    found = scaled(*batch())
    assert type(found) is Outputs
    assert (found.loss.item(), found.tokens) == (mse(model)(*batch()).item(), 7)
    (loss, tokens), _ = nn.value_and_grad(model, scaled)(*batch())
    assert (loss.item(), tokens) == (found.loss.item(), 7)
