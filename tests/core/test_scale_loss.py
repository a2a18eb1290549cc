"""``scale_loss``: unscaled gradients for other trainers, on both classes."""

from collections import OrderedDict
from functools import partial
from itertools import product
from typing import NamedTuple

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import pytest
from mlx.utils import tree_flatten, tree_map
from support.helpers import Mlp, batch, bits, compiled_if, dtypes, mse
from support.optimizer_helpers import assert_near

from mlx_gradscale import GradScaler, LossScaleOptimizer

either = pytest.mark.parametrize("wrap", [False, True], ids=["scaler", "wrapper"])


def make(wrap, scale=256.0):
    scaler = GradScaler(scale)
    return LossScaleOptimizer(optim.SGD(0.1), scaler) if wrap else scaler


def plain(loss_fn, model=None):
    return loss_fn


class Tied(nn.Module):
    """A weight that is used twice, and an integer parameter."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(5, 8)
        self.count = mx.array([3])
        self.embedding.set_dtype(mx.float16)

    def __call__(self, x):
        hidden = self.embedding(mx.arange(x.shape[0]) % 5) * self.count
        return mx.mean(self.embedding.as_linear(hidden * x), axis=1, keepdims=True)


def argument(wrap, model):
    return partial(wrap(lambda model, x, y: mse(model)(x, y)), model)


def nested_arguments(wrap, model):
    loss_fn = wrap(lambda options, layers, x, y: mse(options["model"])(x, y))
    # The same model twice, and layers of it: its gradients are unscaled once.
    return partial(loss_fn, {"model": model, "again": [model]}, model.children())


def recomputed(wrap, model):
    """Its first layer's parameters are replaced while the loss is computed."""
    first = nn.utils.checkpoint(model.layers[0])

    def loss_fn(x, y):
        return mx.mean(mx.square(model.layers[1](nn.relu(first(x))) - y))

    return wrap(loss_fn, model)


def two_models(wrap, models):
    # As in a GAN whose discriminator is passed, and whose generator is forgotten.
    generator, discriminator = models.both
    features = lambda x: mx.broadcast_to(generator(x), x.shape)  # noqa: E731
    return wrap(lambda x, y: mse(discriminator)(features(x), y), discriminator)


def outer_features(wrap, model):
    head = wrap(lambda h, y: mx.mean(mx.square(model.layers[1](h) - y)), model.layers)
    return lambda x, y: head(nn.relu(model.layers[0](x)), y)


def penalty(wrap, model):
    inner = nn.value_and_grad(model, mse(model))

    def loss_fn(x, y):
        # First, because MLX then takes only what is computed from x for traced.
        squares = [mx.sum(mx.square(g)) for _, g in tree_flatten(inner(x, y)[1])]
        return mse(model)(x, y) + 0.1 * sum(squares)

    return wrap(loss_fn, model)


def dropout(wrap, model):
    layer = nn.Dropout(0.5)

    def loss_fn(x, y):
        mx.random.seed(4)
        return mse(model)(layer(x), y)

    return wrap(loss_fn, model)


def outer_term(wrap, model):
    loss_fn = wrap(mse(model), model)

    def total(x, y):
        weights = [w for _, w in tree_flatten(model.parameters())]
        return loss_fn(x, y) / 2 + 0.1 * sum(mx.sum(mx.square(w)) for w in weights)

    return total


def two_losses(wrap, model):
    first, second = (wrap(mse(model), model) for _ in range(2))
    return lambda x, y: first(x, y) + second(2 * x, y)


class Both(nn.Module):
    def __init__(self):
        super().__init__()
        self.both = [Mlp(), Mlp()]


# All parameters are given to these, so that their gradients come out in float32.
GIVEN = {
    "model": lambda wrap, model: wrap(mse(model), model),
    "tied": lambda wrap, model: wrap(mse(model), model),
    "tied argument": argument,
    "argument": argument,
    "nested arguments": nested_arguments,
    "recomputed": recomputed,
}
CASES = GIVEN | {
    "closure": lambda wrap, model: wrap(mse(model)),
    "layers": lambda wrap, model: wrap(mse(model), model.layers[1]),
    "twice": lambda wrap, model: wrap(wrap(mse(model), model), [model]),
    "two models": two_models,
    "outer features": outer_features,
    "outer term": outer_term,
    "penalty": penalty,
    "dropout": dropout,
    "two losses": two_losses,
}
del CASES["tied"], CASES["tied argument"]  # their weights are float16


def gradients_of(case, wrap, dtype, compiled=False, differentiate=nn.value_and_grad):
    """Return the loss and the gradients; check that the model keeps its weights."""
    mx.random.seed(5)
    model = Both() if case == "two models" else Tied() if "tied" in case else Mlp()
    model.set_dtype(dtype)
    before = bits(model.parameters())
    fn = differentiate(model, (GIVEN | CASES)[case](wrap, model))
    loss, grads = compiled_if(compiled, fn, model.state)(*batch(dtype=dtype))
    assert bits(model.parameters()) == before
    grads.pop("count", None)  # an integer parameter
    return loss, grads


SCALER = GradScaler(2.0**14)
# How a loss is wrapped, how it is differentiated, and what computes it in bfloat16.
SOURCES = {
    "scale_loss": (SCALER.scale_loss, nn.value_and_grad, False),
    "value_and_grad": (plain, SCALER.value_and_grad, False),
    "scale_loss, cast": (
        lambda loss_fn, model=None: SCALER.scale_loss(loss_fn, model, mx.bfloat16),
        nn.value_and_grad,
        True,
    ),
    "value_and_grad, cast": (
        plain,
        lambda *x: SCALER.value_and_grad(*x, mx.bfloat16),
        True,
    ),
}


@pytest.mark.compiles
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize(
    ("case", "source"),
    [x for x in product(CASES, SOURCES) if x != ("twice", "scale_loss, cast")],
)
def test_gradients_are_those_of_plain_mlx_whatever_the_loss_is(case, compiled, source):
    wrap, differentiate, is_cast = SOURCES[source]
    found = gradients_of(case, wrap, mx.float32, compiled, differentiate)
    expected = gradients_of(case, plain, mx.float32, compiled)
    near = 0.1 if is_cast else 1e-6
    assert_near(found, expected, rtol=near, atol=near)
    assert dtypes(found) == {mx.float32}
    if case in GIVEN:
        assert mx.allclose(found[0], expected[0], rtol=1e-6) != is_cast


@either
@pytest.mark.parametrize(
    ("case", "compiled"),
    [(case, False) for case in GIVEN]
    + [pytest.param("model", True, marks=pytest.mark.compiles)],
)
def test_gradients_of_a_float16_model_are_unscaled_and_float32(case, compiled, wrap):
    expected, grads = gradients_of(case, plain, mx.float16)
    for scale in (1.0, 2.0**10, 2.0**14):
        source = make(wrap, scale)
        loss, found = gradients_of(case, source.scale_loss, mx.float16, compiled)
        assert loss.item() == pytest.approx(expected.item(), rel=1e-3)
        assert_near(found, grads, rtol=0.02, atol=0.02)
        assert dtypes(found) == {mx.float32}


class Outputs(NamedTuple):
    loss: mx.array
    tokens: int


@either
def test_validation_with_scale_loss_does_not_replace_the_model_arrays(wrap):
    model, data = Mlp(dtype=mx.float16), batch(dtype=mx.float16)
    before = [id(x) for _, x in tree_flatten(model.parameters())]
    loss_fn = make(wrap).scale_loss(lambda *xy: Outputs(mse(model)(*xy), 7), model)
    found = loss_fn(*data)
    assert type(found) is Outputs
    assert found.loss.item() == mse(model)(*data).item()
    # MLX puts nothing back if the loss is not differentiated.
    assert [id(x) for _, x in tree_flatten(model.parameters())] == before
    (loss, tokens), _ = nn.value_and_grad(model, loss_fn)(*data)
    assert (loss.item(), tokens) == (found.loss.item(), 7)


def test_scale_loss_returns_the_unscaled_loss_and_nan_for_an_overflow():
    loss_fn = GradScaler(2.0**64).scale_loss(lambda w, k: mx.sum(w * k))
    loss, gradient = mx.value_and_grad(loss_fn)(mx.array([0.5, 1.0]), 2.0**64)
    assert loss.item() == 1.5 * 2.0**64  # times the scale it would be inf
    assert mx.isnan(gradient).all().item()


@either
def test_loss_in_place_of_a_loss_function_is_refused_at_once(wrap):
    with pytest.raises(TypeError, match=r"Expected the loss function.*scale\(\)"):
        make(wrap).scale_loss(mx.array(1.0))  # as in Keras


def test_gradients_of_every_argument_are_unscaled_and_float32():
    def loss_fn(tree, b, seen, *, c):
        seen["a"] = tree["a"][0].dtype  # a loss may write to a container
        loss = mx.sum(tree["a"][0] * b["x"] * c) * tree["rest"]
        return loss, {"k": 2 * c, "n": 3}

    a, seen = mx.array([0.5, 1.0], mx.float16), {}
    tree = OrderedDict(a=[a], rest=mx.array(3.0), i=mx.array(2))
    loss_fn = GradScaler(256.0).scale_loss(loss_fn)
    fn = mx.value_and_grad(loss_fn, argnums=(0, 1), argnames="c")
    x = {"x": mx.array([2.0, 4.0])}
    (loss, aux), ((of_tree, of_b), of_c) = fn(tree, x, seen, c=mx.ones(2))
    assert (loss.item(), aux["n"], aux["k"].tolist()) == (15.0, 3, [2.0, 2.0])
    assert seen == {"a": mx.float16}
    assert (of_tree["a"][0].dtype, of_tree["rest"].item()) == (mx.float32, 5.0)
    assert of_tree["a"][0].tolist() == [6.0, 12.0]
    assert (of_b["x"].tolist(), of_c["c"].tolist()) == ([1.5, 3.0], [3.0, 12.0])


def test_input_gradient_is_true_and_does_not_disturb_the_step():
    model, source, (x, y) = Mlp(), make(True), batch()
    _, grads = nn.value_and_grad(model, source.scale_loss(mse(model), model))(x, y)
    saliency = mx.grad(source.scale_loss(mse(model), model))(x, y)
    assert mx.allclose(saliency, mx.grad(mse(model))(x, y), rtol=1e-4, atol=1e-7)
    source.update(model, grads)
    assert source.scaler.last_step_applied.item()


@pytest.mark.parametrize("uses_all", [True, False])
def test_parameters_that_are_arguments_may_be_put_into_a_model(uses_all):
    model, scaler, (x, y) = Mlp(), GradScaler(256.0), batch()

    def plain_fn(x, y):
        return mse(model)(x, y) if uses_all else mx.mean(model.layers[0](x))

    _, expected = nn.value_and_grad(model, plain_fn)(x, y)
    parameters = model.trainable_parameters()

    def loss_fn(parameters, x, y):
        model.update(parameters)
        return plain_fn(x, y)

    grads = mx.grad(scaler.scale_loss(loss_fn))(parameters, x, y)
    model.update(parameters)
    assert_near(grads, expected)
    scaler.minimize(optim.SGD(0.1), model, grads)


def small_loss(weights, x, y):
    """A loss whose gradients are below the range of float16, unless they are scaled."""
    w, b = (weights[name].astype(mx.float32) for name in "wb")
    return mx.mean(mx.square(x @ w + b - y)) * 2.0**-28


@pytest.mark.compiles
@pytest.mark.parametrize(
    "transform",
    [
        lambda f: mx.grad(f, argnums=(0, 1)),
        lambda f: mx.grad(mx.compile(f)),
        lambda f: mx.compile(mx.grad(f)),
        lambda f: mx.grad(mx.checkpoint(f)),
        lambda f: (
            lambda tree, x, y: mx.vjp(
                lambda w: f({**tree, "w": w}, x, y), [tree["w"]], [mx.array(1.0)]
            )[1]
        ),
        lambda f: mx.vmap(mx.grad(f), in_axes=(None, 0, 0)),
        lambda f: mx.vmap(mx.value_and_grad(f), in_axes=(None, 0, 0)),
    ],
    ids=["arguments", "inner", "outer", "checkpoint", "vjp", "vmap", "values"],
)
def test_gradients_under_every_transformation_are_those_of_plain_mlx(transform):
    weights = {"w": mx.full((8, 1), 0.5), "b": mx.ones(1)}
    half = tree_map(lambda x: x.astype(mx.float16), weights)
    expected = transform(small_loss)(weights, *batch())
    found = transform(GradScaler(2.0**24).scale_loss(small_loss))(half, *batch())
    found, expected = ({"": tree} for tree in (found, expected))
    assert all(mx.any(x != 0).item() for _, x in tree_flatten(expected))
    assert_near(found, expected, rtol=2e-3, atol=0)


class Router(nn.Linear):
    """Stores an auxiliary loss, which is new in the first call."""

    def __call__(self, x):
        self.aux_loss = mx.mean(mx.square(super().__call__(x)))
        return super().__call__(x)


@pytest.mark.compiles
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(
    "what", ["output", "stored", "second derivative", "forward mode", "outside vmap"]
)
def test_derivatives_that_would_be_wrong_raise_where_they_are_taken(what, compiled):
    model = Router(8, 1)
    loss_fn = GradScaler(256.0).scale_loss(
        lambda x: (mx.mean(model(x)), {"penalty": mx.mean(model(x))}), model
    )
    only_loss = lambda x: loss_fn(x)[0]  # noqa: E731

    def total(x):
        if what == "second derivative":
            return mx.sum(mx.square(mx.grad(only_loss)(x)))
        if what == "forward mode":
            return mx.jvp(only_loss, [x], [x])[1][0]
        if what == "outside vmap":
            return mx.vmap(lambda x: only_loss(x[None]))(x).sum()
        loss, aux = loss_fn(x)
        return loss + (aux["penalty"] if what == "output" else model.aux_loss)

    fn, x = nn.value_and_grad(model, total), batch()[0]
    if compiled:
        fn = mx.compile(fn, inputs=model.state)
    else:  # where nobody differentiates them, they are plain values
        (loss, aux), _ = nn.value_and_grad(model, loss_fn)(x)
        assert loss.item() == pytest.approx(aux["penalty"].item(), rel=1e-6)
        assert model.aux_loss.item() > 0
        del model.aux_loss
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"only first derivatives.*inside the"):
            fn(x)


def peak(function):
    """Return the peak memory of a function, which returns what it evaluates."""
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    mx.eval(function())
    return mx.get_peak_memory() - before


@pytest.mark.compiles  # without, every array counts as traced
def test_loss_that_nobody_differentiates_takes_no_more_memory_than_the_plain_loss():
    layers = [nn.Linear(64, 64) for _ in range(24)]
    model = nn.Sequential(*(f for layer in layers for f in (layer, nn.gelu)))
    model.set_dtype(mx.bfloat16)
    x, unused = mx.random.normal((512, 64)), mx.zeros((4096, 4096))  # not evaluated
    mx.eval(model, x)
    loss_fn = lambda model, x, _: mx.mean(mx.square(model(x)))  # noqa: E731
    expected = peak(lambda: loss_fn(model, x, unused))
    wrapped = GradScaler().scale_loss(loss_fn)
    assert peak(lambda: wrapped(model, x, unused)) <= 1.1 * expected
    # A checkpoint traces its arguments, and a model is none.
    recomputed = mx.checkpoint(lambda x: wrapped(model, x, 0))
    assert peak(lambda: recomputed(x)) <= 1.1 * expected
