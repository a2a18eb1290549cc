"""Unscaled gradients that nobody reads are never computed: counted in kernels."""

import mlx.core as mx
import mlx.optimizers as optim
import pytest
from mlx.utils import tree_flatten
from support.helpers import Mlp, batch, mse

from benchmarks.bytes_and_kernels import count_kernels
from mlx_gradscale import GradScaler, LossScaleOptimizer


@pytest.mark.parametrize("kind", ["scaler", "wrapper", "clipped"])
def test_unscaled_gradients_cost_kernels_only_where_they_are_read(kind):
    mx.random.seed(0)
    model, scaler, inner = Mlp(), GradScaler(64.0), optim.AdamW(1e-2)
    norm = 1.0 if kind == "clipped" else None
    optimizer = LossScaleOptimizer(inner, scaler, max_grad_norm=norm)
    loss_and_grad = scaler.value_and_grad(model, mse(model))
    state = [model.state, optimizer.state]
    for _ in range(3):
        mx.eval(state)
        _, grads = loss_and_grad(*batch())
        if kind == "scaler":
            scaler.minimize(inner, model, grads)
        else:
            optimizer.update(model, grads)
    n_leaves = len(tree_flatten(grads))
    read = count_kernels([state, grads]).total()
    assert read >= count_kernels(state).total() + n_leaves
