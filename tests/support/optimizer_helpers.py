"""What the tests of ``LossScaleOptimizer`` share."""

from functools import partial

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
from mlx.utils import tree_flatten, tree_map

from mlx_gradscale import GradScaler, LossScaleOptimizer, MasterWeightOptimizer
from support.helpers import (
    INF,
    NAN,
    Mlp,
    Traced,
    batch,
    bits,
    compiled_if,
    gradients_like,
    mse,
)
from support.scaler_helpers import used

HALVES = [mx.float16, mx.bfloat16]


def wrapped(inner=None, scale=1.0, **arguments):
    scaler = used(GradScaler(scale))
    return LossScaleOptimizer(inner or optim.AdamW(1e-2), scaler, **arguments)


def loop_of(kind, model, inner, scaler=None, loss_fn=None, dtype=None, **arguments):
    """Return what a loop of a kind calls: the optimizer, its gradients and its update.

    The kinds are "plain", "scaler", "guarded" and, by any other name, a wrapper.
    """
    scaler, loss_fn = scaler or GradScaler(), loss_fn or mse(model)
    if kind == "plain":
        return inner, nn.value_and_grad(model, loss_fn), inner.update
    if kind == "scaler":
        update = partial(scaler.minimize, inner)
        return inner, scaler.value_and_grad(model, loss_fn, dtype), update
    if kind == "guarded":
        optimizer = MasterWeightOptimizer(inner, **arguments)
    else:
        optimizer = LossScaleOptimizer(inner, scaler, **arguments)
    return optimizer, optimizer.value_and_grad(model, loss_fn, dtype), optimizer.update


class Training:
    """A small float16 model, its wrapped optimizer and one compiled step."""

    def __init__(
        self, inner=None, dtype=mx.float16, compiled=True, init=True, **arguments
    ):
        mx.random.seed(1)
        self.model, self.dtype = Mlp(dtype=dtype), dtype
        self.optimizer = LossScaleOptimizer(
            inner or optim.AdamW(optim.cosine_decay(1e-2, 200)),
            GradScaler(init_scale=256.0, growth_interval=7),
            **arguments,
        )
        self.is_initialized = init
        if init:
            self.optimizer.init(self.model.trainable_parameters())
        loss_and_grad = self.optimizer.value_and_grad(self.model, mse(self.model))

        def step(x, y):
            loss, gradients = loss_and_grad(x, y)
            self.optimizer.update(self.model, gradients)
            return loss

        self.traced, state = Traced(step), [self.model.state, self.optimizer.state]
        self.step = compiled_if(compiled, self.traced, *state)

    def run(self, seeds, bad=()):
        for seed in seeds:
            x, y = batch(seed, dtype=self.dtype)
            loss = self.step(x * (INF if seed in bad else 1), y)
        mx.eval(self.model.state, self.optimizer.state)
        return loss

    def everything(self):
        return bits([self.model.parameters(), self.optimizer.state])


def moments_of(optimizer):
    """Yield each single optimizer with the dicts of moments in its state."""
    for part in getattr(optimizer, "optimizers", [optimizer]):

        def is_box(x, state=part.state):
            has_arrays = isinstance(x, dict) and x is not state
            return has_arrays and any(isinstance(y, mx.array) for y in x.values())

        for _, x in tree_flatten(part.state, is_leaf=is_box):
            if isinstance(x, dict):
                yield part, x


def decoded(optimizer, inner, weights):
    """Load the state of a wrapper of any bits into 32 bits, and a new optimizer."""
    other = wrapped(inner)
    other.init(weights)
    other.state = dict(tree_flatten(optimizer.state))
    # A skipped step only decodes.
    other.apply_gradients(tree_map(lambda x: x * NAN, weights), weights)
    return inner


def assert_near(tree, expected, rtol=1e-5, atol=1e-6):
    """Check that two trees have the same paths and nearly the same values."""
    found, expected = dict(tree_flatten(tree)), dict(tree_flatten(expected))
    assert found.keys() == expected.keys()
    for path, x in found.items():
        assert mx.allclose(x, expected[path], rtol=rtol, atol=atol).item(), path


def leaves_of(tree):
    """Every leaf of a state, arrays as their bits, other values as text."""
    arrays = {p: x for p, x in tree_flatten(tree) if isinstance(x, mx.array)}
    others = {p: repr(x) for p, x in tree_flatten(tree) if p not in arrays}
    return others | bits(arrays)


def check_beside_bare(make, compiled, bad, columns=6, steps=6, tolerance=1e-6):
    """Check guarded steps against an optimizer that never sees the bad ones.

    A skipped step must change no bit of parameters and state. Outside of ``mx.compile``
    the others must be bit-identical to the bare optimizer's.
    """

    def start():
        weights = {"a": {"weight": mx.ones((4, columns)), "bias": mx.ones(4)}}
        weights["b"] = [{"weight": mx.ones((4, 4))}]
        return gradients_like(weights, 99)

    def gradients(i):
        found = gradients_like(start(), i)
        if i in bad:
            found["a"]["bias"] = found["a"]["bias"] * float("nan")
        return found

    optimizer, weights = MasterWeightOptimizer(make()), start()
    optimizer.init(weights)
    step = optimizer.apply_gradients
    step = compiled_if(compiled, step, optimizer.state)
    for i in range(steps):
        old = leaves_of([weights, optimizer.optimizer.state])
        before, kept = weights, bits(weights)
        weights = step(gradients(i), weights)
        new = leaves_of([weights, optimizer.optimizer.state])
        assert (new == old) == (i in bad)
        assert bits(before) == kept  # also by an optimizer that works in place
    bare, expected = make(), start()
    bare.init(expected)
    for i in range(steps):
        if i not in bad:
            expected = bare.apply_gradients(gradients(i), expected)
    if not compiled:
        assert bits(weights) == bits(expected)
        assert leaves_of(optimizer.optimizer.state) == leaves_of(bare.state)
    assert_near(weights, expected, rtol=tolerance, atol=tolerance)
    assert optimizer.step.item() == steps - len(bad)
    return optimizer
