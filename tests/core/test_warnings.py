"""What a loop is warned of, once, at its own line and without reading anything."""

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import pytest
from support.helpers import INF, Mlp, batch, compiled_if, mse
from support.optimizer_helpers import HALVES, loop_of
from support.scaler_helpers import every_warning

from mlx_gradscale import GradScaler, LossScaleOptimizer, MasterWeightOptimizer


def loop(kind):
    """Return a function that takes one eager step with the given factor."""
    model = Mlp()
    _, loss_and_grad, update = loop_of(kind, model, optim.SGD(0.01))

    def step(factor):
        x, y = batch(n=4)
        loss, grads = loss_and_grad(x * factor, y)
        update(model, grads)
        mx.eval(loss, model.state)

    return step


def warnings_of(step, factors):
    """Return the step and the text of each warning."""
    found = []
    for i, factor in enumerate(factors):
        with every_warning() as caught:
            step(factor)
        assert {w.filename for w in caught} <= {__file__}
        found += [(i + 1, str(w.message)) for w in caught]
    return found


@pytest.mark.parametrize("kind", ["scaler", "wrapper", "guarded"])
def test_run_that_only_skips_warns_once_within_50_steps_of_the_fiftieth(kind):
    found = [x for x in warnings_of(loop(kind), [INF] * 200) if "in a row" in x[1]]
    [(step, text)] = found
    assert 50 <= step <= 100
    assert "explain_overflow" in text


@pytest.mark.parametrize(
    ("update", "every", "dynamic", "n_warnings"),
    [
        ("optimizer", 1, True, 1),
        ("scaler", 1, True, 0),
        ("scaler", 1, False, 0),
        ("scaler", 64, True, 0),
        ("nothing", 1, True, 0),
    ],
)
def test_updates_that_bypass_the_scaler_warn_once(update, every, dynamic, n_warnings):
    model, optimizer, scaler = Mlp(), optim.SGD(0.01), GradScaler(64.0, dynamic=dynamic)
    fn = scaler.value_and_grad(model, mse(model))

    def step(i):
        _, grads = fn(*batch(n=4))
        if update == "optimizer":
            optimizer.update(model, grads)
        elif update == "scaler" and i % every == 0:
            scaler.minimize(optimizer, model, grads)

    found = [text for _, text in warnings_of(step, range(1, 131))]
    assert len(found) == n_warnings
    assert all("without a step of this scaler" in text for text in found)


STREAKS = [([1.0] * start + [INF] * 50 + [1.0] * 100, True) for start in (0, 3, 30, 49)]
STREAKS += [(([INF] * 49 + [1.0]) * 4, False)]


@pytest.mark.parametrize("kind", ["scaler", "wrapper"])
@pytest.mark.parametrize(
    ("factors", "warns"), STREAKS, ids=["0", "3", "30", "49", "no"]
)
def test_streak_of_50_skipped_steps_warns_wherever_it_starts_but_none_of_49(
    kind, factors, warns
):
    found = [text for _, text in warnings_of(loop(kind), factors)]
    assert any("in a row" in text for text in found) <= warns
    assert not warns or len(found) == 1


def test_scale_at_which_all_gradients_underflow_warns_once_although_it_changes():
    found = warnings_of(loop("wrapper"), [INF] * 40 + ([1.0] * 48 + [INF] * 2) * 4)
    [text] = [text for _, text in found if "loss scale of" in text]
    assert "At a loss scale of 6e-08, " in text
    assert "scaler.update(65536.0)" in text


def test_half_precision_parameters_warn_once_about_master_weights():
    model = Mlp(dtype=mx.float16)
    _, loss_and_grad, update = loop_of("scaler", model, optim.AdamW(1e-2))
    step = lambda seed: update(model, loss_and_grad(*batch(seed, dtype=mx.float16))[1])  # noqa: E731
    [(_, text)] = warnings_of(step, range(3))
    assert "no master weights" in text


@pytest.mark.parametrize(
    ("dtype", "scaler", "is_scaled", "n_warnings"),
    [
        (mx.float16, GradScaler(), False, 1),
        (mx.float16, GradScaler(), True, 0),
        (mx.float16, None, False, 1),
        (mx.float16, None, True, 1),
        (mx.bfloat16, None, False, 0),
        (mx.float32, GradScaler(), False, 0),
        (mx.float16, GradScaler(enabled=False), False, 0),
        # The user has fixed the scale at 1.
        (mx.float16, GradScaler(1.0, dynamic=False), False, 0),
    ],
)
def test_float16_parameters_warn_once_if_no_scale_entered_their_gradients(
    dtype, scaler, is_scaled, n_warnings
):
    model, optimizer = Mlp(dtype=dtype), MasterWeightOptimizer(optim.SGD(0.1))
    if scaler is not None:
        optimizer = LossScaleOptimizer(optim.SGD(0.1), scaler)
    differentiate = optimizer.value_and_grad if is_scaled else nn.value_and_grad
    loss_and_grad = differentiate(model, mse(model))
    with every_warning() as caught:
        for _ in range(3):
            optimizer.update(model, loss_and_grad(*batch(dtype=dtype))[1])
    found = ["no scale has entered" in str(w.message) for w in caught]
    assert found == [True] * n_warnings


@pytest.mark.compiles
@pytest.mark.parametrize(
    ("scaler", "compiled", "n_warnings"),
    [
        (GradScaler(2.0**16), False, 1),
        (GradScaler(512.0), False, 0),
        (GradScaler(512.0), True, 1),  # it may grow
        (GradScaler(512.0, dynamic=False), True, 0),
    ],
)
def test_float16_loss_warns_once_if_the_scale_may_not_fit_float16(
    scaler, compiled, n_warnings
):
    model = nn.Linear(1, 1)
    model.set_dtype(mx.float16)
    gradient = scaler.value_and_grad(model, lambda x: model(x).sum())
    gradient = compiled_if(compiled, gradient, scaler.state)
    found = warnings_of(gradient, [mx.ones((1, 1), mx.float16)] * 2)
    assert len([text for _, text in found if "loss is float16" in text]) == n_warnings


@pytest.mark.parametrize("dtype", HALVES)
def test_half_model_with_float32_inputs_warns_once_about_promotion(dtype):
    model = Mlp(dtype=dtype)
    loss_and_grad = GradScaler(64.0).value_and_grad(model, mse(model))
    data = [batch()] * 3 + [batch(dtype=dtype)]
    [(_, text)] = warnings_of(lambda xy: loss_and_grad(*xy), data)
    name = str(dtype).removeprefix("mlx.core.")
    assert text.startswith(f"Mlp has {name} parameters, but")
    assert f"or pass compute_dtype=mx.{name}." in text
