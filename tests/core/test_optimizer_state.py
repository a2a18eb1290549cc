"""``LossScaleOptimizer``: its state, and bad input."""

import copy

import mlx.core as mx
import mlx.optimizers as optim
import pytest
from mlx.utils import tree_flatten, tree_map, tree_unflatten
from support.helpers import INF, Mlp, batch, bits, gradients_like, multi, pickled
from support.optimizer_helpers import (
    Training,
    loop_of,
    moments_of,
    wrapped,
)
from support.scaler_helpers import guarded_apply

from mlx_gradscale import GradScaler, LossScaleOptimizer
from mlx_gradscale.core.state import STORAGES

# How the state is stored.
each_form = pytest.mark.parametrize(
    "form",
    [{"state_bits": state_bits} for state_bits in (32, 16, 8)],
    ids=["32", "16", "8"],
)


@pytest.mark.compiles
@each_form
@pytest.mark.parametrize(
    ("when", "compiled"),
    [("after steps", True), ("before init", False), ("before init", True)],
)
def test_saved_state_resumes_bit_identically(tmp_path, form, when, compiled):
    norm = None if when == "before init" else 1.0
    options = form | {"max_grad_norm": norm, "compiled": compiled}
    training = Training(**options)
    training.run(range(6), bad=(0, 4))
    state = dict(tree_flatten(training.optimizer.state))
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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((1e-3,), "Expected an mlx.optimizers"),
        ((optim.AdamW,), "Expected an mlx.optimizers"),
        ((LossScaleOptimizer(optim.SGD(0.1)),), "cannot be wrapped"),
        ((optim.MultiOptimizer([wrapped()], []),), "Wrap the MultiOptimizer"),
        ((optim.SGD(0.1), 65536.0), "must be a GradScaler"),
    ],
)
def test_loss_scale_optimizer_wraps_only_unwrapped_mlx_optimizers(arguments, message):
    with pytest.raises(TypeError, match=message):
        LossScaleOptimizer(*arguments)


@pytest.mark.parametrize("was", ["frozen", "float32"])
@pytest.mark.parametrize("state_bits", [32, 16, 8])
def test_parameter_without_a_master_weight_is_refused_until_init_again(was, state_bits):
    training = Training(compiled=False, init=False, state_bits=state_bits)
    optimizer, (layer, other) = training.optimizer, training.model.layers
    if was == "frozen":
        layer.freeze()
    else:
        layer.set_dtype(mx.float32)
    optimizer.init(training.model.trainable_parameters())
    layer.unfreeze().set_dtype(mx.float16)
    before = training.everything()
    with pytest.raises(ValueError, match=r"'layers\.0\.\w+' has no master weight"):
        training.run([0])
    assert training.everything() == before
    optimizer.init(training.model.trainable_parameters())
    training.run([0])
    layer.freeze()  # which is allowed at any time
    before = bits(layer.parameters()), bits(other.parameters())
    optimizer.update(training.model, gradients_like({"layers": [{}, other]}, 0))
    assert optimizer.step.item() == 2
    assert bits(layer.parameters()) == before[0]
    assert bits(other.parameters()) != before[1]


@each_form
@pytest.mark.parametrize("copied", [copy.deepcopy, pickled])
def test_copied_optimizer_shares_no_state_with_the_original(copied, form):
    optimizer = wrapped(optim.Adam(0.1), **form)
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
        *[(None, x, "must be a dict, got") for x in ([mx.ones(1)], "a path", None)],
    ],
)
@pytest.mark.parametrize("is_initialized", [True, False])
def test_bad_state_is_refused_and_changes_nothing(path, value, message, is_initialized):
    saved = Training(compiled=False)
    saved.run(range(2))
    state = dict(tree_flatten(saved.optimizer.state)) | {path: value}
    state = {path: x for path, x in state.items() if x is not None}
    state = value if path is None else tree_unflatten(list(state.items()))
    again = Training(compiled=False, init=is_initialized)
    before = again.everything()

    def load():
        again.optimizer.state = state
        again.optimizer.init(again.model.trainable_parameters())

    with pytest.raises((ValueError, TypeError), match=message):
        load()
    assert not is_initialized or again.everything() == before


@pytest.mark.compiles
@pytest.mark.parametrize(("empty", "compiled"), [({}, False), ({}, True), ([], False)])
@each_form
def test_emptied_state_can_be_restored_and_resumes(empty, form, compiled):
    """As a trainer may do to free memory around an evaluation or a preview."""
    found = []
    for emptied in (False, True):
        training = Training(compiled=compiled, max_grad_norm=1.0, **form)
        training.run(range(3))
        if emptied:
            state = training.optimizer.state
            training.optimizer.state = empty
            left = tree_flatten(training.optimizer.state)
            assert not [path for path, x in left if x.ndim]
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
    optimizer.state = dict(tree_flatten(wrong.state))
    optimizer.state = {} if is_emptied else dict(tree_flatten(right.state))
    optimizer.init(weights)
    assert bits(optimizer.state) == bits(right.state)


def test_state_of_another_number_of_optimizers_is_refused():
    def multi(count):
        inner = [optim.SGD(0.1, momentum=0.9) for _ in range(count)]
        filters = [lambda path, _: path == "a"] * (count - 1)
        return wrapped(optim.MultiOptimizer(inner, filters))

    saved, optimizer = multi(3), multi(2)
    saved.init({"a": mx.ones(2), "b": mx.ones(2)})
    before = bits(optimizer.state)
    with pytest.raises(ValueError, match=r"contains 'optimizer\.states\.2\.step'"):
        optimizer.state = dict(tree_flatten(saved.state))
    assert bits(optimizer.state) == before


@pytest.mark.compiles
@pytest.mark.parametrize("kind", ["wrapper", "scaler"])
def test_inner_state_with_its_keys_in_another_order_resumes_in_an_eager_loop(kind):
    def train(is_reordered):
        mx.random.seed(0)
        model, inner = Mlp(), optim.Adam(0.1)
        _, loss_and_grad, update = loop_of(kind, model, inner, GradScaler(8.0))
        for i in range(6):
            if i == 3 and is_reordered:
                # Only m and v change places, so all shapes keep their order.
                layers = [
                    {k: dict(reversed(x.items())) for k, x in layer.items()}
                    for layer in inner.state["layers"]
                ]
                inner.state = {**inner.state, "layers": layers}
            update(model, loss_and_grad(*batch(i))[1])
        return bits(model.parameters())

    assert train(False) == train(True)


def test_state_of_an_earlier_version_without_a_setting_takes_its_default():
    optimizer = wrapped(optim.Adam(0.1))
    optimizer.init({"w": mx.ones(2)})
    state = dict(tree_flatten(optimizer.state))
    del state["scaler.min_scale"], state["scaler.skipped_steps"]
    other = LossScaleOptimizer(optim.Adam(0.1), GradScaler(min_scale=1.0))
    other.state = state
    assert other.scaler.state["min_scale"].item() == 2.0**-64


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
    masters = saved.optimizer.masters(saved.model.parameters())
    decode = STORAGES[state_bits].decode
    moments = [decode(*each) for each in moments_of(saved.optimizer.optimizer)]
    again = Training(make(), dtype, compiled=compiled, init=init)
    if compiled:
        again.run(range(2))
    again.model.update(saved.model.parameters())
    again.optimizer.state = dict(tree_flatten(saved.optimizer.state))
    again.run([3], bad=(3,))  # a skipped step, which decodes only
    found = again.optimizer.masters(again.model.parameters())
    assert bits(found) == bits(masters)
    found = [box for _, box in moments_of(again.optimizer.optimizer)]
    assert bits(found) == bits(moments)
    assert "remainders" not in dict(again.optimizer.state)
    again.run(range(4, 6))
    assert again.optimizer.step.item() == 5


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16])
@pytest.mark.parametrize("is_initialized", [False, True])
@pytest.mark.parametrize(("old", "new"), [(32, 16), (32, 8), (16, 8), (8, 16)])
def test_state_of_other_bits_is_refused_by_16_and_8_bits_and_changes_nothing(
    dtype, is_initialized, old, new
):
    saved, again = (
        Training(dtype=dtype, compiled=False, init=init, state_bits=state_bits)
        for init, state_bits in ((True, old), (is_initialized, new))
    )
    saved.run(range(2))
    before = again.everything()

    def load():
        again.optimizer.state = saved.optimizer.state
        again.optimizer.init(again.model.trainable_parameters())

    with pytest.raises(ValueError, match=rf"state_bits={old}, but .* state_bits={new}"):
        load()
    assert not is_initialized or again.everything() == before


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
    assert bits(parameters) == bits(expected)
    assert bits(state) == bits(second.state)
    assert state["scaler"]["skipped_steps"].item() == 1


def test_plain_state_in_half_precision_becomes_float32_at_the_first_step():
    weights = {"w": mx.ones(2, mx.float16)}
    plain, inner = optim.Adam(0.1), optim.Adam(0.1)
    for each in (plain, inner):
        each.init(weights)
    guarded_apply(inner, weights, weights)
    optimizer = wrapped(optim.Adam(0.1))
    with pytest.raises(ValueError, match=r"no array 'scaler\.scale'"):
        optimizer.state = plain.state
    optimizer.optimizer.state = plain.state  # which is the inner optimizer's
    optimizer.apply_gradients(weights, weights)
    assert optimizer.step.item() == 1
    for state in (inner.state, optimizer.state["optimizer"]):
        assert state["w"]["m"].dtype == mx.float32
