"""An optimizer that writes ``parameter -= update`` is skipped like any other."""

import mlx.core as mx
import mlx.optimizers as optim
import pytest
from support.helpers import NAN, bits

from mlx_gradscale import GradScaler, LossScaleOptimizer

pytestmark = pytest.mark.core


class InPlace(optim.Optimizer):
    """Changes all that it is given, as MLX's Adafactor did with weight decay."""

    def init_single(self, parameter, state):
        state["m"] = mx.zeros_like(parameter)

    def apply_single(self, gradient, parameter, state):
        gradient *= 2
        state["m"] += gradient
        parameter -= 0.25 * state["m"]
        return parameter


@pytest.mark.filterwarnings("ignore:Some parameters")
@pytest.mark.parametrize("dtype", [mx.float32, mx.float16])
@pytest.mark.parametrize("wrap", [False, True], ids=["scaler", "wrapper"])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_what_an_optimizer_changes_in_place_is_skipped_too(dtype, wrap, compiled):
    scaler, inner = GradScaler(1.0), InPlace()
    scaler.scale(mx.array(1.0))
    weights = {"w": mx.array([1.0, 2.0], dtype)}
    optimizer = LossScaleOptimizer(inner, scaler) if wrap else inner
    optimizer.init({"w": weights["w"].astype(mx.float32)} if not wrap else weights)
    state = [inner.state, scaler.state, optimizer.state]

    def step(grads, weights):
        if wrap:
            return optimizer.apply_gradients(grads, weights)
        new = scaler.apply_gradients(inner, grads, weights)
        scaler.update()
        return new

    if compiled:
        step = mx.compile(step, inputs=state, outputs=state)
    bad, good = {"w": mx.array([NAN, 1.0], dtype)}, {"w": mx.array([1.0, 1.0], dtype)}
    before = bits([weights, good, inner.state["w"]])
    new = step(bad, weights)
    assert not scaler.last_step_applied.item()
    assert bits([new, good, inner.state["w"]]) == before
    scaler.update(1.0)
    new = step(good, weights)
    assert new["w"].tolist() == [0.5, 1.5]
    assert inner.state["w"]["m"].tolist() == [2.0, 2.0]
    # What the user holds is what it was.
    assert weights["w"].tolist() == [1.0, 2.0]
    assert good["w"].tolist() == [1.0, 1.0]
