"""``GradScaler``: state dicts, files, copies."""

import copy

import mlx.core as mx
import mlx.optimizers as optim
import numpy as np
import pytest
from support.helpers import INF, NAN, bits, pickled
from support.scaler_helpers import apply

from mlx_gradscale import GradScaler, LossScaleOptimizer, MasterWeightOptimizer


def trained(**settings):
    scaler, optimizer = GradScaler(**settings), optim.SGD(0.1)
    for value in (1.0, INF, 1.0, 1.0):
        apply(scaler, optimizer, value)
        scaler.update()
    return scaler


def test_state_dict_has_the_keys_and_types_of_pytorch():
    state = GradScaler(init_scale=4, growth_factor=1.1).state_dict()
    assert state == {
        "scale": 4.0,
        "growth_factor": 1.1,
        "backoff_factor": 0.5,
        "growth_interval": 2000,
        "_growth_tracker": 0,
    }
    assert [type(x) for x in state.values()] == [float, float, float, int, int]


def test_state_dict_adds_settings_that_torch_lacks_only_if_they_changed():
    state = trained(backoff_interval=3, min_scale=1.0).state_dict()
    extra = set(state) - set(GradScaler().state_dict())
    assert extra == {"backoff_interval", "min_scale", "skipped_steps"}


class Named(GradScaler):
    def __init__(self, name, device="mps"):
        super().__init__(init_scale=4.0)
        self.name = name


@pytest.mark.parametrize("copied", [copy.deepcopy, copy.copy, pickled])
def test_scaler_and_its_subclasses_are_copied_only_between_iterations(copied):
    scaler = trained(growth_interval=3)
    other = copied(scaler)
    assert other.state_dict() == scaler.state_dict()
    assert other.state is not scaler.state
    apply(scaler, optim.SGD(0.1), 1.0)
    with pytest.raises(RuntimeError, match="between iterations"):
        copied(scaler)
    scaler.update()
    copied(scaler)
    named = copied(Named("run"))
    assert (type(named), named.name, named.get_scale()) == (Named, "run", 4.0)


GOOD = GradScaler(init_scale=512.0).state_dict()


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({}, "empty"),  # a RuntimeError, as in PyTorch
        ([1], "dict"),
        ("state", "dict"),
        ({"scale": 2.0}, "growth_factor"),
        ({k: v for k, v in GOOD.items() if k != "_growth_tracker"}, "_growth_tracker"),
        ({"epoch": 3, "scaler": GOOD}, "pass only the scaler's part"),
    ],
)
def test_load_state_dict_refuses_an_incomplete_state_and_changes_nothing(bad, message):
    scaler = trained()
    before = bits(scaler.state)
    with pytest.raises((TypeError, KeyError, RuntimeError), match=message):
        scaler.load_state_dict(bad)
    assert bits(scaler.state) == before


def test_load_state_dict_ignores_extra_keys_and_accepts_mlx_and_numpy_scalars():
    scaler = GradScaler(backoff_interval=3)
    # Counters that a state lacks start at zero, and settings stay.
    scaler.load_state_dict(scaler.state_dict() | {"skipped_steps": 5})
    scaler.load_state_dict(
        {**GOOD, "scale": mx.array(2.0), "_growth_tracker": np.int64(7), "new": object}
    )
    loaded = {"scale": 2.0, "_growth_tracker": 7, "backoff_interval": 3}
    assert scaler.state_dict() == GOOD | loaded


def test_master_weight_optimizer_follows_the_dynamic_scale_that_it_loads():
    weights = {"w": mx.ones(1)}
    other = LossScaleOptimizer(optim.SGD(0.1), GradScaler(512.0, growth_interval=1))
    optimizer = MasterWeightOptimizer(optim.SGD(0.1))
    for each in (other, optimizer):
        each.init(weights)
    optimizer.state = other.state
    optimizer.apply_gradients({"w": mx.ones(1)}, weights)
    assert optimizer.scaler.get_scale() == 1024.0
    optimizer.apply_gradients({"w": mx.array([NAN])}, weights)
    assert optimizer.scaler.get_scale() == 512.0
