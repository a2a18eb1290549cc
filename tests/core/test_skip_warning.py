"""A loop that only skips is warned by the core itself, without reading anything."""

import mlx.core as mx
import mlx.optimizers as optim
import pytest
from support.helpers import INF, Mlp, batch, mse
from support.optimizer_helpers import loop_of
from support.scaler_helpers import every_warning

from mlx_gradscale import GradScaler


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
    assert len(found) == 1
    assert 50 <= found[0][0] <= 100
    assert "explain_overflow" in found[0][1]


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
