"""Master weights and moments in half the bytes: ``state_bits=16``."""

import math

import mlx.core as mx
import mlx.optimizers as optim
import pytest
from mlx.utils import tree_flatten
from support.helpers import gradients_like
from support.optimizer_helpers import HALVES, wrapped

from mlx_gradscale import LossScaleOptimizer, MasterWeightOptimizer


def nbytes(tree):
    return sum(x.nbytes for _, x in tree_flatten(tree) if x.ndim)


@pytest.mark.parametrize("dtype", HALVES)
def test_state_bits_32_and_16_take_14_and_8_bytes_per_parameter(dtype):
    taken = {}
    for state_bits in (32, 16):
        weights = {"w": mx.ones((32, 32), dtype)}
        optimizer = wrapped(state_bits=state_bits)
        optimizer.init(weights)
        for seed in range(2):
            gradients = gradients_like(weights, seed)
            weights = optimizer.apply_gradients(gradients, weights)
        state = {k: x for k, x in optimizer.state.items() if k != "written"}
        taken[state_bits] = nbytes([weights, state]) / 1024
    # Weight 2, master weight 4 or 2, moments 8 or 4. The written bits are the weight's
    # own memory.
    assert taken == {32: 14, 16: 8}
    plain, weights = optim.AdamW(1e-3), {"w": mx.ones((32, 32), dtype)}
    plain.init(weights)
    assert nbytes([weights, plain.state]) / 1024 == 6


def test_bfloat16_moments_decay_where_rounding_to_the_nearest_would_freeze_them():
    start = {"w": mx.linspace(0.5, 2.0, 256)}
    optimizer = MasterWeightOptimizer(optim.Adam(0.0), state_bits=16)
    optimizer.init(start)
    optimizer.apply_gradients(start, start)
    first = optimizer.state["w"]["v"].astype(mx.float32)
    none = {"w": mx.zeros(256)}
    for _ in range(800):
        optimizer.apply_gradients(none, start)
        mx.eval(optimizer.state)
    decay = optimizer.state["w"]["v"].astype(mx.float32) / first
    # To the nearest, v would not change at all.
    assert mx.array_equal((first * 0.999).astype(mx.bfloat16).astype(mx.float32), first)
    assert mx.allclose(
        mx.log(decay), mx.array(800 * math.log(0.999)), atol=0.15, rtol=0
    )


def test_state_bits_16_of_a_third_party_optimizer_is_refused():
    inner = optim.MultiOptimizer([type("Own", (optim.Adam,), {})(0.1)], [])
    with pytest.raises(ValueError, match="Own manages its own state"):
        LossScaleOptimizer(inner, state_bits=16)
