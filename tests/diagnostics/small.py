"""A small regression for the tests of this folder."""

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten


class Mlp(nn.Module):
    def __init__(self, dtype=mx.float32):
        super().__init__()
        mx.random.seed(0)
        self.layers = [nn.Linear(8, 16), nn.Linear(16, 1)]
        self.set_dtype(dtype)

    def __call__(self, x):
        return self.layers[1](nn.relu(self.layers[0](x)))


def mse(model):
    def loss_fn(x, y):
        return mx.square(model(x).astype(mx.float32) - y).mean()

    return loss_fn


def batch(dtype=mx.float32):
    x = mx.random.normal((32, 8), key=mx.random.key(0))
    return x.astype(dtype), x.sum(axis=1, keepdims=True)


def bits(tree):
    """Return every array of a tree as bytes, with its path and dtype."""
    return [(p, x.dtype, bytes(memoryview(x))) for p, x in tree_flatten(tree)]
