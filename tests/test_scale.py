"""The rule against its plain-Python reference."""

from dataclasses import asdict

import mlx.core as mx
import numpy as np
import pytest
from helpers import kernels
from hypothesis import given
from hypothesis import strategies as st
from reference import Reference

from mlx_gradscale import scale as rule

# Of each step whether the gradients are finite, and whether the loss is.
steps = st.sampled_from([(True, True), (False, True), (False, False)])
patterns = st.lists(steps, max_size=60)
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

# Two rules of when to back off: one at a time.
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
    for finite, loss_finite in pattern:
        reference.loss_finite = loss_finite
        state["loss_finite"] = mx.array(loss_finite)
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
    for finite, _ in pattern:
        state |= rule.next_scale(state, mx.array(finite))
        assert state["min_scale"].item() <= state["scale"].item()
        assert state["scale"].item() <= state["max_scale"].item()
        for number in (state["scale"], 1.0 / state["scale"]):
            # With as much left again for what it is multiplied with.
            assert 2.0**-64 <= number.item() <= 2.0**64


def test_one_overflow_halves_and_interval_doubles():
    state = state_of(Reference(growth_interval=2))
    scales = []
    for finite in [True, True, False, True, True, True]:
        state |= rule.next_scale(state, mx.array(finite))
        scales.append(state["scale"].item())
    assert scales == [65536, 131072, 65536, 65536, 131072, 131072]


def test_paddles_two_overflows_in_a_row():
    # The pattern and the row "Paddle n2" of the survey of peers.
    pattern = [c == "." for c in "XX.X..XXX....X"]
    expected = [1024, 512, 512, 512, 512, 512, 512, 256, 256, 256, 256, 512, 512, 512]
    state = state_of(Reference(scale=1024.0, growth_interval=3, backoff_interval=2))
    scales = []
    for finite in pattern:
        state |= rule.next_scale(state, mx.array(finite))
        scales.append(state["scale"].item())
    assert scales == expected


def test_megatrons_and_deepspeeds_hysteresis():
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


def test_a_loss_that_is_not_finite_moves_no_scale_and_is_counted():
    state = state_of(Reference(growth_interval=3, growth_tracker=2))
    for _ in range(5):
        state |= rule.count_step(state, mx.array(False)) | {
            "loss_finite": mx.array(False)
        }
        state |= rule.next_scale(state, mx.array(False))
    found = rule.read(state)
    assert (found["scale"], found["growth_tracker"]) == (65536, 2)
    assert (found["skipped_steps"], found["consecutive_skips"]) == (5, 5)


def test_tallies_stop_where_int32_ends():
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
    assert rule.within_limits(state, mx.array(value)).item() == 65536


def test_a_factor_reads_as_it_was_written():
    assert rule.read_field("growth_factor", mx.array(1.1)) == 1.1


def test_the_rule_is_one_kernel_and_the_tallies_another():
    state = state_of(Reference())
    finite = mx.array(True)
    mx.eval(state, finite)
    assert len(kernels(rule.next_scale(state, finite))) == 1
    assert len(kernels(rule.count_step(state, finite))) == 1


def test_a_step_and_its_update_are_one_kernel():
    state, finite = state_of(Reference()), mx.array(True)
    mx.eval(state, finite)

    def step(state, finite):
        state = state | rule.count_step(state, finite)
        return state | rule.next_scale(state, finite)

    changed = mx.compile(step)(state, finite)
    changed = {k: x for k, x in changed.items() if k in rule.VALUES}
    assert len(kernels(changed)) == 1


def test_two_steps_and_their_update_are_two_kernels():
    state, first, second = state_of(Reference()), mx.array(True), mx.array(False)
    mx.eval(state, first, second)

    def steps(state, first, second):
        state = state | rule.count_step(state, first)
        state = state | rule.count_step(state, second)
        return state | rule.next_scale(state, first & second, after_one_step=False)

    changed = mx.compile(steps)(state, first, second)
    changed = {k: x for k, x in changed.items() if k in rule.VALUES}
    assert len(kernels(changed)) == 2
