"""The same random script on ``torch.amp.GradScaler`` and on ours."""

import math

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.helpers import INF, NAN

from mlx_gradscale import GradScaler, LossScaleOptimizer

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

powers_of_two = st.fixed_dictionaries(
    {
        "init_scale": st.sampled_from([2.0**e for e in (-20, 0, 8, 16, 61, 64)]),
        "growth_factor": st.sampled_from([2.0, 4.0]),
        "backoff_factor": st.sampled_from([0.5, 0.25]),
        "growth_interval": st.integers(1, 6),
    }
)
any_factors = st.fixed_dictionaries(
    {
        "init_scale": st.sampled_from([1.0, 777.7, 65536.0]),
        "growth_factor": st.floats(1.01, 10.0),
        "backoff_factor": st.floats(0.01, 0.99),
        "growth_interval": st.integers(1, 4),
    }
)
values = st.sampled_from([0.5, -2.0, 0.0, INF, -INF, NAN])
# Per iteration: the gradients of two optimizers, whether each is unscaled by hand,
# and what the user does to the scaler at the end.
iterations = st.tuples(
    values,
    values,
    st.booleans(),
    st.booleans(),
    st.sampled_from(["update"] * 5 + ["set scale", "set interval", "reload"]),
)


class Torch:
    def __init__(self, arguments):
        self.scaler = torch.amp.GradScaler("cpu", **arguments)
        self.weights = [torch.nn.Parameter(torch.ones(2)) for _ in range(2)]
        self.optimizers = [
            torch.optim.SGD([w], lr=0.5, momentum=0.5) for w in self.weights
        ]
        self.scaler.scale(torch.ones(()))

    def step(self, i, value, unscale):
        scale = self.scaler.get_scale()
        self.weights[i].grad = torch.tensor([1.0, value]) * scale
        if unscale:
            self.scaler.unscale_(self.optimizers[i])
        self.scaler.step(self.optimizers[i])

    def seen(self):
        return [w.detach().numpy().copy() for w in self.weights]


class Mlx:
    """The same with gradients that are scaled, or that come unscaled from a model.

    If "wrapped", a wrapper and a plain optimizer share the scaler.
    """

    def __init__(self, arguments, kind="scaled"):
        self.scaler, self.kind = GradScaler(**arguments), kind
        self.weights = [{"w": mx.ones(2)} for _ in range(2)]
        self.optimizers = [optim.SGD(0.5, momentum=0.5) for _ in range(2)]
        if kind == "wrapped":
            self.optimizers[0] = LossScaleOptimizer(self.optimizers[0], self.scaler)

    def gradients(self, i, value):
        if self.kind != "unscaled":
            return {"w": self.scaler.scale(mx.array([1.0, value]))}
        model = nn.Module()
        model.w = self.weights[i]["w"]
        _, gradients = self.scaler.value_and_grad(model, lambda: model.w.sum())()
        gradients["w"] *= mx.array([1.0, value])
        return gradients

    def step(self, i, value, unscale):
        gradients = self.gradients(i, value)
        if unscale:
            gradients = self.scaler.unscale_(self.optimizers[i], gradients)
        self.weights[i] = self.scaler.apply_gradients(
            self.optimizers[i], gradients, self.weights[i]
        )

    def seen(self):
        return [np.array(w["w"]) for w in self.weights]


def drive(side, iteration):
    *gradients, unscale_a, unscale_b, end = iteration
    applied = []
    for i, unscale in enumerate([unscale_a, unscale_b]):
        before = side.seen()[i]
        side.step(i, gradients[i], unscale)
        # The first gradient is 1.0 on every step, so an applied step shows.
        applied.append(bool((side.seen()[i] != before).any()))
    side.scaler.update(1024.0 if end == "set scale" else None)
    if end == "set interval":
        # PyTorch grows only at equality, so never below the tracker here.
        side.scaler.set_growth_interval(7)
    if end == "reload":
        side.scaler.load_state_dict(side.scaler.state_dict())
    return applied


@pytest.mark.parametrize("kind", ["scaled", "unscaled", "wrapped"])
@settings(max_examples=100)
@given(powers_of_two | any_factors, st.lists(iterations, max_size=14))
def test_random_scripts_give_the_same_scales_weights_and_skips_as_torch(
    kind, arguments, script
):
    theirs, ours = Torch(arguments), Mlx(arguments, kind)
    factors = [x for name, x in arguments.items() if name != "growth_interval"]
    is_exact = all(math.frexp(x)[0] == 0.5 for x in factors)
    for iteration in script:
        assert drive(theirs, iteration) == drive(ours, iteration)
        expected = theirs.scaler.state_dict()
        found = {k: ours.scaler.state_dict()[k] for k in expected}
        # PyTorch continues, to zero and to 2**127, where subnormals begin.
        if not 2.0**-64 <= expected["scale"] <= 2.0**64:
            return
        pairs = list(zip(theirs.seen(), ours.seen(), strict=True))
        if is_exact:
            assert found == expected
            assert all(np.array_equal(a, b) for a, b in pairs)
            continue
        # PyTorch multiplies by a double: an ulp in each update, and in each gradient.
        one_ulp = np.spacing(np.float32(expected["scale"]))
        assert abs(found["scale"] - expected["scale"]) <= one_ulp
        assert found["_growth_tracker"] == expected["_growth_tracker"]
        assert all(np.allclose(a, b, rtol=1e-5, atol=1e-5) for a, b in pairs)
        theirs.scaler.load_state_dict(expected | {"scale": found["scale"]})


def run(side, pattern):
    for value in pattern:
        side.step(0, value, False)
        side.scaler.update()
    return side


PATTERN = [1.0, INF, 1.0, 1.0, 1.0, NAN, 1.0]
ARGUMENTS = {"init_scale": 2.0**14, "growth_interval": 3, "growth_factor": 4.0}


@pytest.mark.parametrize("saved_by", ["torch", "mlx"])
def test_state_saved_by_torch_or_mlx_resumes_in_the_other(tmp_path, saved_by):
    path = tmp_path / "scaler.pt"
    if saved_by == "torch":
        theirs, ours = run(Torch(ARGUMENTS), PATTERN), Mlx({})
        torch.save(theirs.scaler.state_dict(), path)
        ours.scaler.load(path)
    else:
        ours, theirs = run(Mlx(ARGUMENTS), PATTERN), Torch({})
        ours.scaler.save(path)
        theirs.scaler.load_state_dict(torch.load(path, weights_only=True))
    for pattern in ([], PATTERN):
        run(theirs, pattern)
        run(ours, pattern)
        shared = {k: ours.scaler.state_dict()[k] for k in theirs.scaler.state_dict()}
        assert shared == theirs.scaler.state_dict()
