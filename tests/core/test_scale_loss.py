"""A loss that ``scale_loss`` made: what is in the model, and what is returned."""

from typing import NamedTuple

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import pytest
from mlx.utils import tree_flatten
from support.helpers import Mlp, batch, mse

from mlx_gradscale import GradScaler, LossScaleOptimizer

pytestmark = pytest.mark.core


def own_arrays(model):
    return {path: id(x) for path, x in tree_flatten(model.parameters())}


@pytest.mark.parametrize("fails", [False, True], ids=["returns", "raises"])
def test_after_a_loss_that_is_not_differentiated(fails):
    model, optimizer = Mlp(dtype=mx.float16), LossScaleOptimizer(optim.SGD(0.1))

    def loss_fn(x, y):
        loss = mse(model)(x, y)
        if fails:
            raise KeyError("the user's")
        return loss

    # As for validation with the same function: MLX puts nothing back there.
    kept, before = model.parameters(), own_arrays(model)
    scaled = optimizer.scale_loss(loss_fn, model)
    if fails:
        with pytest.raises(KeyError, match="the user's"):
            scaled(*batch(dtype=mx.float16))
    else:
        expected = mse(model)(*batch(dtype=mx.float16))
        assert scaled(*batch(dtype=mx.float16)).item() == expected.item()
    assert own_arrays(model) == before
    assert kept.keys() == model.parameters().keys()


class Outputs(NamedTuple):
    loss: mx.array
    tokens: int


@pytest.mark.parametrize("wrap", [False, True], ids=["scaler", "wrapper"])
def test_outputs_with_names_keep_them(wrap):
    model, scaler = Mlp(), GradScaler(4.0)

    def loss_fn(x, y):
        return Outputs(mse(model)(x, y), 7)

    if wrap:
        scaled = LossScaleOptimizer(optim.SGD(0.1), scaler).scale_loss(loss_fn, model)
    else:
        scaled = scaler.scale_loss(loss_fn)
    found = scaled(*batch())
    assert type(found) is Outputs
    assert (found.loss.item(), found.tokens) == (mse(model)(*batch()).item(), 7)
    (loss, tokens), _ = nn.value_and_grad(model, scaled)(*batch())
    assert (loss.item(), tokens) == (found.loss.item(), 7)
