"""Models and losses that change lists, share names with states, or call themselves."""

import warnings
from contextlib import nullcontext

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import pytest
from mlx.utils import tree_flatten, tree_map
from support.helpers import bits, dtypes

from mlx_gradscale import GradScaler, MasterWeightOptimizer


class Fifo(nn.Module):
    def __init__(self, fails=False):
        super().__init__()
        self.layer, self.fifo = nn.Linear(2, 1), [mx.zeros(2), mx.ones(2)]
        self.last = mx.ones(1)
        self.fails = fails

    def __call__(self, x):
        self.fifo.pop()
        if self.fails:
            raise ValueError("the model's own error")
        return self.layer(x) * self.last


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("way", ["value_and_grad", "compute_dtype", "scale_loss"])
def test_forward_pass_may_shorten_a_list_and_errors_in_it_reach_the_user(way, fails):
    model, scaler = Fifo(fails), GradScaler()
    if way == "scale_loss":
        gradient = mx.grad(scaler.scale_loss(lambda x: model(x).mean(), model))
    else:
        dtype = mx.bfloat16 if way == "compute_dtype" else None
        gradient = scaler.value_and_grad(model, lambda x: model(x).mean(), dtype)
    with pytest.raises(ValueError, match="own error") if fails else nullcontext():
        gradient(mx.ones((1, 2)))
    assert len(model.fifo) == 1
    assert dtypes(model.parameters()) == {mx.float32}


class States(nn.Module):
    """Its parameters have the name that MultiOptimizer gives to its states."""

    def __init__(self):
        super().__init__()
        self.states = [nn.Linear(2, 2), nn.Linear(2, 2)]


@pytest.mark.parametrize("state_bits", [32, 16, 8])
def test_parameters_named_states_are_stepped_saved_and_freed(state_bits):
    model = States()
    gradients = tree_map(mx.ones_like, model.trainable_parameters())
    first, second = (
        MasterWeightOptimizer(optim.Adam(1e-3), state_bits=state_bits) for _ in range(2)
    )
    first.update(model, gradients)
    second.state = dict(tree_flatten(first.state))
    assert bits(second.state) == bits(first.state)
    second.state = {}
    second.update(model, gradients)
    assert second.step.item() == 2


@pytest.mark.filterwarnings("ignore:The loss is float16")
def test_gradient_function_called_in_its_own_loss_restores_the_classes():
    seen = []

    class Inner(nn.Linear):
        def __call__(self, x):
            seen.append(x.dtype)
            return super().__call__(x)

    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Inner(2, 1)

        def __call__(self, x):
            return self.inner(x.astype(mx.float32))  # its own choice, not to be cast

    def loss_fn(x, is_outer):
        if is_outer:
            gradient(x, False)
        return model(x).mean()

    model = Outer()
    gradient = GradScaler().value_and_grad(model, loss_fn, mx.float16)
    gradient(mx.ones((1, 2)), True)
    assert (type(model), type(model.inner)) == (Outer, Inner)
    assert seen == [mx.float32] * 2


def test_master_weights_of_frozen_parameters_are_ignored():
    model, optimizer = nn.Linear(2, 1), MasterWeightOptimizer(optim.SGD(0.1))
    model.set_dtype(mx.float16)
    model.freeze(keys=["bias"])
    optimizer.init(model.trainable_parameters())
    optimizer.set_masters(model.parameters(), model.parameters())
    assert set(optimizer.state["masters"]) == {"weight"}


def test_growth_tracker_does_not_wrap():
    scaler = GradScaler(growth_interval=2**31 - 1)
    scaler.load_state_dict(scaler.state_dict() | {"_growth_tracker": 2**31 - 1})
    scaler.scale(mx.array(1.0))
    scaler.apply_gradients(optim.SGD(0.1), *[{"w": mx.ones(1)}] * 2)
    scaler.update()
    assert scaler.state_dict()["_growth_tracker"] >= 0


@pytest.mark.compiles
@pytest.mark.parametrize(
    ("scaler", "compiled", "n_warnings"),
    [
        (GradScaler(2.0**16), False, 1),
        (GradScaler(512.0), False, 0),
        (GradScaler(512.0), True, 1),  # it may grow
        (GradScaler(512.0, dynamic=False), True, 0),
    ],
)
def test_float16_loss_is_warned_about_only_if_the_scale_may_not_fit_float16(
    scaler, compiled, n_warnings
):
    model = nn.Linear(1, 1)
    model.set_dtype(mx.float16)
    gradient = scaler.value_and_grad(model, lambda x: model(x).sum())
    gradient = mx.compile(gradient, inputs=scaler.state) if compiled else gradient
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        gradient(mx.ones((1, 1), mx.float16))
        gradient(mx.ones((1, 1), mx.float16))
    assert len([w for w in caught if "loss is float16" in str(w)]) == n_warnings
