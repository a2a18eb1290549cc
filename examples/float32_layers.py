"""Cure five models that overflow float16, and draw the README's pictures of it.

For each of the models in overflowing.py: train it in float32, in float16, and in
float16 with the layers in float32 that ``find_float32_layers`` names. The table says
which those are, how much of the model stays float16, and what it costs.

    python examples/float32_layers.py
"""

import argparse
import math
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import overflowing

from mlx_gradscale import GradScaler, LossScaleOptimizer, find_float32_layers, float32_layers
from mlx_gradscale.plot import plot_headroom


def train(model, loss_fn, steps):
    """Return the mean loss of the last ten steps."""
    optimizer = LossScaleOptimizer(optim.AdamW(1e-3), GradScaler(2.0**10))
    loss_and_grad = nn.value_and_grad(model, optimizer.scale_loss(loss_fn))
    losses = []
    for i in range(steps):
        loss, grads = loss_and_grad(*overflowing.batch(100 + i))
        optimizer.update(model, grads)
        mx.eval(model.parameters(), optimizer.state, loss)
        losses.append(loss.item())
    return sum(losses[-10:]) / len(losses[-10:])


def compare(name, steps):
    """Train a model in three ways; return the losses and what was found."""
    make = overflowing.MODELS[name]
    model, loss_fn = make()
    expected = train(model, loss_fn, steps)
    model, loss_fn = make()
    model.set_dtype(mx.float16)
    plain = train(model, loss_fn, steps)
    model, loss_fn = make()
    model.set_dtype(mx.float16)
    found = find_float32_layers(model, loss_fn, [overflowing.batch(0)])
    float32_layers(model, found)
    return {"float32": expected, "float16": plain}, found, train(model, loss_fn, steps)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=60)
