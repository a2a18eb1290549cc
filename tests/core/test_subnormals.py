"""What must hold where subnormals are flushed: python -m tools.as_on_gpu does it."""

from functools import partial

import mlx.core as mx
import mlx.optimizers as optim
import numpy as np
import pytest
from support.helpers import INF, OPTIMIZERS, bits, same
from support.optimizer_helpers import HALVES
from support.scaler_helpers import used

from mlx_gradscale import GradScaler, LossScaleOptimizer

SMALLEST, LARGEST = 2.0**-64, 2.0**64


@pytest.mark.parametrize("scale", [SMALLEST, LARGEST])
@pytest.mark.parametrize("max_grad_norm", [None, 2.0**-20])
def test_small_gradients_survive_the_smallest_and_the_largest_scale(
    scale, max_grad_norm
):
    optimizer = LossScaleOptimizer(
        optim.SGD(1.0), GradScaler(scale), max_grad_norm=max_grad_norm
    )
    factors = mx.array([3.0, 2.0**-30])
    loss_fn = optimizer.scale_loss(lambda p: mx.sum(p["w"] * factors))
    weights = {"w": mx.zeros(2)}
    new = optimizer.apply_gradients(mx.grad(loss_fn)(weights), weights)["w"]
    assert optimizer.scaler.last_step_applied.item()
    size = 1.0 if max_grad_norm is None else max_grad_norm / 3.0
    np.testing.assert_allclose(new, [-3.0 * size, -(2.0**-30) * size], rtol=1e-5)


def test_scale_stays_within_its_limits_when_it_moves_or_is_loaded():
    for scale, limit, value in ((2.0**127, LARGEST, 1.0), (2.0**-149, SMALLEST, INF)):
        scaler = used(GradScaler(growth_interval=1))
        scaler.load_state_dict(scaler.state_dict() | {"scale": scale})  # PyTorch's
        assert scaler.get_scale() == limit
        scaler.apply_gradients(optim.SGD(0.1), *[{"w": mx.array([value])}] * 2)
        scaler.update()
        assert scaler.get_scale() == limit


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(
    ("name", "kind", "compiled"),
    [
        *[("SGD", kind, False) for kind in ("scaler", 32, 16, 8)],
        *[("AdamW", kind, False) for kind in ("scaler", 32, 16, 8)],
        pytest.param("AdamW", 16, True, marks=pytest.mark.compiles),
        pytest.param("AdamW", 8, True, marks=pytest.mark.compiles),
    ],
)
@pytest.mark.parametrize("dtype", HALVES)
def test_skipped_step_keeps_the_bits_of_every_half_number(name, kind, compiled, dtype):
    # Also of subnormals, infinities and each NaN, which a float32 copy would change.
    weights = {"w": mx.arange(2**16, dtype=mx.uint16).view(dtype)}
    scaler, inner = used(), OPTIMIZERS[name]()
    apply, state = partial(scaler.apply_gradients, inner), inner.state
    if kind == "scaler":
        inner.init({"w": mx.zeros(2**16)})
    else:
        optimizer = LossScaleOptimizer(inner, scaler, state_bits=kind)
        optimizer.init(weights)
        apply, state = optimizer.apply_gradients, optimizer.state
        if kind != 32:
            dtype_of = {16: mx.int16, 8: mx.int8}
            remainders = mx.arange(2**16).astype(dtype_of[kind])
            state["remainders"]["w"] = remainders
    state = [state, scaler.state]
    apply = mx.compile(apply, inputs=state, outputs=state) if compiled else apply
    moments = bits(inner.state)
    new = apply({"w": mx.full(2**16, INF, dtype)}, weights)
    assert not scaler.last_step_applied.item()
    assert same(new, weights)
    assert bits(inner.state) == moments
    if kind in (16, 8):
        assert same(optimizer.state["remainders"]["w"], remainders)
