"""The state of the wrappers: saved, copied, emptied, in other bits, and refused."""

import copy

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import pytest
from mlx.utils import tree_flatten, tree_map, tree_unflatten
from support.helpers import (
    INF,
    bits,
    gradients_like,
    multi,
    pickled,
    refused,
)
from support.optimizer_helpers import Training, decoded, moments_of, wrapped
from support.scaler_helpers import guarded_apply

from mlx_gradscale import GradScaler, LossScaleOptimizer, MasterWeightOptimizer

each_kind = pytest.mark.parametrize("state_bits", [32, 16, 8])


def flat(optimizer):
    return dict(tree_flatten(optimizer.state))


@pytest.mark.compiles
@each_kind
@pytest.mark.parametrize(
    ("when", "compiled"),
    [
        (when, compiled)
        for when in ("after steps", "before init")
        for compiled in (0, 1)
    ],
)
def test_saved_state_resumes_bit_identically(tmp_path, state_bits, when, compiled):
    norm = None if when == "before init" else 1.0
    options = {"max_grad_norm": norm, "compiled": compiled, "state_bits": state_bits}
    training = Training(**options)
    training.run(range(6), bad=(0, 4))
    state = flat(training.optimizer)
    mx.save_safetensors(str(tmp_path / "optimizer.safetensors"), state)
    saved = bits(state)
    training.model.save_weights(str(tmp_path / "model.safetensors"))
    training.run(range(6, 14), bad=(9,))

    again = Training(init=when != "before init", **options)
    state = again.optimizer.state
    if when == "after steps":
        again.run(range(3))
    again.model.load_weights(str(tmp_path / "model.safetensors"))
    # Flat or nested, in another order.
    loaded = dict(sorted(mx.load(str(tmp_path / "optimizer.safetensors")).items()))
    if when == "after steps":
        loaded = tree_unflatten(list(loaded.items())[::-1])
    again.optimizer.state = loaded
    assert bits(again.optimizer.state) == saved
    assert again.optimizer.step.item() == 4
    again.run(range(6, 14), bad=(9,))
    assert again.optimizer.state is state
    assert again.everything() == training.everything()
    if compiled and when == "after steps":
        assert again.traced.count == 1


@pytest.mark.parametrize("was", ["frozen", "float32"])
@each_kind
def test_parameter_without_a_master_weight_is_refused_until_init_again(was, state_bits):
    training = Training(compiled=False, init=False, state_bits=state_bits)
    optimizer, (layer, other) = training.optimizer, training.model.layers
    if was == "frozen":
        layer.freeze()
    else:
        layer.set_dtype(mx.float32)
    optimizer.init(training.model.trainable_parameters())
    layer.unfreeze().set_dtype(mx.float16)
    message = r"'layers\.0\.\w+' has no master weight"
    with refused(ValueError, message, training.model, optimizer):
        training.run([0])
    optimizer.init(training.model.trainable_parameters())
    training.run([0])
    layer.freeze()  # which is allowed at any time
    before = bits(layer.parameters()), bits(other.parameters())
    optimizer.update(training.model, gradients_like({"layers": [{}, other]}, 0))
    assert optimizer.step.item() == 2
    assert bits(layer.parameters()) == before[0]
    assert bits(other.parameters()) != before[1]


@each_kind
@pytest.mark.parametrize("copied", [copy.deepcopy, pickled])
def test_copied_optimizer_shares_no_state_with_the_original(copied, state_bits):
    optimizer = wrapped(optim.Adam(0.1), state_bits=state_bits)
    weights = {"w": mx.ones(2, mx.float16)}
    weights = optimizer.apply_gradients(weights, weights)
    state = copied(optimizer.state)
    assert type(state) is dict
    other = copied(optimizer)
    assert other.state["scaler"] is other.scaler.state
    assert other.state["optimizer"] is other.optimizer.state
    assert bits(other.state) == bits(optimizer.state) == bits(state)
    other.apply_gradients({"w": mx.array([INF, 1.0])}, weights)
    assert other.state["scaler"]["scale"].item() == 0.5
    assert optimizer.scaler.get_scale() == 1.0
    # The copy has a scaler of its own, so each may update by itself.
    optimizer.apply_gradients(weights, weights)
    assert optimizer.step.item() == 2


def check_refused(again, state, message):
    """Check that a state is refused at once or, if it is not known yet, by init()."""
    initialized = [again.optimizer, again.model] if again.is_initialized else []
    with refused((ValueError, TypeError), message, *initialized):
        again.optimizer.state = state
        again.optimizer.init(again.model.trainable_parameters())


BIAS = "layers.0.bias"


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (f"masters.{BIAS}", None, f"no array 'masters.{BIAS}'"),
        ("masters.x", mx.ones(1), "same model"),
        (f"masters.{BIAS}", mx.ones(3), "with shape"),
        ("scaler.scale", None, "scaler.scale"),
        ("scaler.scale", mx.ones(1), "scaler.scale"),
        ("optimizer.step", "three", "optimizer.step"),
    ],
)
@pytest.mark.parametrize("init", [True, False])
def test_bad_state_is_refused_and_changes_nothing(path, value, message, init):
    saved = Training(compiled=False)
    saved.run(range(2))
    state = flat(saved.optimizer) | {path: value}
    state = tree_unflatten([each for each in state.items() if each[1] is not None])
    check_refused(Training(compiled=False, init=init), state, message)


def test_state_of_another_number_of_optimizers_and_other_objects_are_refused():
    def multi(count):
        inner = [optim.SGD(0.1, momentum=0.9) for _ in range(count)]
        filters = [lambda path, _: path == "a"] * (count - 1)
        return wrapped(optim.MultiOptimizer(inner, filters))

    saved, optimizer = multi(3), multi(2)
    saved.init({"a": mx.ones(2), "b": mx.ones(2)})
    message = r"3 inner optimizers|contains 'optimizer\.states\.2"
    with refused(ValueError, message, optimizer):
        optimizer.state = flat(saved)
    for wrong in ([mx.ones(1)], "a path", None):
        with refused(TypeError, "must be a dict, got", optimizer):
            optimizer.state = wrong


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16])
@pytest.mark.parametrize("init", [False, True])
@pytest.mark.parametrize(("old", "new"), [(32, 16), (32, 8), (16, 8), (8, 16)])
def test_state_of_other_bits_is_refused_by_16_and_8_bits_and_changes_nothing(
    dtype, init, old, new
):
    saved = Training(dtype=dtype, compiled=False, state_bits=old)
    saved.run(range(2))
    again = Training(dtype=dtype, compiled=False, init=init, state_bits=new)
    message = rf"state_bits={old}, but .* state_bits={new}"
    check_refused(again, saved.optimizer.state, message)


@pytest.mark.compiles
@pytest.mark.parametrize("state_bits", [16, 8])
@pytest.mark.parametrize("dtype", [mx.float32, mx.float16])
@pytest.mark.parametrize(
    ("init", "compiled", "make"),
    [(False, False, multi), (True, False, multi), (True, True, lambda: None)],
)
def test_state_of_fewer_bits_loads_decoded_into_32_bits(
    dtype, init, compiled, make, state_bits
):
    saved = Training(make(), dtype, compiled=False, state_bits=state_bits)
    saved.run(range(3))
    weights = saved.model.parameters()
    masters = saved.optimizer.masters(weights)
    again = Training(make(), dtype, compiled=compiled, init=init)
    moments = decoded(saved.optimizer, Training(make()).optimizer.optimizer, weights)
    if compiled:
        again.run(range(2))
    again.model.update(weights)
    again.optimizer.state = flat(saved.optimizer)
    again.run([3], bad=(3,))  # a skipped step, which decodes only
    assert bits(again.optimizer.masters(again.model.parameters())) == bits(masters)
    found, expected = (
        [box for _, box in moments_of(x)] for x in (again.optimizer.optimizer, moments)
    )
    assert bits(found) == bits(expected)
    assert "remainders" not in dict(again.optimizer.state)
    again.run(range(4, 6))
    assert again.optimizer.step.item() == 5


@pytest.mark.compiles
@pytest.mark.parametrize(("empty", "compiled"), [({}, False), ({}, True), ([], False)])
@each_kind
def test_emptied_state_can_be_restored_and_resumes(empty, state_bits, compiled):
    """As a trainer may do to free memory around an evaluation or a preview."""
    found = []
    for emptied in (False, True):
        training = Training(compiled=compiled, max_grad_norm=1.0, state_bits=state_bits)
        training.run(range(3))
        if emptied:
            state = training.optimizer.state
            training.optimizer.state = empty
            assert not [x for x in flat(training.optimizer).values() if x.ndim]
        training.optimizer.max_grad_norm = 5.0  # a setting, which stays
        if emptied:
            training.optimizer.state = state
            assert training.optimizer.state is state
        training.run(range(3, 6))
        found.append(training.everything())
    assert found[0] == found[1]


@pytest.mark.parametrize("is_emptied", [False, True])
def test_state_that_was_loaded_before_init_is_replaced_by_the_next(is_emptied):
    weights = {"w": mx.ones(2, mx.float16)}
    wrong, right, optimizer = (wrapped(optim.Adam(0.1)) for _ in range(3))
    wrong.init({"x": mx.ones(3, mx.float16)})
    right.init(weights)
    if not is_emptied:
        right.apply_gradients(weights, weights)
    optimizer.state = flat(wrong)
    optimizer.state = {} if is_emptied else flat(right)
    optimizer.init(weights)
    assert bits(optimizer.state) == bits(right.state)


def test_state_of_an_earlier_version_without_a_setting_takes_its_default():
    optimizer = wrapped(optim.Adam(0.1))
    optimizer.init({"w": mx.ones(2)})
    state = flat(optimizer)
    del state["scaler.min_scale"], state["scaler.skipped_steps"]
    other = LossScaleOptimizer(optim.Adam(0.1), GradScaler(min_scale=1.0))
    other.state = state
    assert other.scaler.state["min_scale"].item() == 2.0**-64


@pytest.mark.compiles
def test_state_may_be_passed_through_a_pure_compiled_function():
    """As in MLX's own tests of its optimizers."""
    weights = {"w": mx.ones(4, mx.float16)}
    gradients = [gradients_like(weights, seed) for seed in range(4)]
    gradients[2]["w"][0] = INF
    first, second = (wrapped(optim.Adam(0.1)) for _ in range(2))
    for optimizer in (first, second):
        optimizer.init(weights)

    @mx.compile
    def pure(grads, parameters, state):
        first.state = state
        parameters = first.apply_gradients(grads, parameters)
        return parameters, first.state

    state, parameters, expected = tree_map(mx.array, first.state), weights, weights
    for grads in gradients:
        parameters, state = pure(grads, parameters, state)
        expected = second.apply_gradients(grads, expected)
    assert bits([parameters, state]) == bits([expected, second.state])
    assert state["scaler"]["skipped_steps"].item() == 1


def test_plain_state_in_half_precision_becomes_float32_at_the_first_step():
    weights = {"w": mx.ones(2, mx.float16)}
    plain, inner = optim.Adam(0.1), optim.Adam(0.1)
    for each in (plain, inner):
        each.init(weights)
    guarded_apply(inner, weights, weights)
    optimizer = wrapped(optim.Adam(0.1))
    with refused(ValueError, r"no array 'scaler\.scale'", optimizer):
        optimizer.state = plain.state
    optimizer.optimizer.state = plain.state  # which is the inner optimizer's
    optimizer.apply_gradients(weights, weights)
    assert optimizer.step.item() == 1
    for state in (inner.state, optimizer.state["optimizer"]):
        assert state["w"]["m"].dtype == mx.float32


@each_kind
def test_parameters_named_as_the_states_of_a_multi_optimizer_are_saved(state_bits):
    model = nn.Module()
    model.states = [nn.Linear(2, 2), nn.Linear(2, 2)]
    gradients = tree_map(mx.ones_like, model.trainable_parameters())
    first, second = (
        MasterWeightOptimizer(optim.Adam(1e-3), state_bits=state_bits) for _ in range(2)
    )
    first.update(model, gradients)
    second.state = flat(first)
    assert bits(second.state) == bits(first.state)
    second.state = {}
    second.update(model, gradients)
    assert second.step.item() == 2
