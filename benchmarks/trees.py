"""The trees that are measured: parameters and gradients of a given shape."""

import math
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_map

Shapes = list[tuple[int, ...]]
_DRAWN = 10**6

MAIN = "8 M in 32 leaves"
LORA = "448 leaves of 16,000, as LoRA has"
TRANSFORMER = "a transformer, 12 layers of 256"


def shapes_of(name: str) -> Shapes:
    """Return the shapes of a named tree. The bars are about the first."""
    if name == MAIN:
        return [(500, 500)] * 32
    if name == LORA:
        return [(1000, 16), (16, 1000)] * 224
    return transformer_shapes()


def transformer_shapes(layers: int = 12, dims: int = 256) -> Shapes:
    """Return the shapes of a real model: embedding, attention, norms, biases."""
    model = nn.TransformerEncoder(layers, dims, num_heads=4)
    embedding = nn.Embedding(8000, dims)
    parameters = [embedding.parameters(), model.trainable_parameters()]
    return [x.shape for _, x in tree_flatten(parameters)]


def size(shapes: Shapes) -> int:
    """Return how many parameters there are."""
    return sum(math.prod(shape) for shape in shapes)


def make(shapes: Shapes, dtype: mx.Dtype = mx.float32, factor: float = 1.0) -> Any:
    """Return a tree of evaluated normal values, as a model's is nested."""
    # Drawing 256 M values takes half a minute; a million of them, repeated, will do.
    drawn = mx.random.normal((min(_DRAWN, max(map(math.prod, shapes))),))
    tree = {}
    for i, shape in enumerate(shapes):
        count = math.prod(shape)
        values = mx.tile(drawn, -(-count // drawn.size))[:count]
        leaf = (values * factor).astype(dtype).reshape(shape)
        # Leaf by leaf: all at once the repeated values of a whole tree are alive.
        mx.eval(leaf)
        tree[f"layer{i}"] = {"weight": leaf}
    return tree


def with_inf(tree: Any) -> Any:
    """Return the gradients with one inf in the first leaf."""
    bad = tree_map(lambda x: x, tree)
    leaf = bad["layer0"]["weight"]
    flat = mx.concatenate([mx.array([float("inf")], leaf.dtype), leaf.reshape(-1)[1:]])
    bad["layer0"]["weight"] = flat.reshape(leaf.shape)
    mx.eval(bad)
    return bad
