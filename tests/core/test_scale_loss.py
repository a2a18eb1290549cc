"""``scale_loss``: unscaled gradients for other trainers, on both classes."""

from collections import OrderedDict
from functools import partial
from typing import NamedTuple

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import pytest
from mlx.utils import tree_flatten, tree_map
from support.helpers import Mlp, batch, bits, dtypes, mse
from support.optimizer_helpers import assert_near

from mlx_gradscale import GradScaler, LossScaleOptimizer

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
def test_gradients_that_scale_loss_did_not_unscale_are_refused_at_the_step(wrap):
    student, teacher, source, xy = Mlp(), Mlp(), make(wrap), batch()

    def distil(teacher, x):
        return mx.mean(mx.square(student(x) - teacher(x)))

    fn = nn.value_and_grad(student, source.scale_loss(distil))
    _, grads = fn(teacher, xy[0])
    before = bits(student.parameters())
    with pytest.raises(RuntimeError, match=r"scale_loss\(loss_fn, model\)"):
        step(source, student, grads)
    assert bits(student.parameters()) == before
    # They do not disturb a step with gradients that were taken before them.
    _, grads = source.value_and_grad(student, mse(student))(*xy)
    fn(teacher, xy[0])
    step(source, student, grads)
    assert bits(student.parameters()) != before


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


@pytest.mark.parametrize("box", [dict, OrderedDict])
def test_gradient_of_an_auxiliary_output_is_neither_scaled_nor_unscaled(box):
    loss_fn = make(False).scale_loss(
        lambda w: (mx.sum(w * w), box({"penalty": mx.sum(w)}))
    )

    def total(w):
        loss, aux = loss_fn(w)
        return loss + aux["penalty"]

    assert mx.grad(total)(mx.array([1.0, 2.0])).tolist() == [3.0, 5.0]


@either
@pytest.mark.parametrize("find_model", [closure, argument])
def test_input_gradient_is_true_and_does_not_disturb_the_step(find_model, wrap):
    model, source, (x, y) = Mlp(), make(wrap), batch()
    _, grads = find_model(source, model)(x, y)
    saliency = mx.grad(source.scale_loss(mse(model), model))(x, y)
    assert mx.allclose(saliency, mx.grad(mse(model))(x, y), rtol=1e-4, atol=1e-7)
    step(source, model, grads)
    assert (source.scaler if wrap else source).last_step_applied.item()


@either
@pytest.mark.compiles
@pytest.mark.parametrize("compiled", [False, True])
def test_parameter_that_scale_loss_did_not_find_is_named_at_the_step(wrap, compiled):
    model, source, (x, y) = Mlp(), make(wrap), batch()
    loss_fn = source.scale_loss(mse(model), model.layers[1])
    fn = nn.value_and_grad(model, loss_fn)
    before = bits(model.parameters())

    def train(x, y):
        step(source, model, fn(x, y)[1])

    state = [model.state, source.state]
    train = mx.compile(train, inputs=state, outputs=state) if compiled else train
    with pytest.raises(RuntimeError, match=r"'layers\.0\.weight' is still scaled"):
        train(x, y)
    if not compiled:  # MLX leaves placeholders in the state
        assert bits(model.parameters()) == before


def refuses(scaler, model, grads):
    before = bits(model.parameters())
    with pytest.raises(RuntimeError, match="is still scaled"):
        scaler.step(optim.SGD(0.1), model, grads)
    return bits(model.parameters()) == before


def test_gradients_that_are_still_scaled_are_refused_again_and_for_each_optimizer():
    model, scaler, (x, y) = Mlp(), GradScaler(256.0), batch()
    loss_fn = scaler.scale_loss(mse(model), model.layers[1])
    _, grads = nn.value_and_grad(model, loss_fn)(x, y)
    bad, good = grads["layers"]
    assert refuses(scaler, model, grads)
    assert refuses(scaler, model, grads)  # as somebody tries again
    scaler.step(optim.SGD(0.1), model, {"layers": [{}, good]})
    assert refuses(scaler, model, {"layers": [bad]})
    assert refuses(scaler, model.layers[0], bad)
    scaler.update()
    _, grads = nn.value_and_grad(model, mse(model))(x, y)  # from elsewhere
    scaler.minimize(optim.SGD(0.1), model, grads)


@pytest.mark.parametrize("order", [1, -1])
def test_model_that_one_of_two_scaled_losses_did_not_find_is_refused(order):
    # The parameters that earlier iterations, or other calls, knew are no excuse.
    model, scaler, (x, y) = Mlp(), GradScaler(256.0), batch()
    _, grads = scaler.value_and_grad(model, mse(model))(x, y)
    scaler.minimize(optim.SGD(0.1), model, grads)
    part = scaler.scale_loss(mse(model), model.layers[1])
    mx.grad(lambda noise: part(x + noise, y))(mx.zeros_like(x))
    assert refuses(scaler, model, nn.value_and_grad(model, part)(x, y)[1])

    models, scaler, xy = [Mlp(), Mlp()], GradScaler(256.0), batch()
    right = scaler.scale_loss(mse(models[0]), models[0])
    wrong = scaler.scale_loss(mse(models[1]))  # the model is forgotten
    losses = [(models[0], right), (models[1], wrong)][::order]
    grads = [nn.value_and_grad(model, loss_fn)(*xy)[1] for model, loss_fn in losses]
    assert refuses(scaler, models[1], grads[order])
    # Nor can they hide in a sum with the gradients of a right loss.
    _, grads = nn.value_and_grad(models[1], scaler.scale_loss(mse(models[1])))(*xy)
    right = scaler.scale_loss(mse(models[1]), models[1])
    _, more = nn.value_and_grad(models[1], right)(*xy)
    assert refuses(scaler, models[1], tree_map(mx.add, grads, more))


@pytest.mark.parametrize("is_hidden", ["head", "criterion"])
def test_features_as_an_argument_do_not_excuse_a_model_that_was_not_found(is_hidden):
    model, scaler, (x, y) = Mlp(), GradScaler(256.0), batch()
    last = model.layers[1]
    finish = last if is_hidden == "head" else (lambda h: h)
    begin = (lambda x: model.layers[0](x)) if is_hidden == "head" else model
    wrapped = scaler.scale_loss(lambda h: mx.mean(mx.square(finish(h) - y)))
    _, grads = nn.value_and_grad(model, lambda x: wrapped(begin(x)))(x)
    assert refuses(scaler, model, grads)


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


@pytest.mark.compiles
def test_compiled_gradients_that_are_scaled_stay_refused_after_a_fresh_start():
    model, scaler, xy = Mlp(), GradScaler(256.0), batch()
    wrong = nn.value_and_grad(model, scaler.scale_loss(mse(model)))  # forgotten
    state = model.state
    compiled = mx.compile(lambda x, y: wrong(x, y)[1], inputs=state, outputs=state)
    for _ in range(2):
        assert refuses(scaler, model, compiled(*xy))
        scaler.update(scaler.get_scale())
    right = nn.value_and_grad(model, scaler.scale_loss(mse(model), model))
    scaler.minimize(optim.SGD(0.1), model, right(*xy)[1])
    # Gradients from value_and_grad() are right too, even if they are clipped.
    assert refuses(scaler, model, wrong(*xy)[1])
    scaler.update(scaler.get_scale())
    _, grads = scaler.value_and_grad(model, mse(model))(*xy)
    scaler.minimize(optim.SGD(0.1), model, optim.clip_grad_norm(grads, 0.1)[0])


@pytest.mark.compiles
def test_compiled_gradients_of_one_model_are_known_when_another_is_traced_again():
    models, scaler = [Mlp(), Mlp()], GradScaler(256.0)

    def compiled(model):
        fn = nn.value_and_grad(model, scaler.scale_loss(mse(model), model))
        return mx.compile(lambda x, y: fn(x, y)[1], inputs=model)

    gradients = list(map(compiled, models))
    for sizes in ((8, 8), (4, 8)):  # the last batch of the first model is smaller
        for model, gradient, n in zip(models, gradients, sizes, strict=True):
            scaler.step(optim.SGD(0.1), model, gradient(*batch(n=n)))
        scaler.update()


@either
def test_gradients_that_pass_through_an_argument_are_unscaled_and_stepped(wrap):
    model, source, (x, y) = Mlp(), make(wrap), batch()
    _, expected = nn.value_and_grad(model, mse(model))(x, y)
    head = source.scale_loss(lambda h, last: mx.mean(mx.square(last(h) - y)))

    def loss_fn(x):
        return head(nn.relu(model.layers[0](x)), model.layers[1])

    _, grads = nn.value_and_grad(model, loss_fn)(x)
    assert_near(grads, expected)
    step(source, model, grads)


class Masked(tuple):
    """A tuple with an attribute and a constructor of its own."""

    def __new__(cls, x, mask):
        made = super().__new__(cls, (x,))
        made.mask = mask
        return made


def test_tuples_keep_their_class_and_attributes():
    masked = Masked(mx.array([1.0, 2.0]), 3.0)
    loss_fn = make(False).scale_loss(lambda w, x: mx.sum(w * x[0]) * x.mask)
    gradient = mx.grad(lambda w: loss_fn(w, masked))(mx.array([1.0, 1.0]))
    assert gradient.tolist() == [3.0, 6.0]


@either
def test_containers_of_any_type_are_found_and_stay_the_same_objects(wrap):
    tree = OrderedDict(a=mx.array([1.0, 2.0]), rest=[mx.array(3.0)])

    def loss_fn(weights, batch):
        assert batch is given
        batch["seen"] = mx.stop_gradient(weights["a"])
        return mx.sum(weights["a"] * batch["x"]) * weights["rest"][0]

    given = {"x": mx.array([1.0, 4.0])}
    loss, grads = mx.value_and_grad(make(wrap).scale_loss(loss_fn))(tree, given)
    assert loss.item() == 27.0
    assert (grads["a"].tolist(), grads["rest"][0].item()) == ([3.0, 12.0], 9.0)
    assert given["seen"].tolist() == [1.0, 2.0]
    assert given["x"].tolist() == [1.0, 4.0]


@either
def test_parameter_that_scale_loss_did_not_find_may_have_a_zero_gradient(wrap):
    model, source, (x, y) = Mlp(), make(wrap), batch()
    model.unused = nn.Linear(4, 4)
    loss_fn = source.scale_loss(mse(model), model.layers)
    before = bits(model.layers[0].weight)
    _, grads = nn.value_and_grad(model, loss_fn)(x, y)
    step(source, model, grads)
    assert bits(model.layers[0].weight) != before


@either
def test_gradients_of_two_losses_may_be_added_before_a_step(wrap):
    model, source, xy = Mlp(), make(wrap), batch()
    sum_of_weights = lambda: mx.sum(model.layers[1].weight)  # noqa: E731
    total = lambda *xy: mse(model)(*xy) + sum_of_weights()  # noqa: E731
    _, grads = nn.value_and_grad(model, total)(*xy)
    expected = optim.SGD(0.1).apply_gradients(grads, model.parameters())
    part = source.scale_loss(sum_of_weights, model.layers[1])
    _, some = nn.value_and_grad(model, part)()
    _, all_of_them = source.value_and_grad(model, mse(model))(*xy)
    step(source, model, tree_map(mx.add, some, all_of_them))
    assert_near(model.parameters(), expected)
