"""What a scaler's settings may be, at the bounds, and what they are by default."""

import inspect

import mlx.core as mx
import numpy as np
import pytest

from mlx_gradscale import GradScaler
from mlx_gradscale import scale as rule

LARGEST_FLOAT = float(np.finfo(np.float32).max)
ABOVE_ONE = float(np.nextafter(np.float32(1), np.float32(2)))
BELOW_ONE = float(np.nextafter(np.float32(1), np.float32(0)))
COUNTS = ["growth_interval", "backoff_interval", "hysteresis"]
TALLIES = ["growth_tracker", "backoff_tracker", "skipped_steps", "skipped_losses"]
TALLIES += ["consecutive_skips", "skips_since_update"]


def test_the_fields_defaults_are_those_of_a_new_scaler():
    arguments = inspect.signature(GradScaler).parameters
    for name, (_, default) in rule.SETTINGS.items():
        assert arguments[name].default == default, name
    new = rule.read(GradScaler().state)
    assert {name: new.pop(name) for name in TALLIES} == dict.fromkeys(TALLIES, 0)
    assert new.pop("scale") == 65536
    assert new.pop("last_step_applied") is new.pop("loss_finite") is True
    assert new == {name: default for name, (_, default) in rule.SETTINGS.items()}
    # So nothing of it is worth telling.
    assert repr(GradScaler()) == "GradScaler(scale=65536.0, skipped_steps=0)"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[(name, value) for name in COUNTS for value in (1, 2**31 - 1, np.int64(3))],
        *[(name, value) for name in TALLIES for value in (0, 2**31 - 1)],
        *[(n, v) for n in ("scale", "min_scale", "max_scale") for v in (2**-64, 2**64)],
        ("scale", np.float32(8)),
        ("growth_factor", ABOVE_ONE),
        ("growth_factor", 2),
        ("backoff_factor", BELOW_ONE),
        ("backoff_factor", 1e-30),
        ("dynamic", np.bool_(True)),
        ("last_step_applied", False),
    ],
)
def test_the_last_that_is_taken(name, value):
    rule.check({name: value})
    assert rule.as_array(name, value).shape == ()


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [
        *[(name, value, ValueError) for name in COUNTS for value in (0, 2**31)],
        *[(name, value, ValueError) for name in TALLIES for value in (-1, 2**31)],
        *[(n, v, TypeError) for n in COUNTS for v in (1.0, True, np.float32(1), "1")],
        ("min_scale", 2.0**-65, ValueError),
        ("max_scale", 2.0**65, ValueError),
        ("scale", 0.0, ValueError),
        ("scale", -8.0, ValueError),
        ("scale", float("nan"), ValueError),
        ("scale", float("inf"), ValueError),
        ("scale", True, TypeError),
        ("scale", "8", TypeError),
        ("growth_factor", 1.0, ValueError),
        ("growth_factor", 1 + 1e-9, ValueError),
        ("growth_factor", float("inf"), ValueError),
        ("growth_factor", float("nan"), ValueError),
        ("growth_factor", None, TypeError),
        ("backoff_factor", 0.0, ValueError),
        ("backoff_factor", 1.0, ValueError),
        ("backoff_factor", 1 - 1e-9, ValueError),
        ("dynamic", 1, TypeError),
        ("loss_finite", None, TypeError),
    ],
)
def test_the_first_that_is_not(name, value, error):
    with pytest.raises(error, match=name):
        rule.check({name: value})


def test_limits_may_be_equal_and_hold_the_scale():
    rule.check({"min_scale": 8.0, "max_scale": 8.0, "scale": 8.0})
    for wrong, says in [
        ({"min_scale": 8.0, "max_scale": 4.0}, "above max_scale"),
        ({"min_scale": 8.0, "scale": 4.0}, "below min_scale"),
        ({"max_scale": 8.0, "scale": 16.0}, "above max_scale"),
    ]:
        with pytest.raises(ValueError, match=says):
            rule.check(wrong)


def test_one_rule_of_when_to_back_off():
    rule.check({"hysteresis": 2, "backoff_interval": 1})
    rule.check({"hysteresis": 1, "backoff_interval": 2})
    with pytest.raises(ValueError, match="set one of them"):
        rule.check({"hysteresis": 2, "backoff_interval": 2})


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (2.0**127, 2.0**64),
        (2.0**64, 2.0**64),
        (2.0**-126, 2.0**-64),
        (2.0**-64, 2.0**-64),
        (1000.0, 1000.0),
    ],
)
def test_a_scale_from_elsewhere_is_brought_into_the_limits(value, expected):
    given = {"scale": value, "growth_tracker": 2**70, "growth_factor": 2.0**100}
    assert rule.clamped(given) == given | {"scale": expected}
    scaler = GradScaler()
    state = rule.read(scaler.state)
    scaler.update(value)
    assert rule.read(scaler.state) == state | {"scale": expected}


@pytest.mark.parametrize("value", [0.0, -1.0, float("inf"), float("nan"), True, "8"])
def test_what_is_no_scale_is_left_to_be_refused(value):
    found = rule.clamped({"min_scale": value})["min_scale"]
    assert found is value


def test_the_largest_number_that_can_be_clamped():
    rule.check_scale("new_scale", LARGEST_FLOAT)
    with pytest.raises(ValueError, match="new_scale must be positive and finite"):
        rule.check_scale("new_scale", LARGEST_FLOAT * 2)


def test_an_array_is_clamped_to_the_limits():
    state = GradScaler(64.0, min_scale=8.0, max_scale=512.0).state
    for value, expected in [(4.0, 8.0), (8.0, 8.0), (512.0, 512.0), (1e30, 512.0)]:
        assert rule.within_limits(state, mx.array(value)).item() == expected
