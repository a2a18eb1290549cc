"""The rule against its plain-Python reference, and the bounds of every setting."""

import inspect
from dataclasses import asdict

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.reference import Reference

from mlx_gradscale import GradScaler
from mlx_gradscale.core import scale as rule

# For each step whether its gradients are finite.
patterns = st.lists(st.booleans(), max_size=60)
settings_of_a_run = st.fixed_dictionaries(
    {},
    optional={
        "scale": st.sampled_from([2.0**-64, 2.0**-63, 0.3, 1.0, 65536.0, 2.0**64]),
        "growth_factor": st.floats(1.001, 1000.0),
        "backoff_factor": st.floats(0.001, 0.999),
        "growth_interval": st.integers(1, 9),
        "dynamic": st.booleans(),
        "min_scale": st.sampled_from([2.0**-64, 2.0**-64 * 1.5]),
        "max_scale": st.sampled_from([2.0**63, 2.0**64]),
    },
)

# Only one of the two backoff rules at a time.
rules = st.one_of(
    st.builds(dict, backoff_interval=st.integers(1, 4)),
    st.builds(dict, hysteresis=st.integers(1, 4)),
)


def state_of(reference):
    return {k: rule.as_array(k, v) for k, v in asdict(reference).items()}


@given(settings_of_a_run, rules, patterns)
def test_every_pattern_gives_the_reference_trajectory(settings, rules, pattern):
    reference = Reference(**settings, **rules)
    reference.set_scale(reference.scale)
    state = state_of(reference)
    for finite in pattern:
        applied = mx.array(finite)
        state |= rule.count_step(state, applied)
        state |= rule.next_scale(state, applied)
        reference.count(finite)
        reference.update(finite)
        for name, value in asdict(reference).items():
            if not name.endswith("_factor"):
                assert state[name].item() == np.float32(value), name


@given(settings_of_a_run, rules, patterns)
def test_scale_and_reciprocal_stay_normal_and_in_bounds(settings, rules, pattern):
    reference = Reference(**settings, **rules)
    reference.set_scale(reference.scale)
    state = state_of(reference)
    for finite in pattern:
        state |= rule.next_scale(state, mx.array(finite))
        assert state["min_scale"].item() <= state["scale"].item()
        assert state["scale"].item() <= state["max_scale"].item()
        for number in (state["scale"], 1.0 / state["scale"]):
            # With as much left again for what it is multiplied with.
            assert 2.0**-64 <= number.item() <= 2.0**64


def test_an_overflow_halves_the_scale_and_an_interval_doubles_it():
    state = state_of(Reference(growth_interval=2))
    scales = []
    for finite in [True, True, False, True, True, True]:
        state |= rule.next_scale(state, mx.array(finite))
        scales.append(state["scale"].item())
    assert scales == [65536, 131072, 65536, 65536, 131072, 131072]


def test_backoff_interval_gives_paddles_trajectory():
    # The pattern and the row "Paddle n2" of the survey of peers.
    pattern = [c == "." for c in "XX.X..XXX....X"]
    expected = [1024, 512, 512, 512, 512, 512, 512, 256, 256, 256, 256, 512, 512, 512]
    state = state_of(Reference(scale=1024.0, growth_interval=3, backoff_interval=2))
    scales = []
    for finite in pattern:
        state |= rule.next_scale(state, mx.array(finite))
        scales.append(state["scale"].item())
    assert scales == expected


def test_hysteresis_gives_megatrons_and_deepspeeds_trajectory():
    # The same pattern: once two overflows are used up each one backs off, until the
    # scale grows.
    pattern = [c == "." for c in "XX.X..XXX....X"]
    expected = [1024, 512, 512, 256, 256, 256, 128, 64, 32, 32, 32, 64, 64, 64]
    state = state_of(Reference(scale=1024.0, growth_interval=3, hysteresis=2))
    scales = []
    for finite in pattern:
        state |= rule.next_scale(state, mx.array(finite))
        scales.append(state["scale"].item())
    assert scales == expected


def test_counters_saturate_where_int32_ends():
    state = state_of(Reference(skipped_steps=2**31 - 2, consecutive_skips=2**31 - 1))
    for _ in range(3):
        state |= rule.count_step(state, mx.array(False))
        state |= rule.next_scale(state, mx.array(False))
    found = rule.read(state)
    rule.check(found)
    assert found["skipped_steps"] == found["consecutive_skips"] == 2**31 - 1


def test_lowering_the_interval_below_the_tracker_grows_at_the_next_step():
    # PyTorch compares with == and would not grow until the next overflow.
    state = state_of(Reference(growth_interval=3, growth_tracker=7))
    assert rule.next_scale(state, mx.array(True))["scale"].item() == 131072


@pytest.mark.parametrize("value", [0.0, -1.0, float("inf"), float("nan")])
def test_an_array_that_is_no_scale_leaves_the_scale(value):
    state = state_of(Reference())
    assert rule.clamp(state, mx.array(value)).item() == 65536


def test_a_factor_reads_as_it_was_written():
    assert rule.read_field("growth_factor", mx.array(1.1)) == 1.1


# Bounds

LARGEST_FLOAT = float(np.finfo(np.float32).max)
ABOVE_ONE = float(np.nextafter(np.float32(1), np.float32(2)))
BELOW_ONE = float(np.nextafter(np.float32(1), np.float32(0)))
COUNTS = ["growth_interval", "backoff_interval", "hysteresis"]
COUNTERS = ["growth_tracker", "backoff_tracker", "skipped_steps"]
COUNTERS += ["consecutive_skips", "skips_since_update"]


def test_a_new_scaler_has_the_default_of_every_field():
    arguments = inspect.signature(GradScaler).parameters
    for name, (_, default) in rule.SETTINGS.items():
        assert arguments[name].default == default, name
    new = rule.read(GradScaler().state)
    assert {name: new.pop(name) for name in COUNTERS} == dict.fromkeys(COUNTERS, 0)
    assert new.pop("scale") == 65536
    assert new.pop("last_step_applied") is True
    assert new == {name: default for name, (_, default) in rule.SETTINGS.items()}
    assert repr(GradScaler()) == "GradScaler(scale=65536.0, skipped_steps=0)"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[(name, value) for name in COUNTS for value in (1, 2**31 - 1, np.int64(3))],
        *[(name, value) for name in COUNTERS for value in (0, 2**31 - 1)],
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
def test_a_field_at_its_bound_is_accepted(name, value):
    rule.check({name: value})
    assert rule.as_array(name, value).shape == ()


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [
        *[(name, value, ValueError) for name in COUNTS for value in (0, 2**31)],
        *[(name, value, ValueError) for name in COUNTERS for value in (-1, 2**31)],
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
        ("last_step_applied", None, TypeError),
    ],
)
def test_a_field_beyond_its_bound_is_refused_by_name(name, value, error):
    with pytest.raises(error, match=name):
        rule.check({name: value})


def test_the_scale_has_to_lie_between_min_scale_and_max_scale():
    rule.check({"min_scale": 8.0, "max_scale": 8.0, "scale": 8.0})
    for wrong, says in [
        ({"min_scale": 8.0, "max_scale": 4.0}, "not exceed max_scale"),
        ({"min_scale": 8.0, "scale": 4.0}, "between min_scale 8.0"),
        ({"max_scale": 8.0, "scale": 16.0}, "max_scale 8.0"),
    ]:
        with pytest.raises(ValueError, match=says):
            rule.check(wrong)


def test_hysteresis_and_backoff_interval_exclude_each_other():
    rule.check({"hysteresis": 2, "backoff_interval": 1})
    rule.check({"hysteresis": 1, "backoff_interval": 2})
    with pytest.raises(ValueError, match="not both"):
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
def test_a_scale_beyond_the_limits_is_clamped(value, expected):
    given = {"scale": value, "growth_tracker": 2**70, "growth_factor": 2.0**100}
    assert rule.clamp_values(given) == given | {"scale": expected}
    scaler = GradScaler()
    state = rule.read(scaler.state)
    scaler.update(value)
    assert rule.read(scaler.state) == state | {"scale": expected}


@pytest.mark.parametrize("value", [0.0, -1.0, float("inf"), float("nan"), True, "8"])
def test_a_value_that_is_no_scale_is_not_clamped(value):
    found = rule.clamp_values({"min_scale": value})["min_scale"]
    assert found is value


def test_a_scale_that_overflows_float32_is_refused():
    GradScaler().update(LARGEST_FLOAT)
    with pytest.raises(ValueError, match="new_scale must be positive and finite"):
        GradScaler().update(LARGEST_FLOAT * 2)
