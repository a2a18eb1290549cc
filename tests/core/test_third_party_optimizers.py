"""Optimizer classes of the user's own: guarded as MLX's are, or refused."""

import copy
import pickle

import mlx.core as mx
import mlx.optimizers as optim
import pytest
from mlx.utils import tree_flatten, tree_unflatten
from support.helpers import same
from support.optimizer_helpers import arrays, check_beside_bare

from mlx_gradscale import GuardedOptimizer
from mlx_gradscale.guard import guarded_apply

pytestmark = pytest.mark.core


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
    for optimizer in (Clipping(0.1), optim.MultiOptimizer([Clipping(0.1)], [])):
        with pytest.raises(TypeError, match=r"overrides update\(\)"):
            guarded_apply(optimizer, *inputs)
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


class Own(optim.Optimizer):
    """What each kind of optimizer below adds to."""

    def __init__(self, learning_rate=0.1):
        super().__init__()
        self._maybe_schedule("learning_rate", learning_rate)

    def init_single(self, parameter, state):
        state["m"] = mx.zeros_like(parameter)


class NumberInState(Own):
    def init_single(self, parameter, state):
        super().init_single(parameter, state)
        state["weight"] = 0.0

    def apply_single(self, gradient, parameter, state):
        state["weight"] = 1.0 + 0.9 * state["weight"]
        share = 1.0 / state["weight"]
        state["m"] = (1 - share) * state["m"] + share * gradient
        return parameter - self.learning_rate * state["m"]


class NumberOfTheFirstStep(Own):
    def apply_single(self, gradient, parameter, state):
        state["count"] = state.get("count", 0) + 1
        return parameter - self.learning_rate * gradient / state["count"]


class KeyFromGradients(Own):
    def init_single(self, parameter, state):
        super().init_single(parameter, state)
        state["calls"] = 0

    def apply_single(self, gradient, parameter, state):
        if state["calls"] == 0:
            state["calls"], state["v"] = 1, mx.square(gradient)
            return parameter
        step = gradient / mx.maximum(mx.sqrt(state["v"]), 1e-3)
        state["v"] = 0.9 * state["v"] + 0.1 * mx.square(gradient)
        return parameter - self.learning_rate * step


class KeyFromParameters(Own):
    def apply_single(self, gradient, parameter, state):
        if "start" not in state:
            state["start"] = {"of": parameter, "kind": "anchor"}
        state["m"] = state["m"] + gradient
        return state["start"]["of"] - self.learning_rate * state["m"]


class FlagForAll(Own):
    def __init__(self):
        super().__init__()
        self.state["begun"] = False

    def apply_gradients(self, gradients, parameters):
        new = super().apply_gradients(gradients, parameters)
        self.state["begun"] = True
        return new

    def apply_single(self, gradient, parameter, state):
        old = state["m"] if self.state["begun"] else gradient
        state["m"] = 0.9 * old + 0.1 * gradient
        return parameter - self.learning_rate * state["m"]


class InnerForSingles(Own):
    def __init__(self):
        super().__init__()
        self.inner = optim.AdamW(0.1)

    def init_single(self, parameter, state):
        self.inner.init_single(parameter, state)

    def apply_single(self, gradient, parameter, state):
        return self.inner.apply_single(gradient, parameter, state)


class InPlace(Own):
    def apply_single(self, gradient, parameter, state):
        state["m"] *= 0.9
        state["m"] += gradient
        parameter -= self.learning_rate * state["m"]
        return parameter


class Branching(Own):
    def init_single(self, parameter, state):
        super().init_single(parameter, state)
        state["count"] = 0

    def apply_single(self, gradient, parameter, state):
        if state["count"] % 2 == 0:
            size = mx.linalg.svd(mx.diag(gradient.reshape(-1)[:2]), stream=mx.cpu)[1]
            state["m"] = state["m"] + size[0] * gradient
        state["count"] += 1
        return parameter - self.learning_rate * state["m"]


class BranchingFirst(Own):
    def init_single(self, parameter, state):
        super().init_single(parameter, state)
        state["count"] = 0

    def apply_single(self, gradient, parameter, state):
        if state["count"] == 0:
            state["v"] = mx.square(gradient)
        state["v"] = 0.9 * state["v"] + 0.1 * gradient
        state["count"] += 1
        return parameter - self.learning_rate * state["v"]


class Quantized(optim.AdamW):
    """As unsloth-zoo's AdamW with an 8-bit first moment."""

    def __init__(self):
        super().__init__(0.1)

    def init_single(self, parameter, state):
        super().init_single(parameter, state)
        if parameter.size >= 128:
            state["m"] = mx.quantize(state["m"], group_size=32)

    def apply_single(self, gradient, parameter, state):
        if parameter.size >= 128:
            state["m"] = mx.dequantize(*state["m"], group_size=32)
        new = super().apply_single(gradient, parameter, state)
        if parameter.size >= 128:
            state["m"] = mx.quantize(state["m"], group_size=32)
        return new


KINDS = [
    NumberInState,
    NumberOfTheFirstStep,
    KeyFromGradients,
    KeyFromParameters,
    FlagForAll,
    InnerForSingles,
    InPlace,
]


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("make", KINDS)
def test_other_peoples_optimizers_are_what_they_are_alone(make, compiled):
    check_beside_bare(make, compiled, bad=(0, 3))
    if not compiled:
        check_beside_bare(make, compiled, bad=())


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_a_moment_in_eight_bits(compiled):
    check_beside_bare(Quantized, compiled, bad=(0, 3), columns=32)


@pytest.mark.parametrize("make", [Branching, BranchingFirst])
def test_an_optimizer_that_branches_on_its_numbers_is_served_uncompiled(make):
    check_beside_bare(make, False, bad=(0, 3))
    with pytest.raises(TypeError, match=r"decides in Python by a number in its state"):
        check_beside_bare(make, True, bad=())


def test_a_loop_that_is_compiled_before_init_goes_on_rightly():
    def run(compiled):
        optimizer, weights = NumberInState(), {"w": mx.zeros(2)}

        def step(gradient, ok):
            weights["w"] = guarded_apply(
                optimizer, {"w": gradient}, dict(weights), None, ok
            )["w"]

        state = [weights, optimizer.state]
        if compiled:
            step = mx.compile(step, inputs=state, outputs=state)
        for i in range(5):
            step(mx.full((2,), i - 1.5), mx.array(i != 1))
        return weights["w"].tolist()

    assert run(True) == pytest.approx(run(False), rel=1e-6)


@pytest.mark.parametrize("make", [NumberInState, KeyFromGradients, KeyFromParameters])
def test_a_state_that_has_stepped_without_us_goes_on(make):
    optimizer, bare = make(), make()
    weights = expected = {"w": mx.ones(2)}
    for i in range(5):
        gradients = {"w": mx.array([1.0 + i, -1.0])}
        expected = bare.apply_gradients(gradients, expected)
        if i < 2:
            weights = optimizer.apply_gradients(gradients, weights)
        else:
            weights = guarded_apply(optimizer, gradients, weights, None, mx.array(True))
    assert weights["w"].tolist() == pytest.approx(expected["w"].tolist(), rel=1e-6)


@pytest.mark.parametrize("make", [NumberInState, KeyFromGradients, KeyFromParameters])
def test_copies_go_on_as_the_original_does(make):
    one, weights = GuardedOptimizer(make()), {"w": mx.ones(2)}
    one.init(weights)
    results = []
    for optimizer in (copy.deepcopy(one), pickle.loads(pickle.dumps(one)), one):
        new = weights
        for i in range(3):
            new = optimizer.apply_gradients({"w": mx.array([1.0 + i, -1.0])}, new)
        results.append(new["w"].tolist())
    assert results[0] == results[1] == results[2]


def test_a_parameter_that_comes_later_has_a_first_step_of_its_own():
    optimizer, weights = KeyFromGradients(), {"a": mx.ones(1)}
    for i in range(4):
        if i == 2:
            weights |= {"b": mx.ones(1)}
            optimizer.init(weights)
        gradients = {path: mx.full((1,), 1.0 + i) for path in weights}
        weights = guarded_apply(optimizer, gradients, weights, None, mx.array(i != 2))
    # Steps 0, 1 and 3 of a, of which the first only squares; for b that is step 3.
    assert weights["a"].item() == pytest.approx(1 - 0.1 * (2 + 4 / 1.3**0.5), rel=1e-6)
    assert weights["b"].item() == 1
    assert optimizer.state["b"]["v"].item() == 16


def test_the_state_of_other_peoples_optimizers_is_saved_and_loaded():
    for make in (NumberInState, KeyFromGradients, KeyFromParameters):
        one, two = GuardedOptimizer(make()), GuardedOptimizer(make())
        weights, gradients = {"w": mx.ones(2)}, {"w": mx.array([1.0, 2.0])}
        for _ in range(2):
            weights = one.apply_gradients(gradients, weights)
        saved = tree_flatten(one.state)
        with_constants = tree_unflatten(saved)
        only_arrays = tree_unflatten(list(arrays(one.state).items()))
        expected = one.apply_gradients(gradients, weights)
        two.init(weights)
        for state in (with_constants, only_arrays):
            two.state = state
            assert same(two.apply_gradients(gradients, weights), expected)
    constants = dict(saved) | {"optimizer.w.start.kind": "other"}
    with pytest.raises(ValueError, match="'other' in the state, 'anchor' in this"):
        two.state = tree_unflatten(list(constants.items()))


def test_a_trial_draws_no_random_numbers_and_asks_no_schedule():
    asked = []

    def schedule(step):
        asked.append(step)
        return mx.array(0.1)

    class Noisy(Own):
        def apply_single(self, gradient, parameter, state):
            return parameter + mx.random.normal(parameter.shape)

    optimizer = Noisy(schedule)
    asked.clear()
    mx.random.seed(3)
    expected = mx.random.normal((2,)).tolist()
    mx.random.seed(3)
    weights = {"w": mx.zeros(2)}
    new = guarded_apply(optimizer, weights, weights, None, mx.array(True))
    assert new["w"].tolist() == expected
    assert len(asked) == 1


def test_mlx_optimizers_are_not_tried(monkeypatch):
    def tried(*_):
        raise AssertionError

    monkeypatch.setattr("mlx_gradscale.guard.initialization.prepare", tried)
    monkeypatch.setattr("mlx_gradscale.guard.step.apply_other", tried)
    weights = {"w": mx.zeros(2)}
    guarded_apply(optim.AdamW(0.1), weights, weights, None, mx.array(True))


def test_what_a_step_changes_and_a_skip_cannot_take_back_is_refused():
    class Growing(Own):
        def apply_single(self, gradient, parameter, state):
            state[f"extra{len(state)}"] = gradient
            return parameter

    class Late(Own):
        def apply_single(self, gradient, parameter, state):
            if gradient.sum().item() > 0:
                state["seen"] = "positive"
            return parameter

    class Counting(Own):
        count = 0

        def apply_single(self, gradient, parameter, state):
            self.count += 1
            return parameter - gradient / self.count

    class Remembering(Own):
        def apply_single(self, gradient, parameter, state):
            self.last = gradient
            return parameter

    class InATuple(Own):
        def init_single(self, parameter, state):
            super().init_single(parameter, state)
            state["m"] = (0, "count")

        def apply_single(self, gradient, parameter, state):
            state["m"] = (state["m"][0] + 1, "count")
            return parameter

    for make, message in (
        (InATuple, r"changes 'w\.m\.0' of the optimizer's state, in a tuple"),
        (Growing, r"added 'w\.extra2' to its state in its second"),
        (Late, r"changed 'w\.seen' in its state to 'positive'"),
        (Counting, "Counting changes its attribute count in a step"),
        (Remembering, "Remembering changes its attribute last in a step"),
    ):
        optimizer, weights = make(), {"w": mx.ones(1)}
        for _ in range(2):
            with pytest.raises(TypeError, match=message):
                guarded_apply(optimizer, weights, weights, None, mx.array(True))
        assert set(optimizer.state["w"]) == {"m"}
        assert weights["w"].item() == 1
