"""Optimizer classes of the user's own: guarded as MLX's are, or refused."""

import mlx.core as mx
import mlx.optimizers as optim
import pytest

from mlx_gradscale.guard import guarded_apply


def test_a_class_of_the_users_is_never_compiled_behind_his_back():
    class Scaled(optim.SGD):
        by = 1.0

        def apply_single(self, gradient, parameter, state):
            return super().apply_single(gradient * self.by, parameter, state)

    optimizer, weights = Scaled(1.0), {"w": mx.zeros(1)}
    for by, expected in ((1.0, -1), (1.0, -2), (1.0, -3), (100.0, -103)):
        Scaled.by = by
        weights = guarded_apply(
            optimizer, {"w": mx.ones(1)}, weights, mx.array(1.0), mx.array(True)
        )
        assert weights["w"].item() == expected


def test_an_optimizer_that_draws_random_numbers_draws_new_ones():
    class Noisy(optim.SGD):
        def apply_single(self, gradient, parameter, state):
            return parameter + mx.random.normal(parameter.shape)

    optimizer, seen = Noisy(0.1), set()
    for _ in range(6):
        new = guarded_apply(
            optimizer,
            {"w": mx.ones(1)},
            {"w": mx.zeros(1)},
            mx.array(1.0),
            mx.array(True),
        )
        seen.add(new["w"].item())
    assert len(seen) == 6


def test_an_optimizer_that_reads_an_array_works_in_an_eager_loop():
    class Reading(optim.SGD):
        def apply_single(self, gradient, parameter, state):
            return parameter - min(gradient.item(), 2.0)

    optimizer, weights = Reading(1.0), {"w": mx.zeros(1)}
    for gradient, expected in ((1.0, -1), (1.0, -2), (5.0, -4), (1.0, -5)):
        weights = guarded_apply(
            optimizer,
            {"w": mx.array([gradient])},
            weights,
            mx.array(1.0),
            mx.array(True),
        )
        assert weights["w"].item() == expected
    kept = guarded_apply(
        optimizer, {"w": mx.ones(1)}, weights, mx.array(1.0), mx.array(False)
    )
    assert kept["w"].item() == -5


def test_a_state_that_begins_as_an_integer_becomes_what_it_is_set_to():
    class Mean(optim.SGD):
        def __init__(self, rate):
            super().__init__(rate)
            self.state["mean"] = mx.array(0)

        def apply_gradients(self, gradients, parameters):
            size = mx.abs(gradients["w"]).sum()
            self.state["mean"] = 0.5 * self.state["mean"] + 0.5 * size
            return super().apply_gradients(gradients, parameters)

    optimizer, weights = Mean(0.1), {"w": mx.zeros(1)}
    for ok, expected in ((True, 0.25), (False, 0.25), (True, 0.375)):
        weights = guarded_apply(
            optimizer, {"w": mx.array([0.5])}, weights, mx.array(1.0), mx.array(ok)
        )
        assert optimizer.state["mean"].item() == expected


def test_an_optimizer_with_a_hidden_optimizer_is_refused():
    class Outer(optim.Optimizer):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def init(self, parameters):
            self.inner.init(parameters)
            self._initialized = True

        def apply_gradients(self, gradients, parameters):
            return self.inner.apply_gradients(gradients, parameters)

    class Open(Outer):
        @property
        def state(self):
            return self.inner.state

    inputs = ({"w": mx.ones(2)}, {"w": mx.ones(2)}, mx.array(1.0), mx.array(True))
    with pytest.raises(TypeError, match="inner is an optimizer whose state is not"):
        guarded_apply(Outer(optim.Adam(0.1)), *inputs)
    assert guarded_apply(Open(optim.SGD(1.0)), *inputs)["w"].tolist() == [0, 0]


def test_overrides_that_would_be_passed_over_are_refused():
    class Clipping(optim.SGD):
        def update(self, model, gradients):
            super().update(model, gradients)

    class Ten(optim.MultiOptimizer):
        def apply_gradients(self, gradients, parameters):
            return super().apply_gradients(gradients, parameters)

    inputs = ({"w": mx.ones(2)}, {"w": mx.ones(2)}, mx.array(1.0), mx.array(True))
    with pytest.raises(TypeError, match=r"overrides update\(\)"):
        guarded_apply(Clipping(0.1), *inputs)
    with pytest.raises(TypeError, match="overrides MultiOptimizer's"):
        guarded_apply(Ten([optim.SGD(0.1)], []), *inputs)


@pytest.mark.parametrize("container", [list, dict])
def test_containers_in_a_state_that_are_replaced_in_each_step(container):
    class Own(optim.Optimizer):
        def init_single(self, parameter, state):
            state["mv"] = self.pack(mx.zeros_like(parameter), mx.zeros_like(parameter))

        def pack(self, m, v):
            return [m, v] if container is list else {"m": m, "v": v}

        def apply_single(self, gradient, parameter, state):
            m, v = state["mv"] if container is list else state["mv"].values()
            state["mv"] = self.pack(m + gradient, v + 1)
            return parameter - m

    optimizer, weights = Own(), {"w": mx.zeros(1)}
    for ok, expected in ((True, 0), (True, -1), (False, -1), (True, -3)):
        weights = guarded_apply(
            optimizer, {"w": mx.ones(1)}, weights, mx.array(1.0), mx.array(ok)
        )
        assert weights["w"].item() == expected


def test_states_that_cannot_be_taken_back_are_refused():
    class Own(optim.Optimizer):
        def init_single(self, parameter, state):
            state["mv"] = (mx.zeros_like(parameter), mx.zeros_like(parameter))

        def apply_single(self, gradient, parameter, state):
            return parameter

    class Forgetting(optim.Adam):
        def apply_single(self, gradient, parameter, state):
            state.pop("m")
            return parameter

    inputs = ({"w": mx.ones(2)}, {"w": mx.ones(2)}, mx.array(1.0), mx.array(True))
    with pytest.raises(TypeError, match=r"keeps 'w\.mv\.0' in a tuple"):
        guarded_apply(Own(), *inputs)
    forgetting = Forgetting(0.1)
    with pytest.raises(TypeError, match=r"removed 'w\.m' from its state"):
        guarded_apply(forgetting, *inputs)
    assert set(forgetting.state["w"]) == {"m", "v"}


def test_an_optimizer_that_cannot_be_hashed_works():
    class Equal(optim.SGD):
        def __eq__(self, other):
            return True

    optimizer, weights = Equal(1.0), {"w": mx.zeros(1)}
    for _ in range(3):
        weights = guarded_apply(
            optimizer, {"w": mx.ones(1)}, weights, mx.array(1.0), mx.array(True)
        )
    assert weights["w"].item() == -3


def test_an_optimizer_with_hidden_settings_is_not_compiled_but_right():
    class Hidden(optim.SGD):
        def __init__(self):
            super().__init__(0.1)
            self.factor = mx.array(1.0)

        def apply_single(self, gradient, parameter, state):
            return parameter - self.factor * gradient

    optimizer, weights = Hidden(), {"w": mx.zeros(1)}
    for i in range(4):
        optimizer.factor = mx.array(float(i))
        before = weights["w"]
        weights = guarded_apply(
            optimizer, {"w": mx.ones(1)}, weights, mx.array(1.0), mx.array(True)
        )
        assert (before - weights["w"]).item() == i


def test_an_optimizer_that_grows_its_state_in_a_step_is_refused():
    class Growing(optim.SGD):
        def apply_single(self, gradient, parameter, state):
            state["extra"] = gradient
            return super().apply_single(gradient, parameter, state)

    optimizer = Growing(0.1)
    for _ in range(2):
        with pytest.raises(TypeError, match=r"added 'w\.extra' to its state"):
            guarded_apply(
                optimizer,
                {"w": mx.ones(1)},
                {"w": mx.ones(1)},
                mx.array(1.0),
                mx.array(True),
            )
    assert set(optimizer.state["w"]) == {"v"}
