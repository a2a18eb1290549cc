"""``LossScaleOptimizer``: clipping, arguments, attributes, foreign gradients."""

import mlx.core as mx
import mlx.optimizers as optim
import numpy as np
import pytest
from mlx.utils import tree_map
from support.helpers import INF, NAN, gradients_like, parameters, pickled
from support.optimizer_helpers import assert_near, wrapped

from mlx_gradscale import GradScaler, LossScaleOptimizer, MasterWeightOptimizer


@pytest.mark.parametrize("max_norm", [0.1, 1e3, np.float32(2), INF])
def test_max_grad_norm_clips_like_mlx_clip_grad_norm(max_norm):
    optimizer = wrapped(optim.SGD(1.0), scale=2.0**10, max_grad_norm=max_norm)
    weights = parameters()
    gradients = gradients_like(weights, 3)
    scaled = tree_map(lambda g: g * 2.0**10, gradients)
    new = optimizer.apply_gradients(scaled, weights)
    clipped, norm = optim.clip_grad_norm(gradients, max_norm)
    expected = optim.SGD(1.0).apply_gradients(clipped, weights)
    assert optimizer.grad_norm.item() == pytest.approx(norm.item(), rel=1e-6)
    assert_near(new, expected, rtol=1e-6, atol=1e-7)
    assert wrapped().grad_norm is None


def test_max_grad_norm_can_change_only_if_given_and_only_to_a_positive_number():
    optimizer = wrapped(max_grad_norm=1.0)
    for bad in (0, -1.0, 1e-46, NAN, "1", True):
        with pytest.raises(ValueError, match="positive number"):
            optimizer.max_grad_norm = bad
        with pytest.raises(ValueError, match="max_grad_norm must be a positive"):
            wrapped(max_grad_norm=bad)
    with pytest.raises(ValueError, match="positive number"):
        optimizer.max_grad_norm = None
    with pytest.raises(AttributeError, match="without max_grad_norm"):
        wrapped().max_grad_norm = 1.0


def test_attributes_of_the_wrapped_optimizer_are_read_and_set_through_the_wrapper():
    inner = optim.AdamW(1e-3, weight_decay=0.3)
    optimizer = LossScaleOptimizer(inner)
    assert optimizer.weight_decay == 0.3
    optimizer.weight_decay = 0.0
    optimizer.betas = [0.8, 0.9]
    assert inner.weight_decay == 0.0
    assert inner.betas == [0.8, 0.9]
    optimizer.note = "mine"
    assert not hasattr(inner, "note")
    with pytest.raises(AttributeError):
        optimizer.scaler = GradScaler()
    with pytest.raises(AttributeError, match="Create a new LossScaleOptimizer"):
        optimizer.optimizer = optim.SGD(0.1)
    with pytest.raises(AttributeError, match=r"AdamW.*nonsense"):
        optimizer.nonsense  # noqa: B018
    assert pickled(optimizer).weight_decay == 0.0


def test_learning_rate_and_step_in_the_state_belong_to_the_wrapped_optimizer():
    inner = optim.SGD(0.5)
    optimizer, weights = wrapped(inner), {"w": mx.zeros(1)}
    assert optimizer.state["learning_rate"].item() == 0.5
    optimizer.state["learning_rate"] = 0.25
    assert inner.learning_rate.item() == optimizer.learning_rate.item() == 0.25
    new = optimizer.apply_gradients({"w": mx.ones(1)}, weights)
    assert new["w"].item() == -0.25
    assert optimizer.state["step"].item() == 1
    optimizer.state["step"] = mx.array(7, mx.uint64)
    assert inner.step.item() == optimizer.step.item() == 7
    with pytest.raises(KeyError, match="nonsense"):
        optimizer.state["nonsense"]
    with pytest.raises(KeyError, match="nonsense"):
        optimizer.state["nonsense"] = mx.array(1.0)


def test_repr_shows_the_scale_and_the_settings_that_are_not_defaults():
    scaler = GradScaler(8.0)
    assert repr(scaler) == "GradScaler(scale=8.0, skipped_steps=0)"
    assert repr(GradScaler(enabled=False)) == "GradScaler(enabled=False)"
    optimizer = MasterWeightOptimizer(optim.Lion(0.1))
    assert repr(optimizer) == "MasterWeightOptimizer(Lion)"
    optimizer = LossScaleOptimizer(
        optim.AdamW(0.1), scaler, max_grad_norm=1.0, state_bits=16
    )
    assert repr(optimizer) == (
        f"LossScaleOptimizer(AdamW, {scaler!r}, max_grad_norm=1.0, state_bits=16)"
    )
