"""Scaler states of other frameworks: values, warnings, and the same trajectory."""

import warnings

import mlx.core as mx
import mlx.optimizers as optim
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_gradscale import GradScaler
from mlx_gradscale.formats import FORMATS, FormatWarning, read_state, recognize

TORCH = {
    "scale": 1024.0,
    "growth_factor": 2.0,
    "backoff_factor": 0.5,
    "growth_interval": 2000,
    "_growth_tracker": 7,
}
# One real-shaped state of each framework, and what differs from PyTorch's by default.
STATES = {
    "torch": (TORCH, {}),
    "paddle": (
        {"scale": np.array([1024.0], np.float32), "incr_ratio": 2.0, "decr_ratio": 0.5,
         "incr_every_n_steps": 2000, "decr_every_n_nan_or_inf": 2, "incr_count": 7,
         "decr_count": 1, "use_dynamic_loss_scaling": True},
        {"backoff_interval": 2, "backoff_tracker": 1},
    ),
    "megatron": (
        {"scale": np.array([1024.0]), "growth_tracker": 7, "hysteresis_tracker": 2},
        {"growth_interval": 1000, "hysteresis": 2, "min_scale": 1.0},
    ),
    "apex": (
        {"loss_scaler0": {"loss_scale": 1024.0, "unskipped": 7}},
        {"max_scale": 2.0**24},
    ),
    "deepspeed": (
        {"dynamic_loss_scale": True, "cur_scale": 1024.0, "cur_iter": 8,
         "scale_factor": 2.0, "scale_window": 2000},
        {"min_scale": 1.0},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FORMATS)
def test_every_scaler_format_is_recognized_and_read(name):
    state, more = STATES[name]
    assert recognize(state) == name
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always", FormatWarning)
        got = read_state(state)
    assert got == TORCH | more
    assert [type(v) for v in got.values()][:5] == [float, float, float, int, int]
    # Only PyTorch's and Paddle's states contain all settings.
    assert len(said) == (name not in ("torch", "paddle"))
    if name == "megatron":
        for word in ("growth_factor=2.0", "growth_interval=1000", "hysteresis=2"):
            assert word in str(said[0].message)


class Megatron:
    """Its rule, from its description: the budget is refilled by growth alone."""

    def __init__(self, interval, hysteresis):
        self.scale, self.interval, self.hysteresis = 2.0**20, interval, hysteresis
        self.growth, self.left = 0, hysteresis

    def update(self, finite):
        if not finite:
            self.growth, self.left = 0, self.left - 1
            if self.left <= 0:
                self.scale = max(self.scale * 0.5, 1.0)
        else:
            self.growth += 1
            if self.growth == self.interval:
                self.growth, self.left = 0, self.hysteresis
                self.scale *= 2.0

    def state(self):
        return {"scale": np.array([self.scale]), "growth_tracker": self.growth,
                "hysteresis_tracker": self.left}  # fmt: skip


class DeepSpeed:
    """Its rule: it grows every window steps, and one step later after an overflow."""

    def __init__(self, window):
        self.scale, self.window, self.count, self.last = 2.0**20, window, 0, -1

    def update(self, finite):
        since = self.count - self.last - 1
        if not finite:
            self.scale, self.last = max(self.scale / 2, 1.0), self.count
        elif since > 0 and since % self.window == 0:
            self.scale *= 2
        self.count += 1

    def state(self):
        return {"cur_scale": self.scale, "cur_iter": self.count, "scale_factor": 2.0,
                "last_overflow_iter": self.last, "scale_window": self.window,
                "dynamic_loss_scale": True}  # fmt: skip


def continue_with(theirs, steps, **settings):
    """Continue in a GradScaler, and compare the scales."""
    scaler = GradScaler()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FormatWarning)
        scaler.load_state_dict(read_state(theirs.state()) | settings)
    for finite in steps:
        theirs.update(finite)
        scaler.scale(mx.array(1.0))
        grads = {"w": mx.array([1.0 if finite else float("inf")])}
        scaler.apply_gradients(optim.SGD(0.1), grads, {"w": mx.ones(1)})
        scaler.update()
        assert scaler.get_scale() == theirs.scale


STEPS = st.lists(st.booleans(), max_size=20)


@settings(deadline=None)
@given(STEPS, STEPS)
def test_megatron_run_resumes_with_its_remaining_hysteresis(before, after):
    theirs = Megatron(3, hysteresis=2)
    for finite in before:
        theirs.update(finite)
    continue_with(theirs, after, growth_interval=3)


@settings(deadline=None, max_examples=30)
@given(st.integers(1, 6), STEPS, STEPS)
def test_converted_deepspeed_scale_grows_at_the_same_steps(window, before, after):
    theirs = DeepSpeed(window)
    for finite in [*before, True]:  # one finite step: the exact case
        theirs.update(finite)
    continue_with(theirs, after[: after.index(False)] if False in after else after)


APEX = {"loss_scale": 1.0, "unskipped": 0}


@pytest.mark.parametrize(
    ("state", "format", "word"),
    [
        ({}, None, "disabled"),
        ({"foo": 1}, None, "Pass format="),
        (TORCH | {"scale": 0.0}, None, "scale"),
        (TORCH | {"_growth_tracker": 1.5}, None, "_growth_tracker"),
        (TORCH | {"scale": "big"}, None, "scale"),
        (TORCH | {"scale": np.zeros(2)}, None, "scale"),
        (TORCH, "caffe", "is not a scaler format"),
        ({"unskipped": 3}, "apex", "apex scaler state has no 'loss_scale'"),
        ({f"loss_scaler{i}": APEX for i in "01"}, None, r"state\['loss_scaler0'\]"),
    ],
)
def test_bad_scaler_state_is_refused_and_its_fault_named(state, format, word):
    with pytest.raises(ValueError, match=word):
        read_state(state, format)
