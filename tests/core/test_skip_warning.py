"""A loop that only skips is warned by the core itself, without reading anything."""

import warnings

import mlx.core as mx
import mlx.optimizers as optim
import pytest
from support.helpers import INF, Mlp, batch, mse

from mlx_gradscale import GradScaler, GuardedOptimizer, LossScaleOptimizer


def loop(kind):
    """Return a function that takes one eager step with the given factor."""
    model, inner = Mlp(), optim.SGD(0.01)
    if kind == "scaler":
        scaler = GradScaler()
        loss_and_grad = scaler.value_and_grad(model, mse(model))
        update = lambda grads: scaler.minimize(inner, model, grads)  # noqa: E731
    else:
        make = LossScaleOptimizer if kind == "wrapper" else GuardedOptimizer
        optimizer = make(inner)
        loss_and_grad = optimizer.value_and_grad(model, mse(model))
        update = lambda grads: optimizer.update(model, grads)  # noqa: E731

    def step(factor):
        x, y = batch(n=4)
        loss, grads = loss_and_grad(x * factor, y)
        update(grads)
        mx.eval(loss, model.state)

    return step


def steps_until_warned(step, factors):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for i, factor in enumerate(factors):
            try:
                step(factor)
            except UserWarning as warning:
                return i + 1, str(warning)
    return None, ""


@pytest.mark.parametrize("kind", ["scaler", "wrapper", "guarded"])
def test_a_run_that_only_skips_is_warned_within_50_steps_of_the_fiftieth(kind):
    n, message = steps_until_warned(loop(kind), [INF] * 101)
    assert n is not None
    assert 50 <= n <= 100
    assert "50 steps in a row" in message
    assert "explain_overflow" in message


@pytest.mark.parametrize("kind", ["scaler", "wrapper"])
def test_a_run_that_skips_49_steps_at_a_time_is_not_warned(kind):
    factors = ([INF] * 49 + [1.0]) * 4
    assert steps_until_warned(loop(kind), factors) == (None, "")


def test_the_warning_comes_once_and_points_to_the_users_line():
    step = loop("scaler")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(300):
            step(INF)
    assert ["50 steps in a row" in str(w.message) for w in caught] == [True]
    assert [w.filename for w in caught] == [__file__]
