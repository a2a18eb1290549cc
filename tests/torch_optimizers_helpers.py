"""What the tests of optimizer states share: PyTorch's optimizers, steps, both ways."""

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten, tree_unflatten

from mlx_gradscale.convert.layouts import Entry
from mlx_gradscale.convert.optimizers import build
from mlx_gradscale.convert.optimizers.state import to_mlx

torch = pytest.importorskip("torch")

SHAPES = {"a.weight": (3, 4), "a.bias": (4,), "b": (2, 3, 2)}
ENTRIES = {name: Entry(name, (name,)) for name in SHAPES}
NAMES = dict(enumerate(SHAPES))
# Both sides compute in float32 in another order of operations: a few units in the
# last place (2**-24 = 6e-8) per step and operation. MLX's bias correction 1 - beta**t
# is float32 (PyTorch's float64), which costs up to 1.3e-5 / 2 relative in an update.
# Over 20 updates of at most 0.05 on weights of order 1 that stays below 1e-5.
TOLERANCE = {"rtol": 1e-5, "atol": 1e-5}


class Lion(torch.optim.Optimizer):
    """The rule and the state of the Lion packages: one exp_avg, decoupled decay."""

    def __init__(self, params, lr, betas=(0.9, 0.99), weight_decay=0.0):
        super().__init__(
            params, {"lr": lr, "betas": betas, "weight_decay": weight_decay}
        )

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            (b1, b2), lr = group["betas"], group["lr"]
            for p in group["params"]:
                state = self.state[p]
                m = state.setdefault("exp_avg", torch.zeros_like(p))
                p.mul_(1 - lr * group["weight_decay"])
                p.sub_(lr * torch.sign(b1 * m + (1 - b1) * p.grad))
                state["exp_avg"] = b2 * m + (1 - b2) * p.grad


KINDS = {
    "Adam": (torch.optim.Adam, {"lr": 0.02, "betas": (0.8, 0.99), "eps": 1e-6}),
    "AdamW": (torch.optim.AdamW, {"lr": 0.02, "weight_decay": 0.1}),
    "SGD": (torch.optim.SGD, {"lr": 0.02}),
    "SGD momentum": (torch.optim.SGD, {"lr": 0.02, "momentum": 0.9}),
    "SGD nesterov": (
        torch.optim.SGD,
        {"lr": 0.02, "momentum": 0.9, "nesterov": True, "weight_decay": 0.05},
    ),
    "SGD dampening": (
        torch.optim.SGD,
        {"lr": 0.02, "momentum": 0.9, "dampening": 0.3},
    ),
    "RMSprop": (torch.optim.RMSprop, {"lr": 0.01, "alpha": 0.9, "eps": 1e-5}),
    "Adagrad": (torch.optim.Adagrad, {"lr": 0.05, "initial_accumulator_value": 0.1}),
    "Adagrad decay": (torch.optim.Adagrad, {"lr": 0.05, "lr_decay": 0.1}),
    "Adadelta": (torch.optim.Adadelta, {"lr": 0.5, "rho": 0.95}),
    "Adamax": (torch.optim.Adamax, {"lr": 0.01, "betas": (0.8, 0.99)}),
    "Lion": (Lion, {"lr": 0.01, "weight_decay": 0.1}),
}
EVERY = pytest.mark.parametrize("kind", KINDS)


def gradients(seed):
    rng = np.random.default_rng(seed)
    return {n: rng.normal(size=s).astype(np.float32) for n, s in SHAPES.items()}


def torch_side(kind, **changes):
    cls, arguments = KINDS[kind]
    start = gradients(99)
    params = {n: torch.nn.Parameter(torch.tensor(start[n])) for n in SHAPES}
    return params, cls(list(params.values()), **(arguments | changes))


def torch_steps(params, optimizer, seeds):
    for seed in seeds:
        for name, g in gradients(seed).items():
            params[name].grad = torch.tensor(g)
        optimizer.step()


def mlx_steps(tree, optimizer, seeds):
    for seed in seeds:
        grads = tree_unflatten([(n, mx.array(g)) for n, g in gradients(seed).items()])
        tree = optimizer.apply_gradients(grads, tree)
    return tree


def as_mlx(value):
    """The object in a file, as torch_checkpoint.load gives it."""
    if isinstance(value, torch.Tensor):
        return mx.array(value.detach().numpy())
    if isinstance(value, dict):
        return {k: as_mlx(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(as_mlx(v) for v in value)
    return value


def as_torch(value):
    if isinstance(value, mx.array):
        return torch.tensor(np.array(value))
    if isinstance(value, dict):
        return {k: as_torch(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(as_torch(v) for v in value)
    return value


def convert(params, optimizer, **options):
    tensors = {n: as_mlx(p) for n, p in params.items()}
    done = to_mlx(as_mlx(optimizer.state_dict()), NAMES, ENTRIES, tensors, **options)
    return tree_unflatten(list(tensors.items())), done


def resumed(done):
    """The MLX optimizer that goes on from a converted state."""
    record = done.record
    groups = record.groups[:1] if record.joined else record.groups
    made = build(record.name, groups, record.names)
    made.state = tree_unflatten(list(done.flat.items()))
    return made


def close(tree, params):
    for name, array in tree_flatten(tree):
        np.testing.assert_allclose(
            np.array(array), params[name].detach().numpy(), **TOLERANCE, err_msg=name
        )
