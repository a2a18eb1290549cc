"""The whole object, driven at random, beside the plain-Python reference."""

import tempfile
from pathlib import Path

import mlx.core as mx
import mlx.optimizers as optim
import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from support.helpers import INF, NAN, pickled
from support.reference import Reference

from mlx_gradscale import GradScaler

values = st.sampled_from([1.0, -0.25, 0.0, 3e4, INF, -INF, NAN])
which = st.integers(0, 1)
SETTINGS = st.sampled_from(
    [
        *[("growth_interval", value) for value in range(1, 5)],
        *[("growth_factor", value) for value in (1.001, 1.5, 2.0, 1000.0)],
        *[("backoff_factor", value) for value in (0.001, 0.5, 0.999)],
    ]
)


ARGUMENTS = st.fixed_dictionaries(
    {
        "growth_interval": st.integers(1, 4),
        "dynamic": st.booleans(),
        "min_scale": st.sampled_from([2.0**-64, 2.0]),
        "max_scale": st.just(4096.0),
    }
)
BACKOFFS = [{}, *({x: n} for x in ("backoff_interval", "hysteresis") for n in (2, 3))]


class Machine(RuleBasedStateMachine):
    @initialize(arguments=ARGUMENTS, backoff=st.sampled_from(BACKOFFS))
    def start(self, arguments, backoff):
        self.scaler = GradScaler(64.0, **arguments, **backoff)
        self.reference = Reference(64.0, **arguments, **backoff)
        self.scaler.scale(mx.array(1.0))
        self.weights = [{"w": mx.zeros(2)}, {"w": mx.zeros(2)}]
        self.expected = [np.zeros(2, np.float32), np.zeros(2, np.float32)]
        self.optimizers = [optim.SGD(1.0), optim.SGD(1.0)]
        self.forget()

    def forget(self):
        self.unscaled, self.finite, self.stepped = {}, {}, set()

    def scaled(self, value):
        return {"w": mx.array([1.0, value]) * self.scaler.state["scale"]}

    @rule(i=which, value=values)
    def unscale(self, i, value):
        if i in self.finite:
            with pytest.raises(RuntimeError):
                self.scaler.unscale_(self.optimizers[i], self.scaled(value))
            return
        grads = self.scaler.unscale_(self.optimizers[i], self.scaled(value))
        self.unscaled[i] = (grads, value)
        self.finite[i] = bool(np.isfinite(value))

    @rule(i=which, value=values)
    def step(self, i, value):
        if i in self.stepped:
            with pytest.raises(RuntimeError):
                self.apply(i, self.scaled(value))
            return
        grads, value = self.unscaled.pop(i, (self.scaled(value), value))
        self.apply(i, grads)
        self.stepped.add(i)
        self.finite[i] = bool(np.isfinite(value))
        self.reference.count(self.finite[i])
        if self.finite[i]:
            self.expected[i] -= np.array([1.0, value], np.float32)

    def apply(self, i, grads):
        self.weights[i] = self.scaler.apply_gradients(
            self.optimizers[i], grads, self.weights[i]
        )

    @rule()
    def update(self):
        if not self.finite:
            with pytest.raises(RuntimeError):
                self.scaler.update()
            return
        self.scaler.update()
        self.reference.update(all(self.finite.values()))
        self.forget()

    @rule(value=st.sampled_from([1.0, 8, 100.0, 1e6]), as_array=st.booleans())
    def set_scale(self, value, as_array):
        self.scaler.update(mx.array(value) if as_array else value)
        self.reference.set_scale(value)
        self.forget()

    @rule(setting=SETTINGS)
    def set_setting(self, setting):
        name, value = setting
        getattr(self.scaler, f"set_{name}")(value)
        setattr(self.reference, name, value)

    @rule(suffix=st.sampled_from([".json", ".json.gz", ".safetensors", ".pt"]))
    def save_and_load(self, suffix):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / f"scaler{suffix}"
            self.scaler.save(path)
            self.scaler.load(path)

    @rule()
    def pickle(self):
        if self.finite:
            with pytest.raises(RuntimeError):
                pickled(self.scaler)
            return
        self.scaler = pickled(self.scaler)
        self.scaler.scale(mx.array(1.0))

    @invariant()
    def agrees(self):
        if not hasattr(self, "scaler"):
            return
        state = self.scaler.state
        for name, value in vars(self.reference).items():
            assert state[name].item() == np.float32(value), name
        for name in ("growth_factor", "backoff_factor", "growth_interval"):
            found = getattr(self.scaler, f"get_{name}")()
            assert found == getattr(self.reference, name)
        # A gradient times a scale that is no power of two, and times its inverse, may
        # be an ulp off. test_skip_matrix.py checks every bit.
        for found, expected in zip(self.weights, self.expected, strict=True):
            np.testing.assert_allclose(found["w"], expected, rtol=1e-6, atol=1e-6)


Machine.TestCase.settings = settings(max_examples=60, stateful_step_count=25)
TestScalerFollowsTheReferenceThroughRandomCalls = Machine.TestCase
