"""Fix five models that overflow in float16, and draw the figures for docs/.

The script trains each model from overflowing.py in float32, in float16, and in float16
with the float32 layers that ``find_float32_layers`` returns. The table shows the final
losses, these layers, the share of parameters that stay in float16, and how many casts
and kernels the layers add to one forward and backward pass.

    python examples/float32_layers.py

In your own script, two lines fix a model:

    found = find_float32_layers(model, loss_fn, [batch])
    float32_layers(model, found)
"""

import argparse
import io
import math
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import overflowing
from mlx.utils import tree_flatten

from mlx_gradscale import (
    GradScaler,
    LossScaleOptimizer,
    find_float32_layers,
    float32_layers,
)
from mlx_gradscale.plot import plot_headroom

PICTURES = ("residual", "norm")


def train(model, loss_fn, steps):
    """Train a model, and return the mean loss of the last ten steps."""
    optimizer = LossScaleOptimizer(optim.AdamW(1e-3), GradScaler(2.0**10))
    loss_and_grad = optimizer.value_and_grad(model, loss_fn)
    losses = []
    for i in range(steps):
        loss, grads = loss_and_grad(*overflowing.batch(100 + i))
        optimizer.update(model, grads)
        mx.eval(model.parameters(), optimizer.state, loss)
        losses.append(loss.item())
    return sum(losses[-10:]) / len(losses[-10:])


def kernels(model, loss_fn):
    """Count the kernels of one forward and backward pass, and the casts among them."""
    batch = overflowing.batch(0)
    mx.eval(model.parameters(), batch)
    outputs = nn.value_and_grad(model, loss_fn)(*batch)
    graph = io.StringIO()
    mx.export_to_dot(graph, [x for _, x in tree_flatten(outputs)])
    text = graph.getvalue()
    # A custom function adds two nodes that pass arrays through without a kernel.
    passes = text.count('"CustomTransforms"') + text.count('"StopGradient"')
    return text.count("shape=rectangle") - passes, text.count('"AsType"')


def compare(name, steps):
    """Train a model in three modes; return losses, float32 layers and added costs."""

    def make(dtype):
        model, loss_fn = overflowing.MODELS[name]()
        model.set_dtype(dtype)
        return model, loss_fn

    losses = {str(d)[9:]: train(*make(d), steps) for d in (mx.float32, mx.float16)}
    model, loss_fn = make(mx.float16)
    found = find_float32_layers(model, loss_fn, [overflowing.batch(0)])
    before = kernels(model, loss_fn)
    float32_layers(model, found)
    after = kernels(model, loss_fn)
    losses["found"] = train(model, loss_fn, steps)
    return losses, found, [b - a for a, b in zip(before, after, strict=True)]


def main(steps, folder, names):
    folder.mkdir(parents=True, exist_ok=True)
    print("| model | float32 | float16 | with float32 layers | off by | which ", end="")
    print("| parameters in float16 | casts | kernels |")
    print("|---" * 9 + "|")
    for name in names:
        losses, found, (nodes, casts) = compare(name, steps)
        off = losses["found"] / losses["float32"] - 1
        plain = losses["float16"]
        cells = [
            name,
            f"{losses['float32']:.4f}",
            f"{plain:.4f}" if math.isfinite(plain) else "lost",
            f"{losses['found']:.4f}",
            f"{abs(off):.2%}",
            ", ".join(found.where),
            f"{found.float16_parameters:.1%}",
            f"+{casts}",
            f"{nodes:+d}",
        ]
        print("| " + " | ".join(cells) + " |", flush=True)
        for dark in (False, True) if name in PICTURES else ():
            theme = "dark" if dark else "light"
            plot_headroom(found, folder / f"headroom-{name}-{theme}.png", dark=dark)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--models", nargs="+", default=list(overflowing.MODELS))
    folder = Path(__file__).parents[1] / "docs" / "pictures"
    parser.add_argument("--output", type=Path, default=folder, help="figure folder")
    options = parser.parse_args()
    main(options.steps, options.output, options.models)
