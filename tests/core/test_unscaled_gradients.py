"""Users hold true gradients: what anybody does with them is right."""

import math

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
import pytest
from mlx.utils import tree_flatten, tree_map
from support.graphs import kernels
from support.helpers import INF, NAN, Mlp, Traced, batch, bits, mse, same

from mlx_gradscale import GradScaler, GuardedOptimizer, LossScaleOptimizer, all_finite

pytestmark = pytest.mark.core

MODES = pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
# Each way to get true gradients of a float16 model, and of a float32 one in float16.
WAYS = ["value_and_grad", "scale_loss", "scale_loss of a closure", "compute_dtype"]


def model_of(way, seed=3):
    mx.random.seed(seed)
    return Mlp(dtype=mx.float32 if way == "compute_dtype" else mx.float16)


def loss_with_model(model, x, y):
    return mse(model)(x, y)


def gradients_by(way, optimizer, model):
    if way == "value_and_grad":
        return optimizer.value_and_grad(model, mse(model))
    if way == "compute_dtype":
        return optimizer.value_and_grad(
            model, mse(model), mx.float16, cast_inputs=False
        )
    if way == "scale_loss":
        loss_fn = optimizer.scale_loss(loss_with_model)
        loss_and_grad = nn.value_and_grad(model, loss_fn)
        return lambda x, y: loss_and_grad(model, x, y)
    return nn.value_and_grad(model, optimizer.scale_loss(mse(model), model))


def half_batch(seed=0):
    return batch(seed, dtype=mx.float16)


def as_arrays(tree):
    return {path: np.array(x) for path, x in tree_flatten(tree)}


@MODES
@pytest.mark.parametrize("way", WAYS)
def test_gradients_are_true_and_float32_at_any_scale(way, compiled):
    found = []
    for scale in (1.0, 2.0**10, 2.0**14):
        model = model_of(way)
        optimizer = LossScaleOptimizer(optim.SGD(0.1), GradScaler(scale))
        loss_and_grad = gradients_by(way, optimizer, model)
        if compiled:
            state = [model.state, optimizer.state]
            loss_and_grad = mx.compile(loss_and_grad, inputs=state, outputs=state)
        loss, grads = loss_and_grad(*half_batch())
        assert {x.dtype for _, x in tree_flatten(grads)} == {mx.float32}
        found.append((loss.item(), as_arrays(grads)))
    for loss, grads in found[1:]:
        assert loss == found[0][0]
        for path, x in grads.items():
            assert np.allclose(x, found[0][1][path], rtol=5e-3, atol=2e-4), path


@pytest.mark.parametrize("way", WAYS)
def test_what_is_not_finite_is_nan_and_survives_an_elementwise_clip(way):
    # From 2**40 with a clip of 1.0 the scale stuck at 2**20: infs became the limit.
    model = model_of(way)
    optimizer = LossScaleOptimizer(optim.SGD(0.1), GradScaler(2.0**40))
    loss_and_grad = gradients_by(way, optimizer, model)
    for _ in range(60):
        _, grads = loss_and_grad(*half_batch())
        grads = tree_map(lambda g: mx.clip(g, -1.0, 1.0), grads)
        assert not any(mx.any(mx.isinf(g)).item() for _, g in tree_flatten(grads))
        optimizer.update(model, grads)
        mx.eval(model.state, optimizer.state)
    assert 2.0**8 <= optimizer.scaler.get_scale() <= 2.0**17
    assert optimizer.scaler.last_step_applied.item()


@pytest.mark.parametrize("value", [0.0, -0.0, 1.5, -(2.0**-140), 3e38])
def test_a_finite_gradient_comes_out_bit_for_bit(value):
    from mlx_gradscale.precision import true_gradients

    tree = {"g": mx.array([value]), "n": mx.array([3])}
    # Times one it is itself, but for a subnormal where these are flushed.
    expected = tree | {"g": tree["g"] * mx.array(1.0)}
    assert same(true_gradients(tree, mx.array(1.0)), expected)
    assert not all_finite(true_gradients({"g": mx.array([INF])}, mx.array(0.5))).item()


# What people write between gradient and update, of the table


def clipped_by_norm(grads):
    return optim.clip_grad_norm(grads, 0.05)[0]


def clipped_by_value(grads):
    return tree_map(lambda g: mx.clip(g, -0.05, 0.05), grads)


def sgd_by_hand(model, change, steps, accumulate=1, rate=0.1):
    """Float32 training with the same code between: what has to come out."""
    loss_and_grad, optimizer = nn.value_and_grad(model, mse(model)), optim.SGD(rate)
    for step in range(steps):
        grads = None
        for k in range(accumulate):
            _, new = loss_and_grad(*batch(10 * step + k))
            grads = new if grads is None else tree_map(mx.add, grads, new)
        optimizer.update(model, change(grads))
        mx.eval(model.state)
    return as_arrays(model.parameters())


@MODES
@pytest.mark.parametrize("change", [clipped_by_norm, clipped_by_value])
@pytest.mark.parametrize("way", WAYS)
def test_clipping_in_anybodys_code_is_as_in_float32(way, change, compiled):
    expected = sgd_by_hand(model_of("compute_dtype"), change, 30)
    model = model_of(way)
    optimizer = LossScaleOptimizer(optim.SGD(0.1), GradScaler(growth_interval=4))
    loss_and_grad = gradients_by(way, optimizer, model)
    optimizer.init(model.trainable_parameters())

    def step(x, y):
        loss, grads = loss_and_grad(x, y)
        optimizer.update(model, change(grads))
        return loss

    state = [model.state, optimizer.state]
    traced = Traced(step)
    step = mx.compile(traced, inputs=state, outputs=state) if compiled else traced
    skipped = 0
    for i in range(30):
        while True:
            step(*half_batch(10 * i))
            mx.eval(state)
            if optimizer.scaler.skipped_steps.item() == skipped:
                break
            skipped += 1
    assert skipped
    for path, x in as_arrays(optimizer.masters(model.parameters())).items():
        assert np.allclose(x, expected[path], rtol=0.02, atol=5e-3), path
    assert not compiled or traced.count == 1


@MODES
@pytest.mark.parametrize("way", WAYS)
def test_micro_batches_added_across_a_change_of_the_scale(way, compiled):
    start = model_of("compute_dtype")
    expected = sgd_by_hand(start, lambda g: g, 6, accumulate=4, rate=0.02)
    model = model_of(way)
    optimizer = LossScaleOptimizer(optim.SGD(0.02), GradScaler(1024.0))
    loss_and_grad = gradients_by(way, optimizer, model)
    if compiled:
        state = [model.state, optimizer.state]
        loss_and_grad = mx.compile(loss_and_grad, inputs=state, outputs=state)
    for i in range(6):
        grads = None
        for k in range(4):
            _, new = loss_and_grad(*half_batch(10 * i + k))
            grads = new if grads is None else tree_map(mx.add, grads, new)
            # What another optimizer on the same scaler would do in between.
            optimizer.scaler.update([256.0, 4096.0][k % 2])
        optimizer.update(model, grads)
        mx.eval(model.state, optimizer.state)
    for path, x in as_arrays(optimizer.masters(model.parameters())).items():
        assert np.allclose(x, expected[path], rtol=0.02, atol=5e-3), path


@MODES
@pytest.mark.parametrize("habit", ["used", "dropped", "left out", "clipped before"])
def test_pytorchs_recipe_is_right_whether_unscale_is_used_or_not(habit, compiled):
    model, optimizer, scaler = model_of("compute_dtype"), optim.SGD(0.1), GradScaler()
    loss_and_grad = scaler.value_and_grad(model, mse(model), mx.float16)
    optimizer.init(model.trainable_parameters())

    def step(x, y):
        _, grads = loss_and_grad(x, y)
        if habit == "clipped before":
            grads = clipped_by_norm(grads)
        if habit == "used":
            grads = scaler.unscale_(optimizer, grads)
        elif habit == "dropped":
            scaler.unscale_(optimizer, grads)
        if habit != "clipped before":
            grads = clipped_by_norm(grads)
        applied = scaler.step(optimizer, model, grads)
        scaler.update()
        return applied

    state = [model.state, optimizer.state, scaler.state]
    step = mx.compile(step, inputs=state, outputs=state) if compiled else step
    i = 0
    while i < 10:
        i += step(*batch(10 * i)).item()
    expected = sgd_by_hand(model_of("compute_dtype"), clipped_by_norm, 10)
    for path, x in as_arrays(model.parameters()).items():
        assert np.allclose(x, expected[path], rtol=0.02, atol=2e-3), path


def test_gradients_may_go_to_another_scaler_of_the_same_way():
    moved = []
    for other in (None, GradScaler(4.0)):
        model, scaler = model_of("compute_dtype"), GradScaler(1024.0)
        _, grads = scaler.value_and_grad(model, mse(model), mx.float16)(*batch())
        if other is not None:
            other.value_and_grad(model, mse(model), mx.float16)(*batch(1))
        (other or scaler).minimize(optim.SGD(0.1), model, grads)
        moved.append(model.parameters())
    assert same(*moved)


@pytest.mark.parametrize("way", WAYS)
def test_a_gradient_function_compiled_alone_stays_true_as_the_scale_moves(way):
    model = model_of(way)
    scaler = GradScaler(64.0, growth_interval=1)
    optimizer = LossScaleOptimizer(optim.SGD(0.0), scaler)
    loss_and_grad = gradients_by(way, optimizer, model)
    # The weights are left as they are, and listed for nn.value_and_grad, which leaves
    # its own in their place.
    alone = mx.compile(loss_and_grad, inputs=model.state, outputs=model.state)
    first = None
    with pytest.warns(UserWarning, match="compiled without the scaler's state"):
        optimizer.update(model, alone(*half_batch())[1])
    for _ in range(3):
        _, grads = alone(*half_batch())
        optimizer.update(model, grads)
        first = first or as_arrays(grads)
        for path, x in as_arrays(grads).items():
            assert np.array_equal(x, first[path])
    assert scaler.get_scale() == 1024.0


@MODES
def test_gradients_from_anywhere_else_are_taken_as_they_are(compiled):
    # Unscaled ones, once the scaler had scaled anything, moved 8e-6 instead of 0.54.
    model, optimizer, scaler = model_of("compute_dtype"), optim.SGD(0.1), GradScaler()
    scaler.value_and_grad(model, mse(model), mx.float16)(*batch())
    plain = nn.value_and_grad(model, mse(model))
    optimizer.init(model.trainable_parameters())

    def step(x, y):
        return scaler.minimize(optimizer, model, plain(x, y)[1])

    state = [model.state, optimizer.state, scaler.state]
    step = mx.compile(step, inputs=state, outputs=state) if compiled else step
    for i in range(5):
        assert step(*batch(10 * i)).item()
    expected = sgd_by_hand(model_of("compute_dtype"), lambda grads: grads, 5)
    for path, x in as_arrays(model.parameters()).items():
        assert np.allclose(x, expected[path], rtol=1e-4, atol=1e-5), path


# One scaler, one way


def test_the_two_ways_are_not_mixed_and_the_error_names_both():
    model = model_of("scale_loss")
    both = r"(?s)scaled gradients \(scale.*true gradients \(value_and_grad|true.*scaled"
    wrapper = LossScaleOptimizer(optim.SGD(0.1))
    true = [
        lambda s: s.value_and_grad(model, mse(model)),
        lambda s: LossScaleOptimizer(optim.SGD(0.1), s).scale_loss(mse(model), model),
    ]
    scaled = [
        lambda s: s.scale(mx.array(1.0)),
        lambda s: s.scale_loss(mse(model)),
        lambda s: LossScaleOptimizer(optim.SGD(0.1), s).scale_loss(
            mse(model), unscale=False
        ),
    ]
    for first, second in [(a, b) for a in true for b in scaled]:
        for one, other in ((first, second), (second, first)):
            scaler = GradScaler()
            one(scaler)
            with pytest.raises(RuntimeError, match=both):
                other(scaler)
            one(scaler)
    assert wrapper.scaler._way is None


def test_scaled_gradients_of_the_wrapper_are_as_they_were():
    model = model_of("scale_loss")
    optimizer = LossScaleOptimizer(optim.SGD(0.1), GradScaler(256.0))
    loss_fn = optimizer.scale_loss(mse(model), unscale=False)
    _, grads = nn.value_and_grad(model, loss_fn)(*half_batch())
    assert {x.dtype for _, x in tree_flatten(grads)} == {mx.float16}
    plain = nn.value_and_grad(model, mse(model))(*half_batch())[1]
    for path, x in as_arrays(grads).items():
        assert np.allclose(x / 256.0, as_arrays(plain)[path], rtol=0.02, atol=1e-2)
    ranks = {"group": mx.distributed.init(), "average": "scaled"}
    average = LossScaleOptimizer(optim.SGD(0.1), **ranks)
    for way in (average.value_and_grad, lambda m, f: average.scale_loss(f, m)):
        with pytest.raises(ValueError, match='average="scaled"'):
            way(model, mse(model))


def test_a_loss_without_a_model_is_refused_with_the_remedy():
    model = model_of("scale_loss")
    optimizer = LossScaleOptimizer(optim.SGD(0.1))
    loss_and_grad = nn.value_and_grad(model, optimizer.scale_loss(mse(model)))
    with pytest.raises(TypeError, match=r"scale_loss\(loss_fn, model\)"):
        loss_and_grad(*half_batch())


def test_models_are_found_in_arguments_once_and_at_any_depth():
    model = model_of("scale_loss")
    plain = nn.value_and_grad(model, mse(model))(*half_batch())[1]
    optimizer = LossScaleOptimizer(optim.SGD(0.1), GradScaler(64.0))

    def loss_fn(options, layers, x, *, y):
        return mse(options["model"])(x, y), layers

    loss_and_grad = nn.value_and_grad(model, optimizer.scale_loss(loss_fn))
    x, y = half_batch()
    # The same model twice, and layers of it: its gradients are unscaled once.
    _, grads = loss_and_grad({"model": model, "again": [model]}, model.layers, x, y=y)
    for path, g in as_arrays(grads).items():
        assert np.allclose(g, as_arrays(plain)[path], rtol=0.02, atol=1e-2)


def test_gradients_of_a_model_that_was_not_named_are_refused():
    seen, other = model_of("scale_loss"), model_of("scale_loss")
    optimizer = LossScaleOptimizer(optim.SGD(0.1))
    optimizer.scale_loss(mse(other), seen)
    # Differentiated by somebody for another model: they come out scaled.
    grads = tree_map(mx.ones_like, other.trainable_parameters())
    with pytest.raises(ValueError, match="has not seen"):
        optimizer.update(other, grads)
    scaler = GradScaler()
    scaler.value_and_grad(seen, mse(seen))
    with pytest.raises(ValueError, match="not made for"):
        scaler.step(optim.SGD(0.1), other, grads)
    seen.set_dtype(mx.float32)
    scaler.step(optim.SGD(0.1), seen.layers[0], grads["layers"][0])


def test_a_loss_that_replaces_the_parameters_is_refused():
    model = model_of("scale_loss")
    optimizer = LossScaleOptimizer(optim.SGD(0.1))

    def loss_fn(parameters, x, y):
        model.update(parameters)
        return mse(model)(x, y)

    before = bits(model.parameters())
    grads = mx.grad(optimizer.scale_loss(loss_fn, model))
    scaled = grads(model.trainable_parameters(), *half_batch())
    with pytest.raises(RuntimeError, match="came out scaled"):
        optimizer.update(model, scaled)
    # Also where a right one came after it, and was added.
    scaled = grads(model.trainable_parameters(), *half_batch())
    right = nn.value_and_grad(model, optimizer.scale_loss(mse(model), model))
    total = tree_map(mx.add, scaled, right(*half_batch())[1])
    with pytest.raises(RuntimeError, match="came out scaled"):
        optimizer.update(model, total)
    assert bits(model.parameters()) == before


def test_a_model_by_closure_beside_another_as_an_argument_is_refused():
    student, teacher = model_of("scale_loss"), model_of("scale_loss", seed=7)
    optimizer = LossScaleOptimizer(optim.SGD(0.1))
    known = optimizer.scale_loss(loss_with_model)
    _, grads = nn.value_and_grad(student, known)(student, *half_batch())
    optimizer.update(student, grads)

    def distil(teacher, x):
        return mx.mean(mx.square(student(x) - teacher(x)).astype(mx.float32))

    scaled = optimizer.scale_loss(distil)
    _, grads = nn.value_and_grad(student, scaled)(teacher, half_batch()[0])
    before = bits(student.parameters())
    with pytest.raises(RuntimeError, match="came out scaled"):
        optimizer.update(student, grads)
    assert bits(student.parameters()) == before


def test_a_checkpointed_layer_may_replace_its_parameters():
    model = model_of("scale_loss")
    layer = nn.utils.checkpoint(model.layers[0])

    def loss_fn(model, x, y):
        out = model.layers[1](nn.relu(layer(x)))
        return mx.mean(mx.square(out.astype(mx.float32) - y))

    optimizer = LossScaleOptimizer(optim.SGD(0.1), GradScaler(64.0))
    scaled = optimizer.scale_loss(loss_fn)
    _, grads = nn.value_and_grad(model, scaled)(model, *half_batch())
    plain = nn.value_and_grad(model, mse(model))(*half_batch())[1]
    for path, x in as_arrays(grads).items():
        assert np.allclose(x, as_arrays(plain)[path], rtol=0.02, atol=1e-2)
    optimizer.update(model, grads)
    assert optimizer.scaler.last_step_applied.item()


def test_a_validation_loss_says_nothing_about_the_next_step():
    model = model_of("scale_loss")
    optimizer = LossScaleOptimizer(optim.SGD(0.1), GradScaler(64.0))
    loss_fn = optimizer.scale_loss(loss_with_model)
    before = bits(model.parameters())
    x, y = half_batch()
    assert math.isnan(loss_fn(model, x * NAN, y).item())
    assert bits(model.parameters()) == before
    _, grads = nn.value_and_grad(model, loss_fn)(model, x, y)
    optimizer.update(model, grads)
    assert optimizer.scaler.last_step_applied.item()


def test_tied_weights_and_integer_parameters():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(5, 4)
            self.count = mx.array([3])
            self.embedding.set_dtype(mx.float16)

        def __call__(self, tokens):
            hidden = self.embedding(tokens) * self.count.astype(mx.float16)
            return self.embedding.as_linear(hidden)

    mx.random.seed(0)
    model, tokens = Tied(), mx.array([[0, 1, 4]])

    def loss_fn(model, tokens):
        logits = model(tokens).astype(mx.float32)
        return nn.losses.cross_entropy(logits, tokens, reduction="mean")

    plain = nn.value_and_grad(model, loss_fn)(model, tokens)[1]
    optimizer = LossScaleOptimizer(optim.SGD(0.0), GradScaler(512.0))
    for loss_and_grad in (
        nn.value_and_grad(model, optimizer.scale_loss(loss_fn)),
        optimizer.value_and_grad(model, loss_fn),
    ):
        _, grads = loss_and_grad(model, tokens)
        assert grads["embedding"]["weight"].dtype == mx.float32
        assert np.allclose(
            np.array(grads["embedding"]["weight"]),
            np.array(plain["embedding"]["weight"]),
            rtol=0.02,
            atol=1e-3,
        )
        optimizer.update(model, grads)
        assert optimizer.scaler.last_step_applied.item()


# What it costs


def backward(optimizer, model, **arguments):
    loss_and_grad = optimizer.value_and_grad(model, mse(model), **arguments)
    optimizer.init(model.trainable_parameters())

    def step(x, y):
        loss, grads = loss_and_grad(x, y)
        optimizer.update(model, grads)
        return loss

    return step


def launched(step, state, *arguments):
    compiled = mx.compile(step, inputs=state, outputs=state)
    compiled(*arguments)
    mx.eval(state)
    loss = compiled(*arguments)
    names = kernels([loss, state])
    return [name for name in names if name != "CustomTransforms"]


def test_float32_parameters_computed_in_float16_take_no_kernel_more():
    counts = {}
    for way in ("true", "scaled"):
        mx.random.seed(0)
        model = Mlp()
        optimizer = LossScaleOptimizer(optim.AdamW(1e-2), GradScaler(64.0))
        if way == "true":
            step = backward(optimizer, model, compute_dtype=mx.float16)
        else:
            from mlx_gradscale import precision

            scaled = optimizer.scale_loss(mse(model), unscale=False)
            loss_and_grad = precision.value_and_grad(model, scaled, mx.float16)
            optimizer.init(model.trainable_parameters())

            def step(x, y, model=model, optimizer=optimizer, f=loss_and_grad):
                loss, grads = f(x, y)
                optimizer.update(model, grads)
                return loss

        counts[way] = launched(step, [model.state, optimizer.state], *batch())
    # Two scalar kernels note whether the loss was finite; per leaf there is none more.
    assert len(counts["true"]) <= len(counts["scaled"]) + 2


def test_float16_parameters_take_one_kernel_more_per_leaf_which_writes_four_bytes():
    counts = {}
    for unscale in (True, False):
        mx.random.seed(0)
        model = Mlp(dtype=mx.float16)
        optimizer = LossScaleOptimizer(optim.AdamW(1e-2), GradScaler(64.0))
        loss_fn = optimizer.scale_loss(mse(model), model, unscale=unscale)
        loss_and_grad = nn.value_and_grad(model, loss_fn)
        optimizer.init(model.trainable_parameters())

        def step(x, y, model=model, optimizer=optimizer, f=loss_and_grad):
            loss, grads = f(x, y)
            optimizer.update(model, grads)
            return loss

        state = [model.state, optimizer.state]
        counts[unscale] = launched(step, state, *half_batch())
    leaves = len(tree_flatten(Mlp().parameters()))
    extra = [n for n in counts[True] if n.startswith("CompiledAsTypeBroadcastMultiply")]
    assert len(counts[True]) - len(counts[False]) <= leaves + 2
    assert len(extra) >= leaves


def test_a_true_gradient_of_a_float16_parameter_is_six_bytes_of_traffic():
    from helpers import bytes_moved

    from mlx_gradscale.precision import true_gradients

    scaled = {"a": mx.ones((16, 8), mx.float16), "b": mx.ones(16, mx.float16)}
    mx.eval(scaled)
    # Read 2, write 4; the finite check and the update then read 4 each instead of 2.
    moved = bytes_moved(scaled, true_gradients(scaled, mx.array(0.5)))
    assert moved == 6 * (16 * 8 + 16)


def test_guarding_alone_costs_no_kernel_more_than_scaled_gradients():
    counts = {}
    for guard in (True, False):
        mx.random.seed(0)
        model = Mlp(dtype=mx.bfloat16)
        if guard:
            optimizer = GuardedOptimizer(optim.AdamW(1e-2))
            loss_fn = mse(model)
        else:
            optimizer = LossScaleOptimizer(optim.AdamW(1e-2), GradScaler(64.0))
            loss_fn = optimizer.scale_loss(mse(model), unscale=False)
        loss_and_grad = nn.value_and_grad(model, loss_fn)
        optimizer.init(model.trainable_parameters())

        def step(x, y, model=model, optimizer=optimizer, f=loss_and_grad):
            loss, grads = f(x, y)
            optimizer.update(model, grads)
            return loss

        state = [model.state, optimizer.state]
        counts[guard] = len(launched(step, state, *batch(dtype=mx.bfloat16)))
    assert counts[True] <= counts[False]
