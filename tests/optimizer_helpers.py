"""What the tests of ``LossScaleOptimizer`` share."""

import mlx.core as mx
import mlx.optimizers as optim
from helpers import (
    INF,
    Mlp,
    Traced,
    batch,
    bits,
    mse,
)
from mlx.utils import tree_map

from mlx_gradscale import GradScaler, LossScaleOptimizer

HALVES = [mx.float16, mx.bfloat16]


def wrapped(inner=None, scale=1.0, **arguments):
    scaler = GradScaler(init_scale=scale)
    scaler.scale(mx.array(1.0))
    return LossScaleOptimizer(inner or optim.AdamW(1e-2), scaler, **arguments)


def rounded(optimizer, tree):
    """The masters, cast to the dtype of the parameters."""
    return tree_map(lambda m, p: m.astype(p.dtype), optimizer.masters(tree), dict(tree))


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
        if init:
            self.optimizer.init(self.model.trainable_parameters())
        loss_and_grad = self.optimizer.value_and_grad(self.model, mse(self.model))

        def step(x, y):
            loss, gradients = loss_and_grad(x, y)
            self.optimizer.update(self.model, gradients)
            return loss

        self.traced = Traced(step)
        self.step = self.traced
        if compiled:
            state = [self.model.state, self.optimizer.state]
            self.step = mx.compile(self.traced, inputs=state, outputs=state)

    def run(self, seeds, bad=()):
        for seed in seeds:
            x, y = batch(seed, dtype=self.dtype)
            loss = self.step(x * (INF if seed in bad else 1), y)
        mx.eval(self.model.state, self.optimizer.state)
        return loss

    def everything(self):
        return bits([self.model.parameters(), self.optimizer.state])
