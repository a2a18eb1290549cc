"""``scale_loss``: unscaled gradients for other trainers, on both classes."""

from collections import OrderedDict
from functools import partial
from typing import NamedTuple

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import pytest
from mlx.utils import tree_flatten
from support.helpers import Mlp, batch, bits, dtypes, mse
from support.optimizer_helpers import assert_near

from mlx_gradscale import GradScaler, LossScaleOptimizer
from mlx_gradscale.core.gradients import is_traced

either = pytest.mark.parametrize("wrap", [False, True], ids=["scaler", "wrapper"])


class Outputs(NamedTuple):
    loss: mx.array
    tokens: int


def make(wrap, scale=256.0):
    scaler = GradScaler(scale)
    return LossScaleOptimizer(optim.SGD(0.1), scaler) if wrap else scaler


def step(source, model, grads):
    if isinstance(source, LossScaleOptimizer):
        source.update(model, grads)
    else:
        source.minimize(optim.SGD(0.1), model, grads)


def half_batch(seed=0):
    return batch(seed, dtype=mx.float16)


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


class Checkpointed(Mlp):
    """Its first layer's parameters are replaced while the loss is computed."""

    def __call__(self, x):
        return self.layers[1](nn.relu(nn.utils.checkpoint(self.layers[0])(x)))


def closure(source, model):
    return nn.value_and_grad(model, source.scale_loss(mse(model), model))


def argument(source, model):
    loss_fn = source.scale_loss(lambda model, x, y: mse(model)(x, y))
    return partial(nn.value_and_grad(model, loss_fn), model)


def nested_arguments(source, model):
    def loss_fn(options, layers, x, y):
        return mse(options["model"])(x, y)

    fn = nn.value_and_grad(model, source.scale_loss(loss_fn))
    # The same model twice, and layers of it: its gradients are unscaled once.
    return partial(fn, {"model": model, "again": [model]}, model.children())


@either
@pytest.mark.parametrize(
    ("find_model", "make_model", "compiled"),
    [
        *[(f, Mlp, False) for f in (closure, argument, nested_arguments)],
        *[(f, m, False) for f in (closure, argument) for m in (Tied, Checkpointed)],
        pytest.param(closure, Mlp, True, marks=pytest.mark.compiles),
        pytest.param(argument, Mlp, True, marks=pytest.mark.compiles),
    ],
)
def test_gradients_of_a_model_are_unscaled_and_float32_at_any_scale(
    find_model, make_model, wrap, compiled
):
    mx.random.seed(3)
    model = make_model()
    model.set_dtype(mx.float16)
    loss, plain = nn.value_and_grad(model, mse(model))(*half_batch())
    for scale in (1.0, 2.0**10, 2.0**14):
        source = make(wrap, scale)
        fn = find_model(source, model)
        if compiled:
            state = [model.state, source.state]
            fn = mx.compile(fn, inputs=state, outputs=state)
        value, grads = fn(*half_batch())
        assert value.item() == pytest.approx(loss.item(), rel=1e-3)
        for tree in (grads, plain):
            tree.pop("count", None)  # an integer parameter
        assert_near(grads, plain, rtol=0.02, atol=0.02)
        assert dtypes(grads) == {mx.float32}


@either
def test_validation_with_scale_loss_does_not_replace_the_model_arrays(wrap):
    model = Mlp(dtype=mx.float16)
    before = [id(x) for _, x in tree_flatten(model.parameters())]
    loss_fn = make(wrap).scale_loss(lambda *xy: Outputs(mse(model)(*xy), 7), model)
    found = loss_fn(*half_batch())
    assert type(found) is Outputs
    assert found.loss.item() == mse(model)(*half_batch()).item()
    # MLX puts nothing back if the loss is not differentiated.
    assert [id(x) for _, x in tree_flatten(model.parameters())] == before
    (loss, tokens), _ = nn.value_and_grad(model, loss_fn)(*half_batch())
    assert (loss.item(), tokens) == (found.loss.item(), 7)


@either
def test_scale_loss_returns_the_unscaled_loss_and_nan_for_an_overflow(wrap):
    source = make(wrap, 2.0**64)
    loss_fn = source.scale_loss(lambda w, k: mx.sum(w * k))
    loss, gradient = mx.value_and_grad(loss_fn)(mx.array([0.5, 1.0]), 2.0**64)
    assert loss.item() == 1.5 * 2.0**64  # times the scale it would be inf
    assert mx.isnan(gradient).all().item()


@either
def test_loss_in_place_of_a_loss_function_is_refused_at_once(wrap):
    with pytest.raises(TypeError, match=r"Expected the loss function.*scale\(\)"):
        make(wrap).scale_loss(mx.array(1.0))  # as in Keras


@either
def test_gradients_of_every_argument_are_unscaled_and_float32(wrap):
    loss_fn = make(wrap).scale_loss(
        lambda tree, b, *, c: (mx.sum(tree["a"][0] * b * c), {"k": 2 * c, "n": 3})
    )
    tree = {"a": [mx.array([0.5, 1.0], mx.float16)], "i": mx.array(2)}
    fn = mx.value_and_grad(loss_fn, argnums=(0, 1), argnames="c")
    (loss, aux), ((of_tree, of_b), of_c) = fn(tree, mx.array([2.0, 4.0]), c=mx.ones(2))
    assert (loss.item(), aux["n"], aux["k"].tolist()) == (5.0, 3, [2.0, 2.0])
    assert (of_tree["a"][0].dtype, of_tree["a"][0].tolist()) == (mx.float32, [2.0, 4.0])
    assert (of_b.tolist(), of_c["c"].tolist()) == ([0.5, 1.0], [1.0, 4.0])


@either
@pytest.mark.parametrize("find_model", [closure, argument])
def test_input_gradient_is_true_and_does_not_disturb_the_step(find_model, wrap):
    model, source, (x, y) = Mlp(), make(wrap), batch()
    _, grads = find_model(source, model)(x, y)
    saliency = mx.grad(source.scale_loss(mse(model), model))(x, y)
    assert mx.allclose(saliency, mx.grad(mse(model))(x, y), rtol=1e-4, atol=1e-7)
    step(source, model, grads)
    assert (source.scaler if wrap else source).last_step_applied.item()


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


def test_arrays_in_containers_are_found_and_a_loss_may_write_to_others():
    tree = OrderedDict(a=mx.array([1.0, 2.0], mx.float16), rest=[mx.array(3.0)])
    seen = {}

    def loss_fn(weights, batch, seen):
        seen["a"] = weights["a"].dtype
        return mx.sum(weights["a"] * batch["x"]) * weights["rest"][0]

    given = {"x": mx.array([1.0, 4.0])}
    loss, grads = mx.value_and_grad(make(False).scale_loss(loss_fn))(tree, given, seen)
    assert (loss.item(), seen) == (27.0, {"a": mx.float16})
    assert (grads["a"].tolist(), grads["rest"][0].item()) == ([3.0, 12.0], 9.0)
    assert grads["a"].dtype == mx.float32


def plain(loss_fn, model=None):
    return loss_fn


def with_checkpoint(model):
    """Return a loss function that computes the first layer again."""
    first = nn.utils.checkpoint(model.layers[0])

    def loss_fn(x, y):
        return mx.mean(mx.square(model.layers[1](nn.relu(first(x))) - y))

    return loss_fn


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


CASES = {
    "closure": lambda wrap, model: wrap(mse(model)),
    "model": lambda wrap, model: wrap(mse(model), model),
    "layers": lambda wrap, model: wrap(mse(model), model.layers[1]),
    "twice": lambda wrap, model: wrap(wrap(mse(model), model), [model]),
    "checkpoint": lambda wrap, model: wrap(with_checkpoint(model), model),
    "two models": two_models,
    "outer features": outer_features,
    "outer term": outer_term,
    "penalty": penalty,
    "dropout": dropout,
    "two losses": two_losses,
}


@pytest.mark.compiles
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("case", CASES)
def test_gradients_are_those_of_plain_mlx_whatever_the_loss_is_given(case, compiled):
    found = []
    for wrap in (plain, GradScaler(2.0**14).scale_loss):
        mx.random.seed(5)
        model = Both() if case == "two models" else Mlp()
        before = bits(model.parameters())
        fn = nn.value_and_grad(model, CASES[case](wrap, model))
        state = model.state
        fn = mx.compile(fn, inputs=state, outputs=state) if compiled else fn
        loss, grads = fn(*batch())
        found.append({"loss": loss, **grads})
        assert bits(model.parameters()) == before
    assert_near(*found, rtol=1e-6, atol=1e-7)


def parameters_loss(wrap):
    def loss_fn(weights, x, y):
        return mx.mean(mx.square(x @ weights["w"] + weights["b"] - y))

    return wrap(loss_fn)


@pytest.mark.compiles
@pytest.mark.parametrize(
    "transform",
    [
        lambda f: mx.grad(f, argnums=(0, 1)),
        lambda f: mx.grad(mx.compile(f)),
        lambda f: mx.compile(mx.grad(f)),
        lambda f: mx.grad(mx.checkpoint(f)),
        lambda f: mx.vmap(mx.grad(f), in_axes=(None, 0, 0)),
        lambda f: mx.vmap(mx.value_and_grad(f), in_axes=(None, 0, 0)),
    ],
    ids=["arguments", "inner", "outer", "checkpoint", "vmap", "values"],
)
def test_gradients_under_every_transformation_are_those_of_plain_mlx(transform):
    weights = {"w": mx.full((8, 1), 0.5), "b": mx.ones(1)}
    found = [
        transform(parameters_loss(wrap))(weights, *batch())
        for wrap in (plain, GradScaler(2.0**14).scale_loss)
    ]
    plain_tree, tree = (dict(tree_flatten({"": tree})) for tree in found)
    assert all(mx.any(x != 0).item() for x in plain_tree.values())
    assert_near(tree, plain_tree, rtol=1e-6)


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

    def total(x):
        loss, aux = loss_fn(x)
        if what == "second derivative":
            return mx.sum(mx.square(mx.grad(lambda x: loss_fn(x)[0])(x)))
        if what == "forward mode":
            return mx.jvp(lambda x: loss_fn(x)[0], [x], [x])[1][0]
        if what == "outside vmap":
            return mx.vmap(lambda x: loss_fn(x[None])[0])(x).sum()
        return loss + (aux["penalty"] if what == "output" else model.aux_loss)

    fn = nn.value_and_grad(model, total)
    x = batch()[0]
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


@pytest.mark.compiles
def test_whether_an_array_is_traced_is_answered_without_evaluating_it():
    x, y = mx.ones(3), mx.ones((2, 2), mx.float16)
    huge = mx.zeros((2**22, 2**18))  # too large to evaluate
    assert [is_traced(each) for each in (x, y, x + 1, huge, mx.array(1))] == [False] * 5

    def total(x):
        answers.append((is_traced(x), is_traced(y)))
        return x.sum()

    answers = []
    mx.grad(total)(x)
    mx.value_and_grad(total)(x)
    mx.vjp(total, [x], [mx.array(1.0)])
    mx.jvp(total, [x], [x])
    mx.vmap(total)(y)
    mx.compile(total)(x)
    mx.grad(mx.checkpoint(total))(x)
    assert answers == [*[(True, False)] * 7, (True, True)]  # the last computes it again
    mx.checkpoint(total)(x)  # nobody differentiates
    assert answers[8:] == [(False, False)]


def peaks(*functions):
    """Return the peak memory of each function, which returns what it evaluates."""
    found = []
    for function in functions:
        mx.clear_cache()
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        mx.eval(function())
        found.append(mx.get_peak_memory() - before)
    return found


@pytest.mark.compiles  # without, every array counts as traced
def test_loss_that_nobody_differentiates_takes_no_more_memory_than_the_plain_loss():
    layers = [nn.Linear(64, 64) for _ in range(24)]
    model = nn.Sequential(*(f for layer in layers for f in (layer, nn.gelu)))
    x = mx.random.normal((512, 64))
    mx.eval(model, x)
    loss_fn = lambda model, x: mx.mean(mx.square(model(x)))  # noqa: E731
    wrapped = GradScaler().scale_loss(loss_fn)
    expected, found = peaks(lambda: loss_fn(model, x), lambda: wrapped(model, x))
    assert found <= 1.1 * expected


@pytest.mark.parametrize("enabled", [True, False])
def test_scale_loss_casts_float32_parameters_to_the_compute_dtype(enabled):
    model, seen = Mlp(), set()
    scaler = GradScaler(256.0, enabled=enabled)

    def loss_fn(x, y):
        out = model(x)
        seen.update({out.dtype, y.dtype, *dtypes(model.parameters())})
        return mx.mean(mx.square(out.astype(mx.float32) - y))

    fn = nn.value_and_grad(model, scaler.scale_loss(loss_fn, model, mx.bfloat16))
    loss, grads = fn(*batch())
    assert seen == {mx.bfloat16, mx.float32}
    expected, true = nn.value_and_grad(model, mse(model))(*batch())
    assert dtypes([loss, grads, model.parameters()]) == {mx.float32}
    assert loss.item() == pytest.approx(expected.item(), rel=0.02)
    assert_near(grads, true, rtol=0.05, atol=0.02)
