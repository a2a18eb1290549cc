"""Functions that the tests of ranks and their workers share."""

import hashlib
import io

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from support.helpers import Traced, batch, compiled_if, mse
from support.optimizer_helpers import leaves_of


def rank_batch(step, rank, overflow, n=4):
    """Return a rank's own batch, whose gradients overflow in float16 if asked to."""
    x, y = batch(1000 * rank + step, n, mx.float16)
    return (x * 1000, y) if overflow else (x, y)


def fingerprint(tree):
    """Return a hash of a tree, equal only if the tree is bit-identical."""
    return hashlib.sha256(repr(sorted(leaves_of(tree).items())).encode()).hexdigest()


def all_reduces(outputs):
    """Return the number of all-reduces in the graph of ``outputs``."""
    graph = io.StringIO()
    found = [x for _, x in tree_flatten(outputs) if isinstance(x, mx.array)]
    mx.export_to_dot(graph, found)
    return graph.getvalue().count("AllReduce")


def compiled_step(model, optimizer):
    """Return a compiled training step that evaluates; ``.compiled`` does not."""
    loss_and_grad = optimizer.value_and_grad(model, mse(model))
    optimizer.init(model.trainable_parameters())
    state = [model.state, optimizer.state]

    def step(x, y):
        loss, grads = loss_and_grad(x, y)
        optimizer.update(model, grads)
        return loss

    traced = Traced(step)
    compiled = compiled_if(True, traced, *state)

    def run(x, y):
        loss = compiled(x, y)
        mx.eval(loss, state)
        return loss

    run.traced, run.compiled = traced, compiled
    return run


def message(function):
    """Return the error that a function raises as text, or None."""
    try:
        function()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


class Deep(nn.Module):
    """A model of any depth."""

    def __init__(self, depth):
        super().__init__()
        self.layers = [nn.Linear(8, 8) for _ in range(depth)]
        self.out = nn.Linear(8, 1)
        self.set_dtype(mx.float16)

    def __call__(self, x):
        for layer in self.layers:
            x = nn.relu(layer(x))
        return self.out(x)
