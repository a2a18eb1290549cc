"""What can be done while MLX traces."""

import io
import os
import re
from collections import defaultdict

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import pytest
from support.helpers import Mlp, batch, mse

from mlx_gradscale import GradScaler, LossScaleOptimizer
from mlx_gradscale.guard import guarded_apply
from mlx_gradscale.precision import true_gradients
from mlx_gradscale.tracing import evaluate_unless_traced

pytestmark = pytest.mark.core


def test_what_is_traced_is_left_alone():
    state, told = {"a": mx.array(1.0) + 1}, []

    def function(x):
        told.append(evaluate_unless_traced(x))
        told.append(evaluate_unless_traced({"sum": x + state["a"]}))
        told.append(evaluate_unless_traced([mx.array(1.0) + 1]))
        return mx.sum(x * state["a"])

    assert mx.compile(function, inputs=state)(mx.ones(2)).item() == 4.0
    assert mx.grad(function)(mx.ones(2)).tolist() == [2.0, 2.0]
    assert told == [False, False, True, True, True, True]
    assert evaluate_unless_traced(state, [mx.ones(2)])


@pytest.mark.skipif(BEFORE_0_32, reason="MLX before 0.32 reads what is not there.")
def test_any_other_error_is_raised(tmp_path):
    path = str(tmp_path / "weights.safetensors")
    mx.save_safetensors(path, {"w": mx.ones(1000)})
    lazy = mx.load(path)
    os.truncate(path, 200)
    with pytest.raises(RuntimeError, match=r"read"):
        evaluate_unless_traced(lazy)


@pytest.mark.parametrize("wrap", [False, True], ids=["scaler", "wrapper"])
def test_shapeless_is_refused_as_long_as_mlx_broadcasts_all_in_there(wrap):
    model, scaler, inner = Mlp(), GradScaler(), optim.SGD(0.1)
    if wrap:
        optimizer = LossScaleOptimizer(inner, scaler)
        loss_and_grad = nn.value_and_grad(
            model, optimizer.scale_loss(mse(model), model)
        )
        update = optimizer.update
    else:
        optimizer = inner
        loss_and_grad = scaler.value_and_grad(model, mse(model))

        def update(model, grads):
            scaler.minimize(inner, model, grads)

    optimizer.init(model.trainable_parameters())
    state = [model.state, optimizer.state, scaler.state]

    def step(x, y):
        loss, grads = loss_and_grad(x, y)
        update(model, grads)
        return loss

    shapeless = mx.compile(step, inputs=state, outputs=state, shapeless=True)
    with pytest.raises(ValueError, match="leave out shapeless"):
        shapeless(*batch())


def test_no_array_is_used_by_all_leaves_of_a_large_tree():
    # The work of mx.compile grows with the square of how often one is.
    tree = {str(i): mx.ones(2) for i in range(1500)}
    optimizer = optim.SGD(mx.array(0.1), momentum=0.9)
    optimizer.init(tree)
    mx.eval(tree, optimizer.state)
    factor, apply = mx.array(0.5) + 0.0, mx.array(1.0) > 0
    mx.eval(factor, apply)
    mx.disable_compile()
    try:
        true = true_gradients(tree, factor)
        new = guarded_apply(optimizer, tree, tree, factor, apply)
    finally:
        mx.enable_compile()
    file = io.StringIO()
    outputs = [*true.values(), *new.values()]
    mx.export_to_dot(file, outputs, factor=factor, apply=apply)
    # All that comes of the factor and the flag, not the optimizer's own scalars.
    reads, writes = defaultdict(list), defaultdict(list)
    for name, node in re.findall(r'"(\w+)" -> (\d+)', file.getvalue()):
        reads[name].append(node)
    for node, name in re.findall(r'(\d+) -> "(\w+)"', file.getvalue()):
        writes[node].append(name)
    ours, new = set(), {"factor", "apply"}
    while new:
        ours |= new
        new = {x for name in new for node in reads[name] for x in writes[node]} - ours
    # A leaf uses the flag for its moment, for itself, and for the two together.
    assert 512 <= max(len(reads[name]) for name in ours) <= 3 * 512
    assert sum(len(reads[name]) for name in ours) >= 3 * 1500
