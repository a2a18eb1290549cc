"""Models and losses whose values overflow, or seem to, in float16.

``MODELS[name]()`` returns a model in float32 and its loss function. Five come from
examples/float32_layers.py, with two layers instead of six. All train in float32.
"""

import importlib.util
from functools import partial
from pathlib import Path
from unittest.mock import patch

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

EXAMPLE = Path(__file__).parents[2] / "examples" / "float32_layers.py"
_spec = importlib.util.spec_from_file_location("overflowing", EXAMPLE)
overflowing = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(overflowing)


class SumNorm(overflowing.Norm):
    def __call__(self, x):
        norm = mx.sqrt((x * x).sum(axis=-1, keepdims=True)) / x.shape[-1] ** 0.5
        return x / norm * self.weight


def multiply(model, factors):
    weights = dict(tree_flatten(model.parameters()))
    scaled = [(name, weights[name] * by) for name, by in factors.items()]
    model.load_weights(scaled, strict=False)
    return model


def transformer(make=None, factors=(), **norm):
    """Build a model of the example; multiply weights by factors."""
    with patch.object(overflowing, "LAYERS", 2):
        if make is not None:
            return make()
        model = multiply(overflowing.make_transformer(**norm), dict(factors))
    return model, overflowing.cross_entropy(model)


def perceptron(loss_fn, *layers, **factors):
    mx.random.seed(0)
    last = nn.Linear(32, 8, bias=False)
    model = nn.Sequential(nn.Linear(8, 32), *layers, nn.Tanh(), last)
    names = {"first": "layers.0.weight", "last": "layers.2.weight"}
    multiply(model, {names[name]: by for name, by in factors.items()})
    return model, lambda x, y: loss_fn(model(x), y)


def mean_square(x, y):
    return (x.astype(mx.float32) - y.astype(mx.float32)).square().mean()


def cosine(x, y):
    norms = mx.sqrt((x * x).sum(-1)) * mx.sqrt((y * y).sum(-1))
    return 1 - ((x * y).sum(-1) / norms).astype(mx.float32).mean()


def kl_divergence(x, _):
    mean, log_variance = mx.split(x, 2, axis=-1)
    kl = mx.exp(log_variance + 12) + mean * mean - 1 - log_variance
    return kl.astype(mx.float32).mean()


def log_of_softmax(x, _):
    return -mx.log(mx.softmax(x, axis=-1)[:, 0] + 1e-8).astype(mx.float32).mean()


T5 = {"blocks.1.mlp.up.weight": 2e5, "blocks.1.mlp.down.weight": 1e-5}
NORMED = {"embed.weight": 1e4, "positions.weight": 1e4}
MODELS = {name: partial(transformer, make) for name, make in overflowing.MODELS.items()}
MODELS |= {
    "stream": partial(transformer, factors={"blocks.0.norms.3.weight": 6e4}),
    "large weights": partial(transformer, factors=T5),
    "norm by sum": partial(transformer, norm=SumNorm, factors=NORMED),
    "no overflow": partial(transformer),
    "batch norm": lambda: perceptron(mean_square, nn.BatchNorm(32), first=2e3),
    "cosine": partial(perceptron, cosine, last=2e-3),
    "KL divergence": partial(perceptron, kl_divergence),
    "log of softmax": partial(perceptron, log_of_softmax, last=60),
    "sum of squares": partial(perceptron, lambda x, y: (x - 50 * y).square().sum()),
    "large targets": partial(perceptron, lambda x, y: (x - 500 * y).square().mean()),
}


def batch(model, seed=0):
    """Return a batch in the dtype of the model."""
    if isinstance(model, overflowing.Transformer):
        return overflowing.batch(seed)
    x = mx.random.normal((32, 8), key=mx.random.key(seed))
    x = x.astype(model.layers[0].weight.dtype)
    return x, mx.roll(x, 1, axis=1)
