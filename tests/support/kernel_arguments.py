"""How many arrays the kernels of a step take, for every way of training."""

import itertools

import mlx.core as mx
from mlx.utils import tree_map

from mlx_gradscale import LossScaleOptimizer
from support.graphs import most_buffers
from support.helpers import OPTIMIZERS, mse

# Metal has 31 for a kernel, and MLX needs three for shape, strides and their number. It
# throws above that, when the kernel is built; its own limit, 24 arrays to fuse, is
# looked at before the last ones are added.
BOUND = 28
DTYPES = (mx.float32, mx.float16, mx.bfloat16)


def one_step(make, dtype, gradients="scaled", **arguments):
    """Arrays before and after a compiled step, which is not evaluated.

    Args:
        make (Callable): Returns an optimizer.
        dtype (Dtype): Of the parameter.
        gradients (str): "true", which are float32, or "scaled".
        **arguments: Those of LossScaleOptimizer.
    """
    optimizer = LossScaleOptimizer(make(), **arguments)
    parameters = {"w": mx.ones((4, 6), dtype)}
    given = {"w": mx.ones((4, 6), mx.float32 if gradients == "true" else dtype)}
    optimizer.init(parameters)
    optimizer.scale_loss(mse, unscale=gradients == "true")
    mx.eval(parameters, given, optimizer.state)
    before = tree_map(lambda x: x, [parameters, given, optimizer.state])
    state = optimizer.state
    step = mx.compile(optimizer.apply_gradients, inputs=state, outputs=state)
    return before, [step(given, parameters), state]


def counts(name, dtypes=DTYPES, **ranks):
    """For each way to train with an optimizer, the arrays of its largest kernel.

    Args:
        name (str): Which of OPTIMIZERS.
        dtypes (tuple): Of the parameter.
        **ranks: The distributed arguments of LossScaleOptimizer.
    """
    found = {}
    for dtype, masters, norm, gradients in itertools.product(
        dtypes, ("float32", "remainder"), (None, 1.0), ("true", "scaled")
    ):
        if ranks.get("average") == "scaled" and gradients == "true":
            continue  # is refused
        arguments = {"masters": masters, "max_grad_norm": norm, **ranks}
        arrays = one_step(OPTIMIZERS[name], dtype, gradients, **arguments)
        way = f"{name}, {dtype}, {masters}, {norm}, {gradients}"
        found[way] = most_buffers(*arrays)
    return found
