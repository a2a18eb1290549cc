"""``enabled=False`` passes everything through, in every combination."""

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import pytest
from mlx.utils import tree_flatten
from support.helpers import INF, NAN, OPTIMIZERS, Mlp, batch, bits, mse, same
from support.optimizer_helpers import loop_of

from mlx_gradscale import GradScaler, LossScaleOptimizer


@pytest.mark.parametrize("value", [NAN, INF])
@pytest.mark.parametrize("max_grad_norm", [None, 1.0, INF])
@pytest.mark.parametrize("state_bits", [32, 16, 8, None])
@pytest.mark.parametrize("dtype", [mx.float32, mx.float16])
def test_disabled_scaler_does_not_skip_steps(max_grad_norm, state_bits, dtype, value):
    model, inner, scaler = nn.Module(), optim.SGD(1.0), GradScaler(enabled=False)
    model.w, optimizer = mx.ones(1, dtype), inner
    if state_bits is not None:
        optimizer = LossScaleOptimizer(
            inner, scaler, max_grad_norm=max_grad_norm, state_bits=state_bits
        )
    assert scaler.step(optimizer, model, {"w": mx.array([value])}).item()
    assert not mx.isfinite(model.w).item()
    assert optimizer is inner or model.w.dtype == dtype
    assert optimizer.step.item() == 1
    assert scaler.skipped_steps.item() == 0


def test_disabled_scaler_may_be_shared_by_wrappers_that_update_by_themselves():
    scaler, weights = GradScaler(enabled=False), {"w": mx.ones(1, mx.float16)}
    pair = [LossScaleOptimizer(optim.SGD(1e-4), scaler) for _ in range(2)]
    enabled = LossScaleOptimizer(optim.SGD(1e-4), GradScaler(8.0))
    enabled.init(weights)
    for optimizer in pair:
        optimizer.init(weights)
        optimizer.state = enabled.state  # which changes no scaler
        for _ in range(2):
            optimizer.apply_gradients(weights, weights)
        assert optimizer.masters(weights)["w"].item() == pytest.approx(1 - 2e-4)
    assert scaler.get_scale() == 1.0


def test_disabled_scaler_accepts_calls_in_any_order():
    scaler, optimizer = GradScaler(enabled=False), optim.SGD(1.0)
    grads = {"w": mx.ones(1)}
    scaler.update()
    assert scaler.scale(grads) is grads
    for _ in range(2):
        assert scaler.unscale_(optimizer, grads) is grads
        new = scaler.apply_gradients(optimizer, grads, grads)
        assert new["w"].item() == 0
    assert scaler.minimize(optimizer, nn.Linear(1, 1), {}).item()
    scaler.update(8.0)
    scaler.load_state_dict(GradScaler(8.0).state_dict())
    assert (scaler.get_scale(), scaler.state_dict()) == (1.0, {})


def test_disabled_scaler_casts_the_forward_pass_and_does_not_scale_the_loss():
    model = Mlp()
    optimizer = LossScaleOptimizer(optim.SGD(0.1), GradScaler(enabled=False))
    _, grads = optimizer.value_and_grad(model, mse(model), mx.float16)(*batch())
    assert {x.dtype for _, x in tree_flatten(grads)} == {mx.float32}
    assert not same(grads, nn.value_and_grad(model, mse(model))(*batch())[1])
    loss_fn = optimizer.scale_loss(mse(model), model, mx.float16)
    assert same(nn.value_and_grad(model, loss_fn)(*batch())[1], grads)
    loss_fn = mse(model)
    assert optimizer.scale_loss(loss_fn, model) is loss_fn


def test_disabled_scaler_with_a_compute_dtype_keeps_dtypes_and_inf():
    model, optimizer = nn.Linear(1, 1, bias=False), optim.SGD(1.0)
    model.set_dtype(mx.float16)
    scaler = GradScaler(enabled=False)
    fn = scaler.value_and_grad(model, lambda x: 1e6 * mx.sum(model(x)), mx.bfloat16)
    _, grads = fn(mx.ones((1, 1)))
    assert (grads["weight"].item(), grads["weight"].dtype) == (INF, mx.float16)
    scaler.minimize(optimizer, model, grads)
    assert model.weight.dtype == mx.float16


def test_state_saved_while_disabled_leaves_an_enabled_scaler_scaling():
    optimizers = []
    for enabled in (False, True):
        scaler = GradScaler(8.0, enabled=enabled, min_scale=2.0)
        scaler.set_growth_interval(7)
        optimizers.append(LossScaleOptimizer(optim.SGD(1.0), scaler))
        optimizers[-1].init({"w": mx.ones(1)})
    disabled, enabled = optimizers
    enabled.state = disabled.state
    assert enabled.scaler.get_scale() == 8.0
    assert "dynamic" not in enabled.scaler.state_dict()


@pytest.mark.parametrize("name", ["SGD momentum", "AdamW schedule", "MultiOptimizer"])
def test_disabled_scaler_is_bit_identical_to_the_plain_script(name):
    results = []
    for kind in ("plain", "scaler", "wrapper", "plain gradients"):
        mx.random.seed(3)
        model, inner = Mlp(), OPTIMIZERS[name]()
        scaler = GradScaler(enabled=False)
        if kind == "plain gradients":
            loss_and_grad = nn.value_and_grad(model, mse(model))
            update = LossScaleOptimizer(inner, scaler).update
        else:
            _, loss_and_grad, update = loop_of(kind, model, inner, scaler)
        for seed in range(5):
            loss, grads = loss_and_grad(*batch(seed))
            update(model, grads)
        results.append(bits([model.parameters(), inner.state, loss]))
    assert results == results[:1] * 4
