"""A whole training step, with and without the scaler: forward, backward, update."""

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim

from mlx_gradscale import GradScaler, precision

from .comparison import say
from .rows import Row, rows_of
from .timing import interleave

FLOAT32 = "whole step, float32"
FLOAT16 = "whole step, float16"
SCALED = "GradScaler"


class _Model(nn.Module):
    def __init__(self, dims: int, layers: int):
        super().__init__()
        self.embedding = nn.Embedding(256, dims)
        self.encoder = nn.TransformerEncoder(layers, dims, num_heads=4)
        self.head = nn.Linear(dims, 256)

    def __call__(self, tokens: mx.array) -> mx.array:
        return self.head(self.encoder(self.embedding(tokens), None))


def _step(scaled: bool, dtype: mx.Dtype, dims: int, layers: int) -> Callable:
    mx.random.seed(0)
    model, optimizer = _Model(dims, layers), optim.AdamW(1e-4)
    optimizer.init(model.trainable_parameters())
    tokens = mx.random.randint(0, 256, (4, 33))
    state: list[Any] = [model.state, optimizer.state]
    cast = None if dtype == mx.float32 else dtype

    def loss_fn(x, y):
        logits = model(x).astype(mx.float32)
        return nn.losses.cross_entropy(logits, y, reduction="mean")

    if scaled:
        scaler = GradScaler()
        state.append(scaler.state)
        differentiate = scaler.value_and_grad(model, loss_fn, cast)
    elif cast is None:
        differentiate = nn.value_and_grad(model, loss_fn)
    else:
        differentiate = precision.value_and_grad(model, loss_fn, cast)

    def step(x, y):
        loss, gradients = differentiate(x, y)
        if scaled:
            scaler.minimize(optimizer, model, gradients)
        else:
            optimizer.update(model, gradients)
        return loss

    compiled = mx.compile(step, inputs=state, outputs=state)
    mx.eval(state, tokens)
    x, y = tokens[:, :-1], tokens[:, 1:]

    def run() -> None:
        mx.eval(compiled(x, y), state)

    return run


def measure(rounds: int, dims: int, layers: int) -> list[Row]:
    """Time the step in float32 and with a float16 forward and backward pass."""
    rows: list[Row] = []
    for dtype, case in ((mx.float32, FLOAT32), (mx.float16, FLOAT16)):
        say(case)
        runs = {
            "without": _step(False, dtype, dims, layers),
            SCALED: _step(True, dtype, dims, layers),
        }
        # One step varies by 10 percent here; the bar is 2.
        rows += rows_of(case, interleave(runs, 6 * rounds))
    return rows
