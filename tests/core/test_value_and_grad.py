"""Differentiating in a compute dtype leaves everything else as it was."""

import warnings

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
import pytest
from mlx.utils import tree_flatten
from support.helpers import Mlp, Traced, batch, bits, mse

from mlx_gradscale import GradScaler

pytestmark = pytest.mark.core

HALVES = [mx.float16, mx.bfloat16]


def dtypes(tree):
    return {x.dtype for _, x in tree_flatten(tree)}


@pytest.mark.parametrize("dtype", HALVES)
def test_the_forward_pass_is_cast_and_the_gradients_are_float32(dtype):
    model, scaler, seen = Mlp(), GradScaler(), []
    before = bits(model.parameters())

    def loss_fn(x, y):
        seen.append((x.dtype, y.dtype, dtypes(model.parameters())))
        return mse(model)(x, y)

    loss, gradients = scaler.value_and_grad(model, loss_fn, dtype)(*batch())
    assert seen == [(dtype, dtype, {dtype})]
    assert dtypes(gradients) == {mx.float32}
    assert loss.dtype == mx.float32
    assert bits(model.parameters()) == before


def test_the_loss_and_the_gradients_are_true():
    model, scaler = Mlp(), GradScaler(init_scale=2.0**10)
    loss_and_grad = scaler.value_and_grad(model, mse(model), mx.float16)
    loss, gradients = loss_and_grad(*batch())
    expected, plain = nn.value_and_grad(model, mse(model))(*batch())
    assert loss.item() == pytest.approx(expected.item(), rel=1e-2)
    for (_, a), (_, b) in zip(
        tree_flatten(gradients), tree_flatten(plain), strict=True
    ):
        assert np.allclose(np.array(a), np.array(b), rtol=0.02, atol=1e-2)


def test_small_gradients_survive_only_when_scaled():
    def gradient(scale):
        model = Mlp()
        scaler = GradScaler(init_scale=scale)

        def loss_fn(x, y):
            return mse(model)(x, y) * 1e-7

        _, gradients = scaler.value_and_grad(model, loss_fn, mx.float16)(*batch())
        return np.array(gradients["layers"][0]["weight"])

    lost = (gradient(1.0) == 0).mean()
    kept = (gradient(2.0**16) == 0).mean()
    assert lost > 0.8
    assert kept < lost / 2


def test_the_model_is_restored_when_the_loss_raises():
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm(8))
    before = bits(model.parameters())

    def loss_fn(x):
        model(x)
        raise KeyError("no such batch")

    with pytest.raises(KeyError):
        GradScaler().value_and_grad(model, loss_fn, mx.float16)(mx.ones((4, 8)))
    assert bits(model.parameters()) == before


def test_batch_norm_statistics_stay_float32_and_move():
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm(8))
    scaler, optimizer = GradScaler(init_scale=128.0), optim.SGD(0.1)
    loss_and_grad = scaler.value_and_grad(
        model, lambda x: mx.mean(mx.square(model(x).astype(mx.float32))), mx.float16
    )
    optimizer.init(model.trainable_parameters())
    state = [model.state, optimizer.state, scaler.state]

    def step(x):
        loss, gradients = loss_and_grad(x)
        return loss, scaler.minimize(optimizer, model, gradients)

    compiled = mx.compile(step, inputs=state, outputs=state)
    for seed in range(3):
        before = np.array(model.layers[1].running_mean)
        _, applied = compiled(batch(seed)[0])
        assert applied.item()
        assert not np.array_equal(np.array(model.layers[1].running_mean), before)
    assert dtypes(model.parameters()) == {mx.float32}


def test_dropout_draws_anew_in_a_compiled_step():
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5))
    scaler = GradScaler(init_scale=16.0)
    loss_and_grad = scaler.value_and_grad(
        model, lambda x: mx.mean(model(x).astype(mx.float32)), mx.float16
    )
    state = [model.state, scaler.state, mx.random.state]
    traced = Traced(lambda x: loss_and_grad(x)[0])
    step = mx.compile(traced, inputs=state, outputs=state)
    losses = {step(mx.ones((4, 8))).item() for _ in range(8)}
    assert len(losses) > 4
    assert traced.count == 1


def test_aux_keywords_integers_and_a_model_among_the_arguments():
    model, seen = Mlp(), {}

    def loss_fn(model_argument, x, *, labels, options):
        seen.update(model=model_argument, labels=labels.dtype, options=options)
        return mx.mean(model_argument(x).astype(mx.float32)), {"n": labels.size}, 7

    fn = GradScaler().value_and_grad(model, loss_fn, mx.float16)
    options = {"weights": [mx.ones(2)], "name": "a"}
    (_, aux, seven), _ = fn(model, batch()[0], labels=mx.array([1, 2]), options=options)
    assert seen["model"] is model
    assert seen["labels"] == mx.int32
    assert seen["options"]["weights"][0].dtype == mx.float16
    assert seen["options"]["name"] == "a"
    assert options["weights"][0].dtype == mx.float32
    assert (aux, seven) == ({"n": 2}, 7)


@pytest.mark.filterwarnings("ignore:.*computes in float32")
def test_a_dict_subclass_among_the_arguments_is_left_alone():
    class Batch(dict):
        pass

    model = Mlp()
    given = Batch(x=batch()[0])

    def loss_fn(given_again):
        assert given_again is given
        return mx.mean(model(given_again["x"]).astype(mx.float32))

    GradScaler().value_and_grad(model, loss_fn, mx.float16)(given)


@pytest.mark.filterwarnings("ignore:.*computes in float32")
def test_chosen_parameters_stay_in_float32():
    model, seen = Mlp(), {}

    def loss_fn(x, y):
        seen.update({k: v.dtype for k, v in tree_flatten(model.parameters())})
        return mse(model)(x, y)

    GradScaler().value_and_grad(
        model, loss_fn, mx.float16, keep=lambda path, x: x.ndim == 1
    )(*batch())
    assert seen["layers.0.bias"] == mx.float32
    assert seen["layers.0.weight"] == mx.float16


def test_inputs_stay_as_they_are_if_asked_for():
    model = Mlp()
    seen = {}

    def loss_fn(x, y, mask):
        output = model(x.astype(mx.float16)).astype(mx.float32)
        seen.update(x=x.dtype, y=y.dtype, mask=mask.dtype, output=output.dtype)
        return mx.mean(mask * (output - y) ** 2)

    x, y = batch()
    fn = GradScaler(init_scale=1.0).value_and_grad(
        model, loss_fn, mx.float16, cast_inputs=False
    )
    loss, _ = fn(x, y + 1e5, mask=mx.ones_like(y))
    assert set(seen.values()) == {mx.float32}
    assert mx.isfinite(loss).item()
    cast = GradScaler(init_scale=1.0).value_and_grad(model, loss_fn, mx.float16)
    loss, _ = cast(x, y + 1e5, mask=mx.ones_like(y))
    assert set(seen.values()) == {mx.float16, mx.float32}
    assert mx.isinf(loss).item()


@pytest.mark.filterwarnings("ignore:.*computes in float32")
def test_frozen_parameters_are_not_cast():
    model, seen = Mlp(), {}
    model.layers[0].freeze()

    def loss_fn(x, y):
        seen.update({k: v.dtype for k, v in tree_flatten(model.parameters())})
        return mse(model)(x, y)

    GradScaler().value_and_grad(model, loss_fn, mx.float16)(*batch())
    assert seen["layers.0.weight"] == mx.float32
    assert seen["layers.1.weight"] == mx.float16


def test_gradient_checkpointing_gives_the_same_gradients():
    model, scaler = Mlp(), GradScaler(init_scale=256.0)
    plain = scaler.value_and_grad(model, mse(model), mx.float16)(*batch())
    layer = nn.utils.checkpoint(model.layers[0])

    def loss_fn(x, y):
        out = model.layers[1](nn.relu(layer(x)))
        return mx.mean(mx.square(out.astype(mx.float32) - y.astype(mx.float32)))

    checkpointed = scaler.value_and_grad(model, loss_fn, mx.float16)(*batch())
    assert bits(plain) == bits(checkpointed)


@pytest.mark.parametrize("dtype", [mx.int32, "float16", np.float16])
def test_a_compute_dtype_that_is_not_floating_is_refused(dtype):
    with pytest.raises(ValueError, match="must be a floating dtype"):
        GradScaler().value_and_grad(Mlp(), lambda: None, dtype)


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


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_what_a_forward_pass_writes_to_a_trainable_array_stays_as_in_mlx(compiled):
    found = []
    for ours in (False, True):
        model = Counts()
        make = GradScaler(64.0).value_and_grad if ours else nn.value_and_grad
        function = make(model, mse(model))
        if compiled:
            scaled = [model.state]
            function = mx.compile(function, inputs=scaled, outputs=scaled)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            function(*batch())
            function(*batch(1))
        found.append((model.center, model.calls))
    assert bits(found[0]) == bits(found[1])
    assert found[1][1].item() == 2


@pytest.mark.parametrize("compute_dtype", [None, mx.float16])
def test_the_model_holds_its_own_arrays_again(compute_dtype):
    model = Mlp()
    before = tree_flatten(model.parameters())
    GradScaler().value_and_grad(model, mse(model), compute_dtype)(*batch())
    after = tree_flatten(model.parameters())
    assert [(path, id(x)) for path, x in after] == [(p, id(x)) for p, x in before]
