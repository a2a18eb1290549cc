"""What must hold where subnormals are flushed: python -m tools.as_on_gpu does it."""

import mlx.core as mx
import mlx.optimizers as optim
import numpy as np
import pytest

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


@pytest.mark.parametrize(("limit", "value"), [(LARGEST, 1.0), (SMALLEST, float("inf"))])
def test_scale_growth_and_backoff_stop_at_the_limits(limit, value):
    scaler = GradScaler(limit, growth_interval=1)
    scaler.scale(mx.array(1.0))
    scaler.apply_gradients(optim.SGD(0.1), {"w": mx.array([value])}, {"w": mx.ones(1)})
    scaler.update()
    assert scaler.get_scale() == limit


@pytest.mark.parametrize(
    ("loaded", "expected"), [(2.0**127, LARGEST), (2.0**-149, SMALLEST)]
)
def test_pytorch_scale_beyond_the_limits_is_clamped_when_loaded(loaded, expected):
    scaler = GradScaler()
    scaler.load_state_dict(GradScaler().state_dict() | {"scale": loaded})
    assert scaler.get_scale() == expected


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("make", [lambda: optim.SGD(0.1), lambda: optim.AdamW(0.1)])
@pytest.mark.parametrize("wrap", [False, True], ids=["scaler", "wrapper"])
def test_skipped_step_keeps_the_bits_of_every_bfloat16_number(make, wrap):
    # Also of the 254 subnormals and of each NaN, which a float32 copy would change.
    bits = mx.arange(2**16, dtype=mx.uint16)
    weights = {"w": bits.view(mx.bfloat16)}
    grads = {"w": mx.full(2**16, float("inf"), mx.bfloat16)}
    scaler = GradScaler()
    scaler.scale(mx.array(1.0))
    if wrap:
        new = LossScaleOptimizer(make(), scaler).apply_gradients(grads, weights)
    else:
        new = scaler.apply_gradients(make(), grads, weights)
    assert not scaler.last_step_applied.item()
    assert mx.array_equal(new["w"].view(mx.uint16), bits).item()


@pytest.mark.compiles
@pytest.mark.parametrize(
    ("dtype", "bits", "nan"),
    [(mx.float32, mx.uint32, 0x7F800001), (mx.bfloat16, mx.uint16, 0x7F81)],
)
def test_mlx_where_preserves_the_bits_of_subnormals_and_nans(dtype, bits, nan):
    select = mx.compile(lambda x, keep: mx.where(keep, x, x + 1))
    x = mx.array([1, nan], bits).view(dtype)
    assert select(x, mx.array(True)).view(bits).tolist() == [1, nan]
