"""``everywhere()``: trainers that create their own optimizer and loss."""

import copy
import gc
import math
import pickle
import threading
import weakref
from functools import partial

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import pytest
from mlx.utils import tree_map
from support.helpers import INF, Mlp, batch, bits, each_mode, mse
from support.scaler_helpers import every_warning

from mlx_gradscale import GradScaler, LossScaleOptimizer, everywhere

OWNERS = (mx, mx.fast, nn, nn.utils, optim.Optimizer, optim.MultiOptimizer)
PLAIN = [dict(vars(owner)) for owner in OWNERS]


def is_as_before():
    return [dict(vars(owner)) for owner in OWNERS] == PLAIN


def train(
    dtype=mx.float16, make=lambda: optim.AdamW(1e-2), compiled=True, steps=6, **more
):
    """Train like a third-party trainer that accepts neither optimizer nor loss."""
    mx.random.seed(3)
    model = Mlp(dtype=dtype)
    loss_and_grad = nn.value_and_grad(model, lambda x, y: 1e-3 * mse(model)(x, y))
    optimizer = make()
    state = [model.state, optimizer.state, mx.random.state]

    def step(x, y):
        loss, grads = loss_and_grad(x, y)
        grads, _ = optim.clip_grad_norm(grads, max_norm=1.0)
        optimizer.update(model, grads)
        return loss

    if compiled:
        step = partial(mx.compile, inputs=state, outputs=state, **more)(step)
    losses = []
    for i in range(steps):
        losses.append(step(*batch(i, dtype=dtype)))
        mx.eval(losses, state)
    return losses[-1].item(), model, optimizer


@each_mode
@pytest.mark.parametrize("dtype", [mx.float16, mx.float32], ids=["half", "compute"])
def test_training_in_everywhere_follows_float32_where_float16_is_nan(dtype, compiled):
    wanted, *_ = train(mx.float32, compiled=False)
    assert math.isnan(train(compiled=False)[0])
    compute_dtype = mx.float16 if dtype == mx.float32 else None
    with everywhere(compute_dtype=compute_dtype) as here:
        found, model, optimizer = train(dtype, compiled=compiled)
    assert found == pytest.approx(wanted, rel=0.02)
    assert found != wanted
    assert type(optimizer) is optim.AdamW
    assert optimizer.step.item() == 6
    assert {x.dtype for x in model.layers[0].values()} == {dtype}
    moments = optimizer.state["layers"][0]["weight"]
    assert {x.dtype for x in moments.values()} == {mx.float32}
    # A larger scale would fit on the first batch.
    assert here.report() == [
        "loss scale 65536, 0 of 6 gradients overflowed",
        "AdamW: 6 steps applied, 0 skipped",
    ]
    assert is_as_before()


@pytest.mark.compiles
def test_shapeless_training_step_is_scaled_and_shapeless_helper_is_compiled():
    with everywhere() as here:
        wanted, *_ = train()
        n_runs = []

        @partial(mx.compile, shapeless=True)
        def helper(x):
            n_runs.append(1)
            return mx.exp(x) * 2

        found, *_ = train(shapeless=True)
        for size in (2, 3, 4, 5):
            helper(mx.zeros((size,)))
    assert found == wanted
    assert here.report()[2:] == here.report()[:2]
    assert len(n_runs) == 2  # the first call, and one trace for all shapes


@pytest.mark.parametrize("name", ["max_grad_norm", "init_scale"])
def test_wrong_argument_raises_before_mlx_is_patched(name):
    with pytest.raises(ValueError, match="must be"):
        everywhere(**{name: -1.0}).__enter__()
    assert is_as_before()


def test_max_grad_norm_clips_the_steps_of_the_trainer():
    mx.random.seed(3)
    before = bits(Mlp(dtype=mx.float16).parameters())
    for norm, is_same in ((1e-9, True), (1e9, False)):
        with everywhere(max_grad_norm=norm):
            _, model, _ = train(make=lambda: optim.SGD(1.0), steps=1)
        assert (bits(model.parameters()) == before) is is_same


def test_everywhere_restores_mlx_when_nested_and_after_an_exception():
    def fail():
        with everywhere(init_scale=2.0) as inner:
            train(steps=1)
            assert inner.scalers[0].get_scale() == 2.0
            raise KeyError("a trainer's own")

    with everywhere() as here:
        with pytest.raises(KeyError):
            fail()
        assert not is_as_before()
        train(steps=1)
        assert here.scalers[0].get_scale() > 2.0
    assert is_as_before()


@pytest.mark.compiles
def test_gradient_functions_created_inside_everywhere_are_plain_afterwards():
    model = Mlp(dtype=mx.float16)
    with everywhere():
        loss_and_grad = mx.compile(nn.value_and_grad(model, mse(model)))
        _, inside = loss_and_grad(*batch(0, dtype=mx.float16))
        optim.SGD(0.1).update(model, inside)
    _, outside = loss_and_grad(*batch(0, dtype=mx.float16))
    assert inside["layers"][0]["weight"].dtype == mx.float32
    assert outside["layers"][0]["weight"].dtype == mx.float16


@pytest.mark.parametrize("make", [lambda: optim.AdamW(1e-2), optim.Adafactor])
def test_optimizer_can_be_pickled_and_copied_inside_everywhere(make):
    with everywhere():
        _, model, optimizer = train(make=make, steps=2, compiled=False)
        for copied in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
            assert type(copied) is type(optimizer)
            assert vars(copied).keys() == vars(optimizer).keys()
            assert bits(copied.state) == bits(optimizer.state)
            copied.update(model, tree_map(mx.zeros_like, model.parameters()))
            assert copied.step.item() == 3


class HalvedSGD(optim.SGD):
    """An optimizer that changes the gradients before each step."""

    def apply_gradients(self, gradients, parameters):
        halved = tree_map(lambda g: g / 2, gradients)
        return super().apply_gradients(halved, parameters)


@pytest.mark.parametrize("is_update", [True, False], ids=["update", "apply_gradients"])
def test_optimizer_that_overrides_its_step_steps_once(is_update):
    def step():
        model, optimizer = nn.Linear(2, 1, bias=False), HalvedSGD(1.0)
        model.weight = mx.zeros((1, 2), mx.float16)
        gradients = {"weight": mx.ones((1, 2))}
        if is_update:
            optimizer.update(model, gradients)
        else:
            model.update(optimizer.apply_gradients(gradients, model))
        return model.weight.tolist()

    remedy = r"\(\), import value_and_grad and create the gradient function.$"
    warns = pytest.warns(UserWarning, match=f"Only the steps of this trainer.*{remedy}")
    with warns, everywhere() as here:
        found = step()
    assert found == step() == [[-0.5, -0.5]]
    assert here.report() == ["HalvedSGD: 1 step applied, 0 skipped"]


def test_gradients_beyond_the_range_of_float16_warn_on_the_first_batch():
    model = Mlp(dtype=mx.float16)

    def run(dtype):
        model.set_dtype(dtype)
        with everywhere():
            loss_and_grad = nn.value_and_grad(
                model, lambda x, y: 1e9 * mse(model)(x, y)
            )
            optim.Adam(1e-3).update(model, loss_and_grad(*batch(dtype=dtype))[1])

    with pytest.warns(UserWarning, match=r"float16 only at a loss scale of \d.*e-"):
        run(mx.float16)
    run(mx.bfloat16)  # where a warning would be an error


@pytest.mark.compiles
@pytest.mark.parametrize("is_whole_step", [True, False])
def test_step_compiled_with_an_earlier_mx_compile_is_reported(is_whole_step):
    earlier, model, optimizer = mx.compile, Mlp(dtype=mx.float16), optim.SGD(0.1)
    warns = pytest.warns(UserWarning, match="mx.compile from before everywhere")
    with warns as warned, everywhere() as here:
        gradient = nn.value_and_grad(model, mse(model))

        def step(x, y):
            loss, grads = gradient(x, y)
            if is_whole_step:
                optimizer.update(model, grads)
            return loss

        state = [model.state, optimizer.state]
        compiled = earlier(step, inputs=state, outputs=state)
        mx.eval(compiled(*batch(dtype=mx.float16)))
    # Values cannot be read in this trace, which is not said to be an overflow.
    assert here.report() == [str(each.message) for each in warned]


def test_deleted_optimizer_and_model_are_freed_inside_everywhere():
    with everywhere() as here:
        _, model, optimizer = train(steps=2)
        references = [weakref.ref(model), weakref.ref(optimizer)]
        moments = weakref.ref(optimizer.state["layers"][0]["weight"]["m"])
        del model, optimizer
        train(steps=1)
        gc.collect()
        assert [reference() for reference in references] == [None, None]
        assert moments() is None
        assert "AdamW: 2 steps applied, 0 skipped" in here.report()


def test_loss_from_scale_loss_is_not_scaled_again():
    model = Mlp(dtype=mx.float16)
    ours = LossScaleOptimizer(optim.SGD(0.1), GradScaler(4.0))
    with everywhere() as here:
        loss_fn = ours.scale_loss(mse(model), model)
        _, grads = nn.value_and_grad(model, loss_fn)(*batch(0, dtype=mx.float16))
        ours.update(model, grads)
        _, grads = ours.value_and_grad(model, mse(model))(*batch(1, dtype=mx.float16))
        ours.update(model, grads)
    assert not here.scalers
    assert ours.step.item() == 2


def test_float32_model_warns_once_and_is_not_scaled():
    def run():
        with everywhere() as here:
            found = [train(mx.float32)[0] for _ in range(2)]
        assert not here.report()
        return found

    wanted, *_ = train(mx.float32)
    with pytest.warns(UserWarning, match="not in half precision") as warned:
        assert run() == [wanted, wanted]
    assert len(warned) == 1


def test_trainer_whose_update_promotes_the_model_to_float32_is_named_as_the_cause():
    def run():
        model = Mlp(dtype=mx.float16)
        gradient = nn.value_and_grad(model, mse(model))
        for i in range(3):
            _, grads = gradient(*batch(i, dtype=mx.float16))
            new = tree_map(lambda p, g: p - 0.1 * g, model.parameters(), grads)
            model.update(new)

    warns = pytest.warns(UserWarning, match="of this trainer|own update")
    with warns as warned, everywhere():
        run()
    promoted, end = (str(each.message) for each in warned)
    assert promoted.startswith("The trainer's own update has replaced half-precision")
    assert end.startswith("Only the losses of this trainer were intercepted, not its")
    # True of bfloat16, too, and of a run that has failed.
    assert "so steps with non-finite gradients are not skipped, and weights" in end
    assert end.endswith("update the weights with an optimizer from mlx.optimizers.")


def test_float32_mask_is_cast_in_attention_of_float16():
    def train(dtype):
        mx.random.seed(5)
        model, optimizer = nn.TransformerEncoder(1, 16, 2, 32), optim.AdamW(1e-2)
        model.set_dtype(dtype)
        # MLX's own mask, in float32, and a row that sees nothing.
        mask = nn.MultiHeadAttention.create_additive_causal_mask(6)
        mask = mx.concatenate([mx.full((1, 6), -1e9), mask[1:]])
        gradient = nn.value_and_grad(model, lambda x: model(x, mask).square().mean())
        x = mx.random.normal((2, 6, 16)).astype(dtype)
        for _ in range(4):
            loss, grads = gradient(x)
            optimizer.update(model, grads)
        return loss.item()

    wanted = train(mx.float32)
    with pytest.raises(ValueError, match="Mask type must promote to output type"):
        train(mx.float16)
    for dtype, compute_dtype in ((mx.float16, None), (mx.float32, mx.float16)):
        with everywhere(compute_dtype=compute_dtype):
            assert train(dtype) == pytest.approx(wanted, rel=0.02)
    assert is_as_before()


@pytest.mark.parametrize(
    ("layers", "first", "remedy"),
    [
        ("auto", "Every layer can", "To search again, start a new run from the"),
        # On its first batch, "auto" would find nothing.
        (None, "loss scale", "start a new run from the current weights and pass float"),
    ],
)
def test_run_that_fails_later_says_how_to_search_with_its_weights(
    layers, first, remedy
):
    model, optimizer = Mlp(dtype=mx.float16), optim.SGD(1e-3)
    match = f"SGD skipped 12 of 15.*the last 12,.*{remedy}"
    warns = pytest.warns(UserWarning, match=match)
    with warns, everywhere(float32_layers=layers) as here:
        gradient = nn.value_and_grad(model, lambda x, y, k: k * mse(model)(x, y))
        for i in range(15):
            inputs = *batch(i, dtype=mx.float16), mx.array(1.0 if i < 3 else INF)
            optimizer.update(model, gradient(*inputs)[1])
    assert here.report()[0].startswith(first)
    assert here.report()[-1] == "SGD: 3 steps applied, 12 skipped"


def test_auto_raises_if_no_layers_help():
    model, inputs = Mlp(dtype=mx.float16), batch(0, dtype=mx.float16)
    with (
        pytest.raises(ValueError, match="does not help"),
        everywhere(float32_layers="auto") as here,
    ):
        nn.value_and_grad(model, lambda x, y: INF * mse(model)(x, y))(*inputs)
    assert not here.report()


class Encoded(Mlp):
    """A model that adds a positional encoding and returns float32 on purpose."""

    encoding: mx.Dtype

    def __init__(self):
        super().__init__()
        self.gain = mx.array(1.0)

    def __call__(self, x):
        y = super().__call__(x + mx.zeros(x.shape, self.encoding))
        return (y * self.gain).astype(mx.float32)


@pytest.mark.parametrize(("encoding", "n"), [(mx.float32, 1), (mx.float16, 0)])
def test_compute_dtype_warns_once_if_the_model_promotes_to_float32(encoding, n):
    model, optimizer = Encoded(), optim.SGD(1e-3)
    model.encoding = encoding
    with every_warning() as caught, everywhere(compute_dtype=mx.float16):
        gradient = nn.value_and_grad(model, mse(model))
        for i in range(3):
            optimizer.update(model, gradient(*batch(i))[1])
    assert len(caught) == n
    said = "has float16 parameters but computes in float32, because an input is float32"
    assert all(said in str(each.message) for each in caught)


def test_compute_dtype_warns_that_it_does_not_apply_to_a_parameter_tree():
    with everywhere(compute_dtype=mx.float16) as here:
        with pytest.warns(UserWarning, match="compute_dtype= requires a model"):
            mx.grad(lambda p: (p["w"] * 2).sum())({"w": mx.ones(2)})
        mx.grad(lambda x: (x * 2).sum())(mx.ones(2))  # not a tree: no warning
    assert not here.report()


def test_gradient_inside_a_loss_function_is_not_scaled():
    def norm(dtype):
        mx.random.seed(0)
        model = Mlp(dtype=dtype)

        def inner(parameters, x):
            model.update(parameters)
            return model(x).astype(mx.float32).sum()

        def loss_fn(x, y):
            slope = mx.grad(inner)(model.trainable_parameters(), x)
            slope = slope["layers"][0]["weight"].astype(mx.float32)
            return mse(model)(x, y) + 1e-3 * mx.square(slope).mean()

        _, grads = nn.value_and_grad(model, loss_fn)(*batch(0, 8, dtype))
        optim.SGD(0.0).update(model, grads)
        return mx.linalg.norm(grads["layers"][0]["weight"]).item()

    with everywhere():
        found = norm(mx.float16)
    assert found == pytest.approx(norm(mx.float32), rel=0.01)


def test_training_loop_in_a_worker_thread_is_scaled():
    found = []
    with everywhere() as here:
        worker = threading.Thread(target=lambda: found.append(train()[0]))
        worker.start()
        worker.join()
        assert here.report()[1] == "AdamW: 6 steps applied, 0 skipped"
    assert found[0] == pytest.approx(train(mx.float32)[0], rel=0.02)
