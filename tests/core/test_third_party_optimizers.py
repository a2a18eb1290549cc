"""Third-party optimizers: exact outside of ``mx.compile``; inside, right or refused."""

import copy

import mlx.core as mx
import mlx.optimizers as optim
import pytest
from mlx.utils import tree_flatten, tree_unflatten
from support.helpers import bits, pickled, refused
from support.optimizer_helpers import check_beside_bare
from support.packed_moments import PackedAdamW
from support.scaler_helpers import guarded_apply

from mlx_gradscale import LossScaleOptimizer, MasterWeightOptimizer


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
        state["calls"] = (0, "count")

    def apply_single(self, gradient, parameter, state):
        state["calls"] = (state["calls"][0] + 1, "count")
        share = 1.0 / state["calls"][0]
        state["m"] = (1 - share) * state["m"] + share * gradient
        return parameter - self.learning_rate * state["m"]


class KeyFromGradients(Own):
    def apply_single(self, gradient, parameter, state):
        if "v" not in state:
            state["v"] = mx.square(gradient)
            return parameter
        step = gradient / mx.maximum(mx.sqrt(state["v"]), 1e-3)
        state["v"] = 0.9 * state["v"] + 0.1 * mx.square(gradient)
        return parameter - self.learning_rate * step


class FlagForAll(Own):
    def __init__(self):
        super().__init__()
        self.state["begun"] = False
        self.state["states"] = [mx.array(0.0)]  # not those of a MultiOptimizer

    def apply_gradients(self, gradients, parameters):
        new = super().apply_gradients(gradients, parameters)
        self.state["begun"] = True
        return new

    def apply_single(self, gradient, parameter, state):
        old = state["m"] if self.state["begun"] else gradient
        state["m"] = 0.9 * old + 0.1 * gradient
        return parameter - self.learning_rate * state["m"]


class CountInAttribute(Own):
    count = 0

    def apply_single(self, gradient, parameter, state):
        self.count += 1
        return parameter - self.learning_rate * gradient / self.count


class KeysComeAndGo(Own):
    def apply_single(self, gradient, parameter, state):
        old = state.pop("m", None)
        state.pop("n", None)
        state["m" if old is None else "n"] = gradient
        return parameter - self.learning_rate * gradient


class SingularValue(Own):
    """Arrays under stable keys, and an SVD, which raises for NaN."""

    def apply_single(self, gradient, parameter, state):
        size = mx.linalg.svd(mx.diag(gradient.reshape(-1)[:2]), stream=mx.cpu)[1]
        state["m"] = state["m"] + size[0] * gradient
        return parameter - self.learning_rate * state["m"]


class Around(optim.Optimizer):
    """It steps another optimizer, whose state is not its own."""

    def __init__(self):
        super().__init__()
        self.inner = optim.Adam(0.1)

    def init(self, parameters):
        self.inner.init(parameters)
        super().init(parameters)

    def init_single(self, parameter, state):
        pass

    def apply_gradients(self, gradients, parameters):
        self.state["step"] = self.step + 1
        return self.inner.apply_gradients(gradients, parameters)


class InPlace(Own):
    """Arrays under stable keys, so that it can be compiled."""

    def apply_single(self, gradient, parameter, state):
        gradient *= 2
        state["m"] *= 0.9
        state["m"] += gradient
        parameter -= self.learning_rate * state["m"]
        return parameter


class Quantized(PackedAdamW):
    group_size, smallest = 32, 128

    def __init__(self):
        super().__init__(0.1)


# What is not arrays under stable keys works only outside of mx.compile.
REFUSED = [NumberInState, KeyFromGradients, FlagForAll, KeysComeAndGo]
KINDS = [*REFUSED, CountInAttribute, Around, InPlace, SingularValue, Quantized]


@pytest.mark.parametrize("bad", [(), (0, 3), (0, 1, 2)], ids=str)
@pytest.mark.parametrize("make", KINDS)
def test_eager_step_of_any_optimizer_is_exact_with_skips_in_the_first_steps(make, bad):
    check_beside_bare(make, False, bad, columns=32 if make is Quantized else 6)


@pytest.mark.compiles
@pytest.mark.parametrize("make", [InPlace, SingularValue, *REFUSED])
def test_compiled_step_is_right_with_stable_state_keys_and_refused_without(make):
    if make in REFUSED:
        message = f"{make.__name__} .*changes .*Do not compile"
        with pytest.raises(TypeError, match=message):
            check_beside_bare(make, True, bad=())
    else:
        check_beside_bare(make, True, bad=(0, 3))


@pytest.mark.compiles
def test_third_party_optimizer_is_never_compiled_implicitly():
    class Scaled(optim.SGD):
        by = 1.0

        def apply_single(self, gradient, parameter, state):
            return super().apply_single(gradient * self.by, parameter, state)

    optimizer, weights = Scaled(1.0), {"w": mx.zeros(1)}
    for by, expected in ((1.0, -1), (1.0, -2), (1.0, -3), (100.0, -103)):
        Scaled.by = by
        weights = guarded_apply(optimizer, {"w": mx.ones(1)}, weights)
        assert weights["w"].item() == expected


def test_schedule_is_called_and_random_numbers_are_drawn_only_for_applied_steps():
    class Noisy(optim.SGD):
        def apply_single(self, gradient, parameter, state):
            return parameter + mx.random.normal(parameter.shape)

    def schedule(step):
        asked.append(step.item())
        return mx.array(0.1)

    asked = []
    optimizer, weights = Noisy(schedule), {"w": mx.zeros(1)}
    guarded_apply(optimizer, weights, weights)
    asked.clear()
    mx.random.seed(3)
    expected = [mx.random.normal((1,)).item() for _ in range(3)]
    mx.random.seed(3)
    pattern = (True, False, True, False, True)
    new = [guarded_apply(optimizer, weights, weights, ok) for ok in pattern]
    assert [tree["w"].item() for tree in new[::2]] == expected
    assert len(asked) == 3


def test_overrides_that_a_step_would_not_call_are_refused():
    class Clipping(optim.SGD):
        def update(self, model, gradients):
            super().update(model, gradients)

    class Ten(optim.MultiOptimizer):
        def apply_gradients(self, gradients, parameters):
            return super().apply_gradients(gradients, parameters)

    assigned, inputs = optim.SGD(0.1), ({"w": mx.ones(2)}, {"w": mx.ones(2)})
    assigned.update = lambda model, gradients: None
    for one in (Clipping(0.1), assigned):
        for optimizer in (one, optim.MultiOptimizer([one], [])):
            with pytest.raises(TypeError, match=r"overrides update\(\)"):
                guarded_apply(optimizer, *inputs)
            with pytest.raises(TypeError, match=r"overrides update\(\)"):
                LossScaleOptimizer(optimizer)
    with pytest.raises(TypeError, match=r"overrides apply_gradients"):
        guarded_apply(Ten([optim.SGD(0.1)], []), *inputs)


def test_state_with_arrays_in_a_tuple_is_refused():
    class InATuple(Own):
        def init_single(self, parameter, state):
            state["mv"] = (mx.zeros_like(parameter), mx.zeros_like(parameter))

    with pytest.raises(TypeError, match=r"stores 'w\.mv\.0' in a tuple"):
        guarded_apply(InATuple(), {"w": mx.ones(2)}, {"w": mx.ones(2)})


def test_optimizer_that_raises_leaves_parameters_and_state_unchanged():
    class Failing(Own):
        fails = False

        def apply_single(self, gradient, parameter, state):
            state["m"] += 1  # in place
            if self.fails:
                state["late"] = gradient
                raise FloatingPointError
            return parameter - gradient

    optimizer, weights = MasterWeightOptimizer(Failing()), {"w": mx.ones(2)}
    weights = optimizer.apply_gradients(weights, weights)
    optimizer.optimizer.fails = True
    with refused(FloatingPointError, None, weights, optimizer):
        optimizer.apply_gradients({"w": mx.full((2,), 2.0)}, weights)


def test_master_weights_are_float32_even_if_the_optimizer_returns_float16():
    class Narrow(Own):
        def apply_single(self, gradient, parameter, state):
            return (parameter - gradient).astype(mx.float16)

    optimizer, weights = MasterWeightOptimizer(Narrow()), {"w": mx.ones(2, mx.bfloat16)}
    new = optimizer.apply_gradients(weights, weights)
    assert optimizer.state["masters"]["w"].dtype == mx.float32
    assert new["w"].dtype == mx.bfloat16


def test_parameter_added_later_gets_its_own_first_step():
    optimizer, weights = KeyFromGradients(), {"a": mx.ones(1)}
    for i in range(4):
        if i == 2:
            weights |= {"b": mx.ones(1)}
            optimizer.init(weights)
        gradients = {path: mx.full((1,), 1.0 + i) for path in weights}
        weights = guarded_apply(optimizer, gradients, weights, i != 2)
    # Steps 0, 1 and 3 of a, of which the first only squares; for b that is step 3.
    assert weights["a"].item() == pytest.approx(1 - 0.1 * (2 + 4 / 1.3**0.5), rel=1e-6)
    assert weights["b"].item() == 1
    assert optimizer.state["b"]["v"].item() == 16


# A list in a flattened state ends at its last array, and these end with a frozen layer.
WEIGHTS = {"layers": [mx.ones(2), mx.ones(2), mx.ones(2)]}


def gradients(*values):
    return {"layers": [{}, mx.array(values), {}]}


def loaded(optimizer, has_stepped=False):
    other = MasterWeightOptimizer(type(optimizer.optimizer)())
    if has_stepped:
        other.apply_gradients(gradients(5.0, 6.0), WEIGHTS)
    other.state = tree_unflatten(tree_flatten(optimizer.state))
    return other


COPIES = [copy.deepcopy, pickled, loaded, lambda x: loaded(x, has_stepped=True)]


@pytest.mark.parametrize("copied", COPIES)
@pytest.mark.parametrize("make", [NumberInState, KeyFromGradients])
def test_copied_or_saved_third_party_optimizer_steps_like_the_original(make, copied):
    optimizer = MasterWeightOptimizer(make())
    for _ in range(2):
        optimizer.apply_gradients(gradients(0.5, -1.0), WEIGHTS)
    other, found = copied(optimizer), []
    for each in (other, optimizer):
        for i in range(3):
            new = each.apply_gradients(gradients(1.0 + i, -1.0), WEIGHTS)
        found.append(bits(new))
    assert found[0] == found[1]
    assert repr(other.optimizer.state) == repr(optimizer.optimizer.state)
