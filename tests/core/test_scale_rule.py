"""``GradScaler``: the rule of its scale, the bounds of its settings, and its states."""

import copy
import inspect
import itertools
from concurrent.futures import ThreadPoolExecutor

import mlx.core as mx
import mlx.optimizers as optim
import numpy as np
import pytest
from support.helpers import INF, NAN, pickled, refused
from support.scaler_helpers import apply, used

from mlx_gradscale import GradScaler, LossScaleOptimizer, MasterWeightOptimizer

SETTINGS = inspect.signature(GradScaler).parameters
GOOD = GradScaler().state_dict()


def scales(scaler, pattern):
    """Return the scale after each step; the gradient of an ``X`` overflows."""
    optimizer, found = optim.SGD(1.0), []
    for letter in pattern:
        apply(scaler, optimizer, INF if letter == "X" else 1.0)
        scaler.update()
        found.append(scaler.get_scale())
    return found


def trained(**settings):
    scaler = GradScaler(**settings)
    scales(scaler, ".X..")
    return scaler


# One pattern of overflows, with the trajectories that the other programs give.
PATTERN = "XX.X..XXX....X"
TRAJECTORIES = {
    "PyTorch": (
        {},
        [512, 256, 256, 128, 128, 128, 64, 32, 16, 16, 16, 32, 32, 16],
    ),
    "Paddle, every second overflow in a row": (
        {"backoff_interval": 2},
        [1024, 512, 512, 512, 512, 512, 512, 256, 256, 256, 256, 512, 512, 512],
    ),
    "Megatron and DeepSpeed, two overflows until the scale grows": (
        {"hysteresis": 2},
        [1024, 512, 512, 256, 256, 256, 128, 64, 32, 32, 32, 64, 64, 64],
    ),
    "static": ({"dynamic": False}, [1024] * 14),
}


@pytest.mark.parametrize(
    ("settings", "expected"), TRAJECTORIES.values(), ids=TRAJECTORIES
)
def test_scale_follows_the_trajectory_of_other_frameworks(settings, expected):
    scaler = GradScaler(1024.0, growth_interval=3, **settings)
    assert scales(scaler, PATTERN) == expected
    assert scaler.skipped_steps.item() == 7
    assert scaler.consecutive_skips.item() == 1


def test_scale_reaches_its_limits_and_stays_there():
    scaler = GradScaler(2.0, growth_interval=1, min_scale=1.0, max_scale=8.0)
    assert scales(scaler, "....XXXXX.") == [4, 8, 8, 8, 4, 2, 1, 1, 1, 2]


def test_counters_saturate_at_the_int32_maximum():
    most = 2**31 - 1
    counters = {"skipped_steps": most - 1, "consecutive_skips": most}
    scaler = GradScaler(growth_interval=most)
    scaler.load_state_dict(scaler.state_dict() | counters | {"_growth_tracker": most})
    scales(scaler, ".")
    assert scaler.state_dict()["_growth_tracker"] >= 0
    scaler.load_state_dict(GOOD | counters)
    scales(scaler, "XXX")
    state = scaler.state_dict()
    assert state["skipped_steps"] == state["consecutive_skips"] == most
    GradScaler().load_state_dict(state)


def test_new_scaler_has_the_defaults_of_its_signature():
    state = GradScaler().state
    assert {"growth_factor", "hysteresis", "dynamic"} < SETTINGS.keys() & state.keys()
    for name in SETTINGS.keys() & state.keys():
        assert state[name].item() == SETTINGS[name].default, name
    assert state["scale"].item() == SETTINGS["init_scale"].default == 65536


ABOVE_ONE = float(np.nextafter(np.float32(1), np.float32(2)))
BELOW_ONE = float(np.nextafter(np.float32(1), np.float32(0)))
COUNT = ((1, 2**31 - 1, np.int64(3)), (0, 2**31), (1.0, True, np.float32(1), "1"))
COUNTER = ((0, 2**31 - 1), (-1, 2**31), (1.0, None))
# For each field: values that are accepted, out of bounds, and of another type.
BOUNDS = {
    **dict.fromkeys(("growth_interval", "backoff_interval", "hysteresis"), COUNT),
    **dict.fromkeys(("_growth_tracker", "backoff_tracker"), COUNTER),
    **dict.fromkeys(("skipped_steps", "consecutive_skips"), COUNTER),
    "scale": (
        (2**-64, 2**63, 2**64, np.float32(8)),
        (0.0, -8.0, NAN, INF, 10**400),
        (True, [8.0], None, "8"),
    ),
    "growth_factor": (
        (ABOVE_ONE, 2),
        (0.5, 1.0, 1 + 1e-9, INF, NAN, 10**400),
        (None, "2"),
    ),
    "backoff_factor": (
        (BELOW_ONE, 1e-30),
        (0.0, 1.0, 1 - 1e-9, 9, -(10**400)),
        (None,),
    ),
    "min_scale": ((2**-64,), (2.0**17,), (None,)),
    "max_scale": ((2**64,), (2.0**15,), (None,)),
    "dynamic": ((np.bool_(False),), (), (1,)),
    "last_step_applied": ((False,), (), (None,)),
}


@pytest.mark.parametrize("name", BOUNDS)
def test_scaler_field_is_accepted_within_its_bounds_and_else_refused_by_name(name):
    accepted, beyond, wrong = BOUNDS[name]
    argument = "init_scale" if name == "scale" else name
    for value in accepted:
        loaded = GradScaler()
        loaded.load_state_dict(GOOD | {name: value})
        assert loaded.state[name.removeprefix("_")].item() == np.float32(value)
        if argument in SETTINGS:
            made = GradScaler(**{argument: value})
            assert made.state[name].item() == np.float32(value)
    scaler = used()
    calls = [(lambda x: scaler.load_state_dict(GOOD | {name: x}), name.lstrip("_"))]
    if hasattr(scaler, f"set_{name}"):
        calls.append((getattr(scaler, f"set_{name}"), name))
    if name == "scale":
        calls.append((scaler.update, "new_scale must be"))
    if argument in SETTINGS:
        calls.append((lambda x: GradScaler(**{argument: x}), argument))
    values = [(x, ValueError) for x in beyond] + [(x, TypeError) for x in wrong]
    for (value, error), (call, message) in itertools.product(values, calls):
        if value is not None or call != scaler.update:
            with refused(error, message, scaler):
                call(value)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"min_scale": 2.0**-65}, "min_scale must be between"),
        ({"max_scale": 2.0**65}, "max_scale must be between"),
        ({"min_scale": 4.0, "max_scale": 2.0}, "min_scale 4.0 and max_scale 2.0"),
        ({"hysteresis": 2, "backoff_interval": 2}, "cannot be combined"),
    ],
    ids=str,
)
def test_settings_that_contradict_each_other_are_refused(settings, message):
    with pytest.raises((TypeError, ValueError), match=message):
        GradScaler(**settings)


@pytest.mark.parametrize(
    "value", [128, 2**64, np.array(8.0), mx.array(128.0), mx.array([4.0]), 1e-60]
)
def test_setting_the_scale_discards_the_steps_since_the_last_update(value):
    scaler, optimizer = used(), optim.SGD(1.0)
    apply(scaler, optimizer, INF)
    scaler.update(value)
    # 1e-60 is 0 in float32, and becomes the smallest scale.
    assert scaler.get_scale() == max(np.array(value).item(), 2.0**-64)
    apply(scaler, optimizer, 1.0)


def test_new_scale_that_is_an_invalid_array_is_refused_or_keeps_the_scale():
    scaler = GradScaler()
    for value in (mx.ones(2), mx.array(True)):
        with pytest.raises(TypeError, match="new_scale must be"):
            scaler.update(value)
    for value in (0.0, -1.0, INF, NAN):
        # Without reading it from the device, it cannot be refused.
        scaler.update(mx.array(value))
    assert scaler.get_scale() == 65536.0


@pytest.mark.parametrize("enabled", [1, 0, "yes", "", np.bool_(True), None])
def test_enabled_is_truthy_as_in_pytorch(enabled):
    assert GradScaler(enabled=enabled).is_enabled() is bool(enabled)


def test_state_dict_has_the_keys_and_types_of_pytorch_and_settings_that_changed():
    state = GradScaler(init_scale=4, growth_factor=1.1).state_dict()
    assert state == {
        "scale": 4.0,
        "growth_factor": 1.1,
        "backoff_factor": 0.5,
        "growth_interval": 2000,
        "_growth_tracker": 0,
    }
    assert [type(x) for x in state.values()] == [float, float, float, int, int]
    extra = trained(backoff_interval=3, min_scale=1.0).state_dict().keys() - state
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
    after = copied(scaler)
    with ThreadPoolExecutor() as threads:  # where no lazy array can be evaluated
        assert threads.submit(after.get_scale).result() == scaler.get_scale()
    named = copied(Named("run"))
    assert (type(named), named.name, named.get_scale()) == (Named, "run", 4.0)


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
    with refused((TypeError, KeyError, RuntimeError), message, scaler):
        scaler.load_state_dict(bad)


def test_load_state_dict_ignores_extra_keys_and_accepts_mlx_and_numpy_scalars():
    scaler = GradScaler(backoff_interval=3)
    # Counters that a state lacks start at zero, and settings stay.
    scaler.load_state_dict(scaler.state_dict() | {"skipped_steps": 5})
    loaded = {"scale": mx.array(2.0), "_growth_tracker": np.int64(7), "new": object}
    scaler.load_state_dict(GOOD | loaded)
    expected = {"scale": 2.0, "_growth_tracker": 7, "backoff_interval": 3}
    assert scaler.state_dict() == GOOD | expected


def test_master_weight_optimizer_follows_the_dynamic_scale_that_it_loads():
    weights = {"w": mx.ones(1)}
    other = LossScaleOptimizer(optim.SGD(0.1), GradScaler(512.0, growth_interval=1))
    optimizer = MasterWeightOptimizer(optim.SGD(0.1))
    for each in (other, optimizer):
        each.init(weights)
    optimizer.state = other.state
    for value, scale in ((1.0, 1024.0), (NAN, 512.0)):
        optimizer.apply_gradients({"w": mx.array([value])}, weights)
        assert optimizer.scaler.get_scale() == scale
