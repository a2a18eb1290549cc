"""Models, trees, optimizers and counters that the tests share."""

import io
import re
from collections import Counter

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
from mlx.utils import tree_flatten, tree_map

BEFORE_0_32 = tuple(map(int, mx.__version__.split(".")[:2])) < (0, 32)
INF, NAN = float("inf"), float("nan")
BAD_VALUES = {"nan": NAN, "inf": INF, "-inf": -INF}


def multi():
    return optim.MultiOptimizer(
        [optim.Muon(0.02), optim.AdamW(1e-2, bias_correction=True)],
        [lambda path, weight: weight.ndim == 2 and "layers.0" in path],
    )


# Every optimizer in mlx.optimizers; test_guard checks that none is missing.
OPTIMIZERS = {
    "SGD": lambda: optim.SGD(0.1),
    "SGD momentum": lambda: optim.SGD(0.1, momentum=0.9, weight_decay=0.01),
    "SGD nesterov": lambda: optim.SGD(0.1, momentum=0.9, nesterov=True),
    "SGD dampening": lambda: optim.SGD(0.1, momentum=0.9, dampening=0.1),
    "SGD schedule": lambda: optim.SGD(optim.exponential_decay(0.1, 0.9), momentum=0.9),
    "RMSprop": lambda: optim.RMSprop(1e-2),
    "Adagrad": lambda: optim.Adagrad(1e-2),
    "AdaDelta": lambda: optim.AdaDelta(1.0),
    "Adam": lambda: optim.Adam(1e-2),
    "Adam corrected": lambda: optim.Adam(1e-2, bias_correction=True),
    "AdamW": lambda: optim.AdamW(1e-2),
    "AdamW corrected": lambda: optim.AdamW(1e-2, bias_correction=True),
    "AdamW schedule": lambda: optim.AdamW(optim.cosine_decay(1e-2, 50)),
    "Adamax": lambda: optim.Adamax(1e-2),
    "Lion": lambda: optim.Lion(1e-3, weight_decay=0.1),
    "Adafactor": lambda: optim.Adafactor(),
    "Adafactor moment": lambda: optim.Adafactor(
        1e-2, relative_step=False, beta_1=0.9, weight_decay=0.01
    ),
    "Muon": lambda: optim.Muon(0.02),
    "MultiOptimizer": multi,
}
NOT_ELEMENTWISE = {"Adafactor", "Adafactor moment", "Muon", "MultiOptimizer"}


# Adafactor of MLX before 0.32 fails on three dimensions.
_DEEP = (2, 6) if BEFORE_0_32 else (2, 3, 2)


def parameters(dtype=mx.float32, seed=0):
    """A tree with every container and shape that real models have."""
    key = mx.random.key(seed)
    shapes = {
        "layers": [{"weight": (4, 6), "bias": (4,)}, {"weight": (4, 6)}],
        "frozen": [{}, {"weight": (2, 2), "rope": {}, "types": []}],
        "scale": (3,),
        "pair": [(2, 2), _DEEP],
        "single": (1,),
        "empty": (0, 3),
    }

    def make(shape):
        nonlocal key
        key, use = mx.random.split(key)
        return mx.random.normal(shape, key=use).astype(dtype)

    def is_shape(x):
        return isinstance(x, tuple)

    return tree_map(make, shapes, is_leaf=is_shape)


def gradients_like(tree, seed, scale=1.0, dtype=mx.float32):
    leaves = tree_flatten(tree)
    keys = mx.random.split(mx.random.key(seed), len(leaves))
    values = iter(
        (mx.random.normal(x.shape, key=k) * scale).astype(dtype)
        for (_, x), k in zip(leaves, keys, strict=True)
    )
    return tree_map(lambda _: next(values), tree)


def poison(tree, path, value):
    """Put ``value`` into the last element of the leaf at ``path``."""

    def put(where, x):
        if where != path:
            return x
        flat = np.array(x.astype(mx.float32)).reshape(-1)
        flat[-1] = value
        return mx.array(flat.reshape(x.shape)).astype(x.dtype)

    from mlx.utils import tree_map_with_path

    return tree_map_with_path(put, tree)


def bits(tree):
    """Every leaf as (shape, dtype, bytes): equal only if bit-identical."""
    found = {}
    for path, x in tree_flatten(tree):
        raw = x.view(mx.uint16) if x.dtype == mx.bfloat16 else x
        found[path] = (x.shape, str(x.dtype), np.array(raw).tobytes())
    return found


def same(a, b):
    return bits(a) == bits(b)


class Mlp(nn.Module):
    def __init__(self, width=16, dtype=mx.float32):
        super().__init__()
        self.layers = [nn.Linear(8, width), nn.Linear(width, 1)]
        self.set_dtype(dtype)

    def __call__(self, x):
        return self.layers[1](nn.relu(self.layers[0](x)))


def mse(model):
    def loss_fn(x, y):
        difference = model(x).astype(mx.float32) - y.astype(mx.float32)
        return mx.mean(mx.square(difference))

    return loss_fn


def batch(seed=0, n=32, dtype=mx.float32):
    x = mx.random.normal((n, 8), key=mx.random.key(seed))
    return x.astype(dtype), mx.sum(x, axis=1, keepdims=True)


_VIEWS = {
    "Squeeze",
    "ExpandDims",
    "Broadcast",
    "Reshape",
    "Transpose",
    "Slice",
    "Split",
    "View",
    "Contiguous",
    "Depends",
    "Flatten",
    "Unflatten",
}


def kernels(outputs):
    """The primitives that computing ``outputs`` launches; views launch nothing."""
    file = io.StringIO()
    mx.export_to_dot(file, [x for _, x in tree_flatten(outputs)])
    names = re.findall(r'label ="([^"]*)", shape=rectangle', file.getvalue())
    return [name for name in names if name.split()[0] not in _VIEWS]


def most_buffers(inputs, outputs):
    """How many arrays the largest fused kernel that computes ``outputs`` takes.

    Its inputs, scalars among them, and its outputs. Not the constants, which MLX
    prints into the kernel: all that is there at the start and not in ``inputs``.
    """
    given = [x for _, x in tree_flatten(inputs)]
    names = {f"given{i}": x for i, x in enumerate(given)}
    file = io.StringIO()
    mx.export_to_dot(file, [x for _, x in tree_flatten(outputs)], **names)
    text = file.getvalue()
    fused = set(re.findall(r'(\d+) \[label ="Compiled', text))
    sources = set(re.findall(r'rank=source; "(\w+)"', text))
    reads = set(re.findall(r'"(\w+)" -> (\d+)', text))
    writes = set(re.findall(r'(\d+) -> "(\w+)"', text))
    taken = [node for x, node in reads if x not in sources - names.keys()]
    counts = Counter([*taken, *(node for node, _ in writes)])
    return max(counts[node] for node in fused)


def address(x):
    """Where in memory an evaluated array is: views of it have the same."""
    return np.array(x, copy=False).__array_interface__["data"][0]


def bytes_moved(before, after):
    """The bytes of these two trees that computing ``after`` reads and writes.

    What a kernel takes twice, as weights and as their bits, it reads once. Only what
    kernels take as it is: not what they read through a view, as the finite check does,
    not what goes from one to another, and no scalars.
    """
    old, new = ([x for _, x in tree_flatten(t) if x.ndim] for t in (before, after))
    names = {f"x{i}": x for i, x in enumerate([*old, *new])}
    file = io.StringIO()
    mx.export_to_dot(file, [x for _, x in tree_flatten(after)], **names)
    nodes = re.findall(r'(\d+) \[label ="([^"]*)", shape', file.getvalue())
    launched = {node for node, name in nodes if name.split()[0] not in _VIEWS}
    reads = re.findall(r'"(x\d+)" -> (\d+)', file.getvalue())
    writes = re.findall(r'(\d+) -> "(x\d+)"', file.getvalue())
    # Of the old ones only, which are evaluated; nothing is written in their place.
    places = {name: address(x) for name, x in names.items() if int(name[1:]) < len(old)}
    read = {(places[x], node): names[x].nbytes for x, node in reads if node in launched}
    written = [names[x].nbytes for node, x in writes if node in launched]
    return sum([*read.values(), *written])


class Traced:
    """Count how often a function is run: inside ``mx.compile``, how often traced."""

    def __init__(self, function):
        self.function = function
        self.count = 0

    def __call__(self, *args, **kwargs):
        self.count += 1
        return self.function(*args, **kwargs)
