"""compile_step restores everything after a failed trace, and warns of skipped steps."""

import mlx.core as mx
import mlx.optimizers as optim
import pytest
from support.helpers import INF, Mlp, batch, bits, mse
from support.scaler_helpers import every_warning

from mlx_gradscale import GradScaler, LossScaleOptimizer, all_finite, compile_step

pytestmark = pytest.mark.compiles


def make_step(gain=1.0):
    model = Mlp(dtype=mx.float16)
    optimizer = LossScaleOptimizer(optim.AdamW(1e-2), GradScaler(256.0))
    optimizer.init(model.trainable_parameters())
    loss_and_grad = optimizer.value_and_grad(model, mse(model))
    state = [model.state, optimizer.state, mx.random.state]
    failures = []

    def step(x, y):
        noise = mx.random.normal(y.shape)
        loss, grads = loss_and_grad(x * gain, y + 0 * noise)
        optimizer.update(model, grads)
        for error in failures:
            raise error
        return loss

    return compile_step(step, state), failures, [model.state, optimizer.state]


@pytest.mark.parametrize("error", [ValueError("a typo"), KeyboardInterrupt()])
def test_compile_step_restores_everything_if_tracing_raises(error):
    step, failures, state = make_step()
    before, key = bits(state), mx.random.state[0].tolist()
    failures.append(error)
    with pytest.raises(type(error)):
        step(*batch(0, 8, mx.float16))
    assert bits(state) == before
    assert mx.random.state[0].tolist() == key
    failures.clear()
    assert step(*batch(0, 8, mx.float16)).item() > 0
    assert bits(state) != before


def test_iteration_that_fails_in_a_compiled_step_is_forgotten():
    model, scaler = Mlp(), GradScaler(256.0)
    optimizer = LossScaleOptimizer(optim.SGD(0.1), scaler)
    optimizer.init(model.trainable_parameters())
    loss_and_grad = optimizer.value_and_grad(model, mse(model))

    def fail(x, y):
        _, grads = loss_and_grad(x, y)
        scaler.unscale_(optimizer, grads)["layers"][0]["bias"].max().item()

    # MLX raises one of them, depending on how the array was computed.
    with pytest.raises((RuntimeError, ValueError), match="eval"):
        compile_step(fail, [model.state, optimizer.state])(*batch())
    optimizer.update(model, loss_and_grad(*batch())[1])
    assert all_finite(model.parameters()).item()


def test_compile_step_warns_without_a_host_sync_if_every_step_is_skipped():
    step, *_ = make_step(gain=INF)
    with every_warning() as caught:
        for i in range(100):
            step(*batch(i, 8, mx.float16))
    [warning] = caught
    assert "steps in a row were skipped" in str(warning.message)
    assert "explain_overflow" in str(warning.message)
    assert warning.filename == __file__


def test_compile_step_does_not_warn_while_steps_are_applied():
    step, *_ = make_step()
    with every_warning() as caught:
        for i in range(120):
            step(*batch(i, 8, mx.float16))
    assert not caught
