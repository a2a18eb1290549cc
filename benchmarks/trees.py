"""The trees that are measured: parameters and gradients of a given shape."""

from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_map

Shapes = list[tuple[int, ...]]

# Name, shapes. The first is the one that the bars are about.
SHAPES: dict[str, Shapes] = {
    "8 M in 32 leaves": [(500, 500)] * 32,
    "LoRA-like, 448 of 16,000": [(1000, 16), (16, 1000)] * 224,
    "4,000 leaves of 64": [(64,)] * 4000,
    "one leaf of 64 M": [(8192, 8192)],
}
MAIN = "8 M in 32 leaves"
LORA = "LoRA-like, 448 of 16,000"
TRANSFORMER = "transformer, 12 layers of 256"
OTHERS = ("4,000 leaves of 64", "one leaf of 64 M", TRANSFORMER)


def shapes_of(name: str) -> Shapes:
    """Return the shapes of a named tree."""
    return transformer_shapes() if name == TRANSFORMER else SHAPES[name]


def transformer_shapes(layers: int = 12, dims: int = 256) -> Shapes:
    """Return the shapes of a real model: embedding, attention, norms, biases."""
    model = nn.TransformerEncoder(layers, dims, num_heads=4)
    embedding = nn.Embedding(8000, dims)
    parameters = [embedding.parameters(), model.trainable_parameters()]
    return [x.shape for _, x in tree_flatten(parameters)]


def size(shapes: Shapes) -> int:
    """Return how many parameters there are."""
    total = 0
    for shape in shapes:
        count = 1
        for length in shape:
            count *= length
        total += count
    return total


def make(shapes: Shapes, dtype: mx.Dtype = mx.float32, factor: float = 1.0) -> Any:
    """Return a tree of evaluated normal values, as a model's is nested."""
    tree = {
        f"layer{i}": {"weight": (mx.random.normal(shape) * factor).astype(dtype)}
        for i, shape in enumerate(shapes)
    }
    # Leaf by leaf: all at once the random bits of a whole tree are alive.
    for _, leaf in tree_flatten(tree):
        mx.eval(leaf)
    return tree


def with_inf(tree: Any) -> Any:
    """Return the gradients with one inf in the first leaf."""
    bad = tree_map(lambda x: x, tree)
    leaf = bad["layer0"]["weight"]
    flat = mx.concatenate([mx.array([float("inf")], leaf.dtype), leaf.reshape(-1)[1:]])
    bad["layer0"]["weight"] = flat.reshape(leaf.shape)
    mx.eval(bad)
    return bad
