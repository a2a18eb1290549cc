"""Models, trees and optimizers that the tests share."""

import pickle
from contextlib import contextmanager

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
import pytest
from mlx.utils import tree_flatten, tree_map, tree_map_with_path

INF, NAN = float("inf"), float("nan")
each_mode = pytest.mark.parametrize(
    "compiled",
    [
        False,
        pytest.param(True, marks=[pytest.mark.compiles, pytest.mark.many_kernels]),
    ],
    ids=["eager", "compiled"],
)
BAD_VALUES = {"nan": NAN, "inf": INF, "-inf": -INF}


def multi():
    return optim.MultiOptimizer(
        [optim.Muon(0.02), optim.AdamW(1e-2, bias_correction=True)],
        [lambda path, weight: weight.ndim == 2 and "layers.0" in path],
    )


# Every optimizer in mlx.optimizers; test_skip_matrix checks that none is missing.
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


def parameters(dtype=mx.float32, seed=0):
    """A tree with every container and shape that real models have."""
    key = mx.random.key(seed)
    shapes = {
        "layers": [{"weight": (4, 6), "bias": (4,)}, {"weight": (4, 6)}],
        "frozen": [{}, {"weight": (2, 2), "rope": {}, "types": []}],
        "scale": (3,),
        "pair": [(2, 2), (2, 3, 2)],
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

    return tree_map_with_path(put, tree)


def bits(tree):
    """Every leaf as (shape, dtype, bytes): equal only if bit-identical."""
    found = {}
    for path, x in tree_flatten(tree):
        raw = x.view(mx.uint16) if x.dtype == mx.bfloat16 else x
        found[path] = (x.shape, str(x.dtype), np.array(raw).tobytes())
    return found


@contextmanager
def refused(error, match, *unchanged):
    """Expect an error that leaves trees, or the states of objects, as they were."""

    def now():
        return [bits(getattr(x, "state", x)) for x in unchanged]

    before = now()
    with pytest.raises(error, match=match):
        yield
    assert now() == before


def dtypes(tree):
    return {x.dtype for _, x in tree_flatten(tree)}


def model_state(model):
    """Everything that a diagnostic must leave as it was."""
    classes = [(p, id(type(m)), dict(vars(m))) for p, m in model.named_modules()]
    return bits(model.parameters()), classes, mx.random.state[0].tolist()


def same(a, b):
    return bits(a) == bits(b)


class Mlp(nn.Module):
    def __init__(self, width=16, dtype=mx.float32):
        super().__init__()
        self.layers = [nn.Linear(8, width), nn.Linear(width, 1)]
        self.set_dtype(dtype)

    def __call__(self, x):
        return self.layers[1](nn.relu(self.layers[0](x)))


def gradient_of(kind, source, model, loss_fn):
    """Return the function of a loss and its gradients that a scaler or MLX makes."""
    if kind in ("mlx", "scale_loss"):
        loss_fn = source.scale_loss(loss_fn, model) if kind != "mlx" else loss_fn
        return nn.value_and_grad(model, loss_fn)
    dtype = mx.float16 if kind == "compute_dtype" else None
    return source.value_and_grad(model, loss_fn, dtype)


def compiled_if(compiled, step, *state):
    """Return a step, compiled with its state if asked to."""
    state = list(state)
    return mx.compile(step, inputs=state, outputs=state) if compiled else step


def mse(model):
    def loss_fn(x, y):
        difference = model(x).astype(mx.float32) - y.astype(mx.float32)
        return mx.mean(mx.square(difference))

    return loss_fn


def batch(seed=0, n=32, dtype=mx.float32):
    x = mx.random.normal((n, 8), key=mx.random.key(seed))
    return x.astype(dtype), mx.sum(x, axis=1, keepdims=True)


def pickled(x):
    return pickle.loads(pickle.dumps(x))


class Traced:
    """Count how often a function is run: inside ``mx.compile``, how often traced."""

    def __init__(self, function):
        self.function = function
        self.count = 0

    def __call__(self, *args, **kwargs):
        self.count += 1
        return self.function(*args, **kwargs)
