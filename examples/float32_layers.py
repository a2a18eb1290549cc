"""Fix five models that overflow in float16, and draw the figures for docs/.

Each model learns sequences that repeatedly count from 0 to their first number. All five
train in float32. In float16, they fail at any loss scale, each for one reason:

    residual   a residual stream above 65504, as in Gemma 3
    mlp        a gated feed-forward layer whose product is above 65504, as in T5
    attention  attention scores above 65504 before scaling
    loss       a loss that is reduced in float16
    norm       a norm whose mean of squares is above 65504

The script trains each model in float32, in float16, and in float16 with the float32
layers that ``find_float32_layers`` returns. The table shows the final losses, these
layers, the share of parameters that stay in float16, and how many casts and kernels the
layers add to one forward and backward pass.

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
from mlx.utils import tree_flatten

from mlx_gradscale import (
    GradScaler,
    LossScaleOptimizer,
    find_float32_layers,
    float32_layers,
)
from mlx_gradscale.plot import plot_headroom

NUMBERS, LENGTH, WIDTH, LAYERS = 16, 16, 32, 6
PICTURES = ("residual", "norm")


class Norm(nn.Module):
    """RMSNorm as it is often written by hand: in the dtype of its input."""

    def __init__(self):
        super().__init__()
        self.weight = mx.ones(WIDTH)

    def __call__(self, x):
        return x * mx.rsqrt(mx.mean(mx.square(x), axis=-1, keepdims=True)) * self.weight


class Attention(nn.Module):
    """Attention that scales its scores only after the product, which may overflow."""

    def __init__(self, scale=WIDTH**-0.5):
        super().__init__()
        self.query = nn.Linear(WIDTH, WIDTH, bias=False)
        self.key = nn.Linear(WIDTH, WIDTH, bias=False)
        self.value = nn.Linear(WIDTH, WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.scale = scale

    def __call__(self, x, mask):
        scores = self.query(x) @ self.key(x).swapaxes(-1, -2) * self.scale
        return self.out(mx.softmax(scores + mask, axis=-1) @ self.value(x))


class GatedMlp(nn.Module):
    """A gated layer whose hidden values are ``gain`` times larger than necessary."""

    def __init__(self, gain=1.0):
        super().__init__()
        self.gate = nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.up = nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)
        self.gain = gain

    def __call__(self, x):
        hidden = nn.gelu(self.gate(x)) * self.up(x) * self.gain
        return self.down(hidden) / self.gain


class Block(nn.Module):
    """A block with norms before and after each layer, as in Gemma."""

    def __init__(self, norm):
        super().__init__()
        self.norms = [norm() for _ in range(4)]
        self.attention = Attention()
        self.mlp = GatedMlp()

    def __call__(self, x, mask):
        before, after, before_mlp, after_mlp = self.norms
        x = x + after(self.attention(before(x), mask))
        return x + after_mlp(self.mlp(before_mlp(x)))


class Transformer(nn.Module):
    def __init__(self, norm):
        super().__init__()
        self.embed = nn.Embedding(NUMBERS, WIDTH)
        self.embed.weight *= 4
        self.positions = nn.Embedding(LENGTH, WIDTH)
        self.blocks = [Block(norm) for _ in range(LAYERS)]
        self.norm = norm()
        self.head = nn.Linear(WIDTH, NUMBERS)

    def __call__(self, tokens):
        n = tokens.shape[1]
        x = self.embed(tokens) + self.positions(mx.arange(n))
        mask = nn.MultiHeadAttention.create_additive_causal_mask(n, x.dtype)
        for block in self.blocks:
            x = block(x, mask)
        return self.head(self.norm(x))


def make_transformer(norm=lambda: nn.RMSNorm(WIDTH)):
    mx.random.seed(0)
    return Transformer(norm)


def cross_entropy(model):
    def loss_fn(tokens, targets):
        logits = model(tokens).astype(mx.float32)
        return nn.losses.cross_entropy(logits, targets, reduction="mean")

    return loss_fn


def residual():
    model = make_transformer()
    model.blocks[-1].norms[3].weight *= 6e4
    return model, cross_entropy(model)


def mlp():
    model = make_transformer()
    model.blocks[LAYERS // 2].mlp.gain = 1e5
    return model, cross_entropy(model)


def attention():
    model = make_transformer()
    layer = model.blocks[LAYERS // 2].attention
    layer.query.weight *= 200
    layer.key.weight *= 200
    layer.scale /= 200**2
    return model, cross_entropy(model)


def loss():
    model = make_transformer()

    def loss_fn(tokens, targets):
        wanted = 40 * mx.eye(NUMBERS)[targets].astype(model.head.weight.dtype)
        return mx.mean(mx.square(model(tokens) - wanted))

    return model, loss_fn


def norm():
    model = make_transformer(Norm)
    model.blocks[-2].norms[3].weight *= 1e3
    return model, cross_entropy(model)


MODELS = {f.__name__: f for f in (residual, mlp, attention, loss, norm)}


def batch(seed, size=16):
    """Return sequences and the next numbers. About one number in five is random."""
    keys = mx.random.split(mx.random.key(seed), 3)
    most = mx.random.randint(2, NUMBERS, (size, 1), key=keys[0])
    numbers = mx.concatenate([most, mx.arange(LENGTH) % (most + 1)], axis=1)
    any_number = mx.random.randint(0, NUMBERS, numbers.shape, key=keys[1])
    numbers = mx.where(
        mx.random.bernoulli(0.2, numbers.shape, key=keys[2]), any_number, numbers
    )
    return numbers[:, :-1], numbers[:, 1:]


def train(model, loss_fn, steps):
    """Train a model, and return the mean loss of the last ten steps."""
    optimizer = LossScaleOptimizer(optim.AdamW(1e-3), GradScaler(2.0**10))
    loss_and_grad = optimizer.value_and_grad(model, loss_fn)
    losses = []
    for i in range(steps):
        value, grads = loss_and_grad(*batch(100 + i))
        optimizer.update(model, grads)
        mx.eval(model.parameters(), optimizer.state, value)
        losses.append(value.item())
    return sum(losses[-10:]) / len(losses[-10:])


def kernels(model, loss_fn):
    """Count the kernels of one forward and backward pass, and the casts among them."""
    inputs = batch(0)
    mx.eval(model.parameters(), inputs)
    outputs = nn.value_and_grad(model, loss_fn)(*inputs)
    graph = io.StringIO()
    mx.export_to_dot(graph, [x for _, x in tree_flatten(outputs)])
    text = graph.getvalue()
    # A custom function adds two nodes that pass arrays through without a kernel.
    passes = text.count('"CustomTransforms"') + text.count('"StopGradient"')
    return text.count("shape=rectangle") - passes, text.count('"AsType"')


def compare(name, steps):
    """Train a model in three modes; return losses, float32 layers and added costs."""

    def make(dtype):
        model, loss_fn = MODELS[name]()
        model.set_dtype(dtype)
        return model, loss_fn

    losses = {str(d)[9:]: train(*make(d), steps) for d in (mx.float32, mx.float16)}
    model, loss_fn = make(mx.float16)
    found = find_float32_layers(model, loss_fn, [batch(0)])
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
        if name in PICTURES:
            plot_headroom(found, folder / f"headroom-{name}.png")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--models", nargs="+", default=list(MODELS))
    folder = Path(__file__).parents[1] / "docs" / "pictures"
    parser.add_argument("--output", type=Path, default=folder, help="figure folder")
    options = parser.parse_args()
    main(options.steps, options.output, options.models)
