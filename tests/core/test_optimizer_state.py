"""``LossScaleOptimizer``: its state, and bad input."""

import subprocess
import sys
import textwrap
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import pytest
from mlx.utils import tree_flatten, tree_map, tree_unflatten
from support.helpers import (
    INF,
    NAN,
    OPTIMIZERS,
    Mlp,
    batch,
    bits,
    gradients_like,
    mse,
    same,
)
from support.optimizer_helpers import Training, wrapped

from mlx_gradscale import GradScaler, LossScaleOptimizer

pytestmark = pytest.mark.core

# State


def save(optimizer, path):
    mx.save_safetensors(str(path), dict(tree_flatten(optimizer.state)))


def load(optimizer, path):
    optimizer.state = tree_unflatten(list(mx.load(str(path)).items()))


@pytest.mark.parametrize(
    "inner",
    [
        lambda: optim.AdamW(optim.cosine_decay(1e-2, 200)),
        lambda: optim.MultiOptimizer(
            [optim.Muon(0.02), optim.Adam(1e-2)], [lambda p, w: w.ndim == 2]
        ),
    ],
    ids=["AdamW", "MultiOptimizer"],
)
@pytest.mark.parametrize("when", ["compiled before", "init after", "no init"])
def test_saved_state_resumes_bit_for_bit(tmp_path, inner, when):
    training = Training(inner(), max_grad_norm=1.0)
    training.run(range(10), bad=(4,))
    save(training.optimizer, tmp_path / "optimizer.safetensors")
    training.model.save_weights(str(tmp_path / "model.safetensors"))
    training.run(range(10, 60), bad=(30,))

    again = Training(inner(), max_grad_norm=1.0, init=when == "compiled before")
    state = again.optimizer.state
    if when == "compiled before":
        again.run(range(3))
    again.model.load_weights(str(tmp_path / "model.safetensors"))
    load(again.optimizer, tmp_path / "optimizer.safetensors")
    if when == "init after":
        again.optimizer.init(again.model.trainable_parameters())
    again.run(range(10, 60), bad=(30,))
    assert again.optimizer.state is state
    assert again.everything() == training.everything()
    # Without init the first call makes the state, and the second sees more arrays.
    assert again.traced.count == (2 if when == "no init" else 1)


def muon_and_adafactor():
    return optim.MultiOptimizer(
        [optim.Muon(0.02), optim.Adafactor(1e-3)], [lambda path, x: x.ndim == 2]
    )


@pytest.mark.parametrize(
    "make",
    [OPTIMIZERS["AdamW corrected"], OPTIMIZERS["Lion"], muon_and_adafactor],
    ids=["AdamW", "Lion", "Muon and Adafactor"],
)
def test_an_eager_loop_resumes_exactly(make, tmp_path):
    mx.random.seed(4)
    weights = {"a": mx.random.normal((33, 17)), "b": mx.random.normal((33,))}
    weights = tree_map(lambda x: x.astype(mx.float16), weights)

    def go_on(optimizer, weights, seeds):
        for seed in seeds:
            gradients = gradients_like(weights, seed, dtype=mx.float16)
            weights = optimizer.apply_gradients(gradients, weights)
        return weights

    first, second = wrapped(make()), wrapped(make())
    middle = go_on(first, weights, range(3))
    save(first, tmp_path / "state.safetensors")
    second.init(middle)
    load(second, tmp_path / "state.safetensors")
    ends = [go_on(each, middle, range(3, 8)) for each in (first, second)]
    assert same(*ends)
    assert bits(first.state) == bits(second.state)


def test_state_resumes_in_a_fresh_process(tmp_path):
    script = textwrap.dedent(
        """
        import sys
        import mlx.core as mx
        from mlx.utils import tree_flatten, tree_unflatten
        from test_optimizer_state import Training, load, save
        folder, first, last = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
        training = Training()
        if first:
            training.model.load_weights(folder + "/model.safetensors")
            load(training.optimizer, folder + "/optimizer.safetensors")
        training.run(range(first, last))
        training.model.save_weights(folder + "/model.safetensors")
        save(training.optimizer, folder + "/optimizer.safetensors")
        """
    )
    for first, last in ((0, 10), (10, 60)):
        subprocess.run(
            [sys.executable, "-c", script, str(tmp_path), str(first), str(last)],
            check=True,
            cwd=Path(__file__).parent,
            timeout=300,
        )
    training = Training()
    training.run(range(60))
    saved = mx.load(str(tmp_path / "optimizer.safetensors"))
    assert bits(saved) == bits(dict(tree_flatten(training.optimizer.state)))
    saved = mx.load(str(tmp_path / "model.safetensors"))
    assert bits(saved) == bits(dict(tree_flatten(training.model.parameters())))


def test_learning_rate_and_step_are_read_and_set():
    training = Training(optim.SGD(0.5))
    assert training.optimizer.learning_rate.item() == 0.5
    training.run([0])
    training.optimizer.learning_rate = 0.0
    before = bits(training.model.parameters())
    training.run([1])
    assert bits(training.model.parameters()) == before
    assert training.optimizer.step.item() == 2
    assert training.traced.count == 1


def test_a_disabled_scaler_leaves_masters_and_the_inner_optimizer():
    optimizer = LossScaleOptimizer(optim.SGD(1.0), GradScaler(enabled=False))
    loss_fn = optimizer.scale_loss(lambda w: w)
    assert loss_fn(mx.array(2.0)).item() == 2.0
    new = optimizer.apply_gradients({"w": mx.array([INF])}, {"w": mx.array([1.0])})
    assert new["w"].item() == -INF


# Bad input


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((1e-3,), "Expected an optimizer"),
        ((optim.AdamW,), "Expected an optimizer"),
        ((LossScaleOptimizer(optim.SGD(0.1)),), "already"),
        ((optim.SGD(0.1), 65536.0), "must be a GradScaler"),
    ],
)
def test_what_cannot_be_wrapped_is_refused(arguments, message):
    with pytest.raises(TypeError, match=message):
        LossScaleOptimizer(*arguments)


def test_arguments_of_the_inner_optimizer_are_refused():
    with pytest.raises(TypeError, match=r"no argument weight_decay.* optimizer inside"):
        LossScaleOptimizer(optim.AdamW(1e-3), weight_decay=0.1)
    with pytest.raises(TypeError, match=r"GradScaler\(init_scale=\.\.\.\)"):
        LossScaleOptimizer(optim.AdamW(1e-3), init_scale=2.0)


def test_update_wants_a_model():
    with pytest.raises(TypeError, match="takes a model first, got dict"):
        wrapped().update({"w": mx.ones(1)}, Mlp())


@pytest.mark.parametrize("value", [0, -1.0, NAN, True, "1"])
def test_a_max_grad_norm_that_is_none_is_refused(value):
    with pytest.raises(ValueError, match="max_grad_norm must be a positive"):
        wrapped(max_grad_norm=value)


def test_a_wrapped_optimizer_inside_another_is_refused():
    nested = optim.MultiOptimizer([wrapped(), optim.SGD(0.1)], [lambda *_: True])
    with pytest.raises(TypeError, match="only once, outermost"):
        LossScaleOptimizer(nested)


def test_two_optimizers_do_not_share_a_scaler():
    first = wrapped()
    with pytest.raises(ValueError, match="belongs to another"):
        LossScaleOptimizer(optim.SGD(0.1), first.scaler)


def test_a_scaler_does_not_step_a_wrapped_optimizer():
    scaler = GradScaler()
    scaler.scale(mx.array(1.0))
    with pytest.raises(TypeError, match="has a scaler of its own"):
        scaler.step(wrapped(), Mlp(), {})


def test_forgetting_to_scale_the_loss_is_refused():
    model, optimizer = Mlp(), LossScaleOptimizer(optim.SGD(0.1))
    _, gradients = nn.value_and_grad(model, mse(model))(*batch())
    with pytest.raises(RuntimeError, match="never scaled a loss"):
        optimizer.update(model, gradients)


def freeze_first():
    training = Training()
    training.model.layers[0].freeze()
    training.optimizer = wrapped()
    training.optimizer.init(training.model.trainable_parameters())
    return training


def test_parameters_added_later_or_frozen_before_are_named():
    training = freeze_first()
    training.model.layers[0].unfreeze()
    gradients = gradients_like(training.model.trainable_parameters(), 0)
    before = training.everything()
    with pytest.raises(ValueError, match=r"'layers\.0\.bias' was not there"):
        training.optimizer.update(training.model, gradients)
    assert training.everything() == before


def test_parameters_removed_later_are_named():
    training = Training()
    del training.model.layers[1]["bias"]
    gradients = gradients_like(training.model.trainable_parameters(), 0)
    with pytest.raises(ValueError, match=r"'layers\.1\.bias' is gone"):
        training.optimizer.update(training.model, gradients)


def test_a_gradient_for_a_parameter_frozen_later_is_refused():
    training = Training()
    gradients = gradients_like(training.model.trainable_parameters(), 0)
    training.model.layers[0].freeze()
    with pytest.raises(
        ValueError, match=r"'layers\.0\.(weight|bias)', which is frozen"
    ):
        training.optimizer.update(training.model, gradients)


def test_a_parameter_that_became_half_after_init_is_named_until_init_again():
    optimizer = wrapped(optim.SGD(1.0))
    optimizer.init({"w": mx.ones(2)})
    half = {"w": mx.ones(2, mx.float16)}
    with pytest.raises(ValueError, match=r"'w' became .*float16"):
        optimizer.apply_gradients(half, half)
    optimizer.init(half)
    optimizer.apply_gradients(half, half)
    assert set(optimizer.state["masters"]) == {"w"}


def test_parameters_that_come_later_train_after_init_again():
    optimizer = wrapped(optim.Adam(0.1))
    optimizer.init({"a": mx.ones(1)})
    both = {"a": mx.ones(1), "b": mx.ones(1)}
    optimizer.init(both)
    new = optimizer.apply_gradients(both, both)
    assert new["b"].item() < 1


def test_copies_have_one_state_of_their_own():
    import copy
    import pickle

    for copied in (copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))):
        optimizer = wrapped(optim.Adam(0.1))
        weights = {"w": mx.ones(2, mx.float16)}
        weights = optimizer.apply_gradients(weights, weights)
        other = copied(optimizer)
        assert other.state["scaler"] is other.scaler.state
        assert other.state["optimizer"] is other.optimizer.state
        assert bits(other.state) == bits(optimizer.state)
        other.apply_gradients({"w": mx.array([INF, 1.0])}, weights)
        assert other.state["scaler"]["scale"].item() == 0.5
        assert optimizer.scaler.get_scale() == 1.0


def test_freezing_later_is_allowed():
    training = Training()
    training.model.layers[0].freeze()
    gradients = gradients_like(training.model.trainable_parameters(), 0)
    training.optimizer.update(training.model, gradients)
    assert training.optimizer.step.item() == 1


def spoil(state, path, value):
    state[path] = value
    return state


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda s: s.pop("masters.layers.0.weight"),
            "has no 'masters.layers.0.weight'",
        ),
        (lambda s: spoil(s, "masters.x", mx.ones(1)), "another model"),
        (lambda s: spoil(s, "masters.layers.0.bias", mx.ones(3)), "of shape"),
        (
            lambda s: spoil(s, "masters.layers.0.bias", mx.full((16,), NAN)),
            "'masters.layers.0.bias' in the state holds NaN",
        ),
        (
            lambda s: spoil(s, "optimizer.layers.1.bias.v", mx.array([INF])),
            "'optimizer.layers.1.bias.v' in the state holds NaN",
        ),
        (lambda s: spoil(s, "scaler.scale", mx.array(0.0)), "scale must be positive"),
        (lambda s: s.clear(), "state of a plain optimizer"),
    ],
)
def test_a_bad_state_is_refused_and_changes_nothing(change, message):
    training = Training()
    training.run(range(2))
    state = dict(tree_flatten(training.optimizer.state))
    change(state)
    before = training.everything()
    with pytest.raises((ValueError, TypeError), match=message):
        training.optimizer.state = tree_unflatten(list(state.items()))
    assert training.everything() == before


def test_a_state_of_another_model_set_before_init_is_refused_every_time():
    other = wrapped(optim.Adam(0.1))
    other.init({"x": mx.ones(3)})
    optimizer = wrapped(optim.Adam(0.1))
    optimizer.state = other.state
    weights = {"w": mx.ones(1)}
    for _ in range(2):
        with pytest.raises(ValueError, match=r"another model|has no"):
            optimizer.apply_gradients(weights, weights)


def test_a_state_that_init_refuses_leaves_nothing_behind():
    other = wrapped(optim.Adam(0.1), scale=4.0)
    other.init({"x": mx.ones(3, mx.float16)})
    optimizer = wrapped(optim.Adam(0.1), scale=1024.0)
    before = bits(optimizer.state)
    optimizer.state = other.state
    with pytest.raises(ValueError, match=r"another model|has no"):
        optimizer.init({"w": mx.ones(2, mx.float16)})
    assert bits(optimizer.state) == before


@pytest.mark.parametrize("name", ["scale", "growth_interval"])
def test_a_field_that_the_scaler_lacks_is_named(name):
    optimizer = wrapped()
    state = dict(tree_flatten(optimizer.state))
    value = state.pop(f"scaler.{name}")
    with pytest.raises(ValueError, match=f"it has no 'scaler.{name}'"):
        optimizer.state = tree_unflatten(list(state.items()))
    state |= {f"scaler.{name}": value, "scaler.other": value}
    with pytest.raises(ValueError, match=r"it has 'scaler\.other'"):
        optimizer.state = tree_unflatten(list(state.items()))


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16])
@pytest.mark.parametrize("shape", [(1, 2), (3, 2), (2,), ()])
def test_a_parameter_of_another_shape_is_named_and_changes_nothing(dtype, shape):
    optimizer = wrapped(optim.Adam(0.1), max_grad_norm=1.0)
    optimizer.apply_gradients(*[{"w": mx.ones((2, 2), dtype)}] * 2)
    before = bits(optimizer.state)
    weights = {"w": mx.ones(shape, dtype)}
    with pytest.raises(ValueError, match="'w' has shape"):
        optimizer.apply_gradients(weights, weights)
    with pytest.raises(ValueError, match="'w' has shape"):
        optimizer.init(weights)
    assert bits(optimizer.state) == before


def test_a_state_of_another_kind_is_refused_before_init_too():
    with pytest.raises(ValueError, match="not of a LossScaleOptimizer"):
        wrapped().state = optim.Adam(1e-3).state
