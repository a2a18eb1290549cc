"""Differentiating in a compute dtype leaves everything else as it was."""

import copy
import inspect
from contextlib import nullcontext

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten
from support.helpers import Mlp, Traced, batch, bits, compiled_if, dtypes, mse
from support.optimizer_helpers import HALVES, assert_near

from mlx_gradscale import GradScaler, all_finite
from mlx_gradscale.core.intercept import set_handlers

NONE_OR_HALF = pytest.mark.parametrize("compute_dtype", [None, mx.float16])


class TwoInputs(nn.Module):
    """Multiplies by a mask, squares in float32, and fills a dict of the caller."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 1)
        self.shared = [self.last]

    def __call__(self, x, mask=None, *, more=None, seen=None):
        hidden = self.first(x if mask is None else x * mask)
        wide = mx.square(100 * hidden.astype(mx.float32))
        if seen is not None:
            # What a module casts by itself is not cast on its way into a layer.
            seen.update(x=x.dtype, hidden=hidden.dtype, wide=self.last(wide).dtype)
            seen.update(more=more[0]["a"].dtype)
        return self.last((wide / 1e4).astype(hidden.dtype))

    def encode(self, x):
        return self.first(x)


@pytest.mark.parametrize("dtype", HALVES)
def test_what_enters_the_model_is_cast_and_targets_are_not(dtype):
    model, outside, inside = TwoInputs(), {}, {}
    before = bits(model.parameters())

    def loss_fn(x, y, mask):
        out = model(x, mask, more=[{"a": mask}], seen=inside)
        # The input of a diffusion model, a method, and a layer with two paths.
        noisy = 0.9 * x + 0.1 * mx.random.normal(x.shape)
        found = [out, model(noisy), model.encode(x), model.shared[0](x)]
        outside.update(x=x.dtype, y=y.dtype, found={each.dtype for each in found})
        return mx.mean(mx.square(out.astype(mx.float32) - y))

    fn = GradScaler().value_and_grad(model, loss_fn, dtype)
    loss, gradients = fn(*batch(), mx.ones((1, 8)))
    assert outside == {"x": mx.float32, "y": mx.float32, "found": {dtype}}
    assert inside == {"x": dtype, "hidden": dtype, "wide": mx.float32, "more": dtype}
    assert dtypes([loss, gradients]) == {mx.float32}
    assert bits(model.parameters()) == before


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.filterwarnings("ignore:The loss is float16")
def test_loss_of_a_float32_model_computed_in_float16_is_returned_in_float32(enabled):
    model, scaler = Mlp(), GradScaler(1.0, enabled=enabled)
    fn = scaler.value_and_grad(model, lambda x: (model(x).sum(), "more"), mx.float16)
    (loss, more), _ = fn(batch()[0])
    assert (loss.dtype, more) == (mx.float32, "more")


@pytest.mark.compiles
def test_dropout_draws_a_new_mask_in_each_compiled_step():
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5))
    scaler = GradScaler(init_scale=16.0)
    loss_and_grad = scaler.value_and_grad(
        model, lambda x: mx.mean(model(x).astype(mx.float32)), mx.float16
    )
    traced = Traced(lambda x: loss_and_grad(x)[0])
    step = compiled_if(True, traced, model.state, scaler.state, mx.random.state)
    losses = {step(mx.ones((4, 8))).item() for _ in range(8)}
    assert len(losses) > 4
    assert traced.count == 1


def test_auxiliary_outputs_keywords_integers_and_model_arguments_pass_through():
    model, seen = Mlp(), {}

    def loss_fn(model_argument, x, *, labels, options):
        seen.update(model=model_argument, labels=labels.dtype, options=options)
        return mx.mean(model_argument(x).astype(mx.float32)), {"n": labels.size}, 7

    fn = GradScaler().value_and_grad(model, loss_fn, mx.float16)
    own = type("Batch", (dict,), {})(x=mx.ones(2))  # MLX maps over plain containers
    options = {"weights": [mx.ones(2)], "name": "a", "own": own}
    (_, aux, seven), _ = fn(model, batch()[0], labels=mx.array([1, 2]), options=options)
    assert seen["model"] is model
    assert seen["labels"] == mx.int32
    assert seen["options"]["weights"] is options["weights"]
    assert seen["options"]["name"] == "a"
    assert seen["options"]["own"] is own
    assert (aux, seven) == ({"n": 2}, 7)


def call_in_float32(module, function, x):
    return function(x.astype(mx.float32)).astype(x.dtype)


call_in_float32.computes_in_float32 = True


@pytest.mark.parametrize("kept", ["frozen", "keep", "computes_in_float32"])
def test_frozen_kept_and_float32_layers_and_what_enters_them_are_not_cast(kept):
    model, seen, keep = Mlp(), {}, None
    model.act = nn.ReLU()  # without arrays, so that nothing says what to cast to
    if kept == "frozen":
        model.layers[0].freeze()
    elif kept == "keep":
        keep = lambda path, x: path.startswith("layers.0")  # noqa: E731
    else:
        set_handlers(model.layers[0], (call_in_float32,))

    def loss_fn(x, y):
        seen.update({k: v.dtype for k, v in tree_flatten(model.parameters())})
        entered = model.layers[0](1e5 * x), model.act(1e5 * x)
        assert dtypes(entered) == {mx.float32}
        assert all_finite(entered).item()
        return mse(model)(x, y)

    fn = GradScaler().value_and_grad(model, loss_fn, mx.float16, keep=keep)
    _, grads = fn(*batch())
    assert seen["layers.0.weight"] == seen["layers.0.bias"] == mx.float32
    assert seen["layers.1.weight"] == seen["layers.1.bias"] == mx.float16
    assert dtypes(grads) == {mx.float32}


@pytest.mark.parametrize("cast", [True, False])
def test_cast_inputs_false_does_not_cast_what_enters_the_model(cast):
    model, seen = TwoInputs(), []

    def loss_fn(x, y):
        seen.append(model(x).dtype)
        return mse(model)(x, y)

    scaler = GradScaler()
    scaler.value_and_grad(model, loss_fn, mx.float16, cast_inputs=cast)(*batch())
    assert seen == [mx.float16 if cast else mx.float32]


@pytest.mark.parametrize("ends", ["returns", "raises", "nested", "recursive"])
def test_modules_have_their_own_classes_after_a_loss(ends):
    model, scaler, depth = Mlp(), GradScaler(8.0), []
    model.table = nn.Module()  # which cannot be called
    inner = scaler.value_and_grad(model, lambda x: mx.sum(model(x)), mx.float16)

    def loss_fn(x):
        depth.append(callable(model.table))
        if ends == "nested":
            return inner(x)[0]
        if ends == "recursive" and len(depth) == 1:
            outer(x)
        loss = mx.sum(model(x))
        return {}["missing"] if ends == "raises" else loss.astype(mx.float32)

    outer = scaler.value_and_grad(model, loss_fn, mx.float16)
    with pytest.raises(KeyError) if ends == "raises" else nullcontext():
        outer(batch()[0])
    assert depth == [False] * (2 if ends == "recursive" else 1)
    found = [type(x) for x in (model, model.layers[0], model.table)]
    assert found == [Mlp, nn.Linear, nn.Module]


def test_loss_may_inspect_copy_and_change_the_classes_of_modules():
    model, kept = Mlp(), []
    Hooked = type("Hooked", (nn.Linear,), {})

    def loss_fn(x, y):
        assert [*inspect.signature(model.__call__).parameters] == ["x"]
        kept.append(copy.deepcopy(model))
        model.layers[0].__class__ = Hooked
        return mse(model)(x, y)

    GradScaler(8.0).value_and_grad(model, loss_fn, mx.float16)(*batch())
    assert [type(layer) for layer in model.layers] == [Hooked, nn.Linear]
    copied = [type(each) for each in (kept[0], *kept[0].layers)]
    assert copied == [Mlp, nn.Linear, nn.Linear]


@pytest.mark.parametrize("dtype", [mx.int32, "float16", np.float16])
def test_compute_dtype_that_is_not_floating_is_refused(dtype):
    with pytest.raises(ValueError, match=r"must be a float mx\.Dtype"):
        GradScaler().value_and_grad(Mlp(), lambda: None, dtype)


@NONE_OR_HALF
def test_loss_that_is_not_a_scalar_array_is_refused_with_its_shape(compute_dtype):
    model, scaler = Mlp(), GradScaler()
    loss_fn = lambda x, y: mx.square(model(x) - y).astype(mx.float32)  # noqa: E731
    for call in (
        scaler.value_and_grad(model, loss_fn, compute_dtype),
        nn.value_and_grad(model, scaler.scale_loss(loss_fn, model)),
    ):
        with pytest.raises(ValueError, match=r"must be a scalar.* shape \(32, 1\)"):
            call(*batch())
    with pytest.raises(TypeError, match=r"must return an mx\.array"):
        GradScaler().scale_loss(lambda: 1.0)()


@NONE_OR_HALF
def test_value_and_grad_restores_the_models_own_arrays(compute_dtype):
    model = Mlp()
    before = [(path, id(x)) for path, x in tree_flatten(model.parameters())]
    GradScaler().value_and_grad(model, mse(model), compute_dtype)(*batch())
    assert [(path, id(x)) for path, x in tree_flatten(model.parameters())] == before


def test_penalty_on_gradients_from_value_and_grad_is_correct():
    model, scaler = Mlp(), GradScaler(1024.0)
    found, weights = [], model.trainable_parameters()
    for make in (scaler.value_and_grad, nn.value_and_grad):

        def penalty(parameters, make=make):
            model.update(parameters)
            _, grads = make(model, mse(model))(*batch())
            return sum(mx.sum(mx.square(x)) for _, x in tree_flatten(grads))

        found.append(mx.grad(penalty)(weights))
        model.update(weights)
    assert_near(*found, rtol=1e-4, atol=1e-5)


def test_loss_is_not_multiplied_by_the_scale():
    model, scaler = Mlp(), GradScaler(2.0**64)
    fn = scaler.value_and_grad(model, lambda x: 2.0**100 + 0 * mx.sum(model(x)))
    loss, grads = fn(batch()[0])
    assert loss.item() == 2.0**100  # times the scale it would be inf
    assert all(mx.all(g == 0).item() for _, g in tree_flatten(grads))


def test_loss_may_compute_from_its_arguments_what_mlx_cannot_differentiate():
    model = Mlp()

    def loss_fn(x, y):
        whitening = mx.linalg.cholesky(x.T @ x + mx.eye(8), stream=mx.cpu)
        return mse(model)(x @ whitening, y)

    fns = GradScaler().value_and_grad(model, loss_fn), nn.value_and_grad(model, loss_fn)
    assert_near(*(fn(*batch()) for fn in fns), rtol=1e-5)
