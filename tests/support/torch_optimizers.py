"""PyTorch's optimizers on three parameters, and the same three in MLX."""

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten, tree_unflatten

from mlx_gradscale.convert import load_torch, save_torch

torch = pytest.importorskip("torch")

SHAPES = {"a.weight": (3, 4), "a.bias": (4,), "b": (2, 3, 2)}
# Both sides compute in float32 in another order of operations: a few units in the
# last place (2**-24 = 6e-8) per step and operation. MLX's bias correction 1 - beta**t
# is float32 (PyTorch's float64), which costs up to 1.3e-5 / 2 relative in an update.
# Over 20 updates of at most 0.05 on weights of order 1 that stays near 1e-6.
TOLERANCE = {"rtol": 3e-6, "atol": 3e-6}


class Lion(torch.optim.Optimizer):
    """The rule and the state of lion_pytorch: one exp_avg, either kind of decay."""

    def __init__(
        self, params, lr, betas=(0.9, 0.99), weight_decay=0.0, decoupled=False
    ):
        super().__init__(
            params, {"lr": lr, "betas": betas, "weight_decay": weight_decay}
        )
        self.divisor = lr if decoupled else 1.0

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            (b1, b2), lr = group["betas"], group["lr"]
            for p in (p for p in group["params"] if p.grad is not None):
                state = self.state[p]
                m = state.setdefault("exp_avg", torch.zeros_like(p))
                p.mul_(1 - lr / self.divisor * group["weight_decay"])
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
    "RMSprop": (torch.optim.RMSprop, {"lr": 0.01, "alpha": 0.9, "eps": 1e-5}),
    "Adagrad": (torch.optim.Adagrad, {"lr": 0.05, "initial_accumulator_value": 0.1}),
    "Adadelta": (torch.optim.Adadelta, {"lr": 0.5, "rho": 0.95}),
    "Lion": (Lion, {"lr": 0.01, "weight_decay": 0.1}),
}
EVERY = pytest.mark.parametrize("kind", KINDS)


class Params(nn.Module):
    """The same parameters in MLX."""

    def __init__(self):
        super().__init__()
        self.a = nn.Module()
        self.a.weight, self.a.bias = mx.zeros((3, 4)), mx.zeros(4)
        self.b = mx.zeros((2, 3, 2))


class Side:
    """PyTorch's side of a run."""

    def __init__(self, kind, **changes):
        start = gradients(99)
        self.params = {n: torch.nn.Parameter(torch.tensor(start[n])) for n in SHAPES}
        self.make, arguments = KINDS[kind]
        self.arguments = arguments | changes
        self.optimizer = self.make([*self.params.values()], **self.arguments)

    def regroup(self, *groups, **settings):
        """Start again with parameter groups, which list names."""
        params = [[self.params[name] for name in group["params"]] for group in groups]
        groups = [{**x, "params": y} for x, y in zip(groups, params, strict=True)]
        self.optimizer = self.make(groups, **settings)
        return self

    def steps(self, seeds, names=tuple(SHAPES)):
        for seed in seeds:
            for name, g in gradients(seed).items():
                self.params[name].grad = torch.tensor(g) if name in names else None
            self.optimizer.step()
        return self

    def save(self, path):
        model = {name: p.detach() for name, p in self.params.items()}
        torch.save({"model": model, "optimizer": self.optimizer.state_dict()}, path)
        return path

    def load(self, path):
        found = torch.load(path, weights_only=True)
        for name, value in found["model"].items():
            self.params[name].data = value
        self.optimizer.load_state_dict(found["optimizer"])
        return self


class Mine:
    """MLX's side of a run."""

    def __init__(self, path, **options):
        self.model, self.path, self.options = Params(), path, options
        self.run = load_torch(path, self.model, **options)
        self.optimizer = self.run.optimizer

    def steps(self, seeds):
        for seed in seeds:
            grads = [(n, mx.array(g)) for n, g in gradients(seed).items()]
            self.optimizer.update(self.model, tree_unflatten(grads))
        return self

    def save(self, path, **options):
        options = self.options | options
        save_torch(path, self.model, self.optimizer, like=self.path, **options)
        return path


def gradients(seed):
    rng = np.random.default_rng(seed)
    return {n: rng.normal(size=s).astype(np.float32) for n, s in SHAPES.items()}


def assert_close(mine, theirs):
    for name, array in tree_flatten(mine.model.parameters()):
        want = theirs.params[name].detach().numpy()
        np.testing.assert_allclose(np.array(array), want, **TOLERANCE, err_msg=name)


def assert_same_state(path, other):
    """Two files hold the same optimizer state, in every bit and type."""
    a, b = (torch.load(p, weights_only=True)["optimizer"] for p in (path, other))
    assert a["param_groups"] == b["param_groups"]
    assert a["state"].keys() == b["state"].keys()
    for index, slots in a["state"].items():
        assert slots.keys() == b["state"][index].keys()
        for slot, value in slots.items():
            got = b["state"][index][slot]
            assert type(got) is type(value)
            if isinstance(value, torch.Tensor):
                assert (got.dtype, got.shape) == (value.dtype, value.shape)
                assert got.numpy().tobytes() == value.numpy().tobytes()
            else:
                assert got == value
