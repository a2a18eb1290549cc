"""One small regression in PyTorch and in MLX, on the same numbers."""

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np

from mlx_gradscale.convert import load_torch, save_torch
from mlx_gradscale.convert.command import main


def batch(number, rows=8):
    """The data of a step: the same for both."""
    rng = np.random.default_rng(number)
    x = rng.standard_normal((rows, 3)).astype(np.float32)
    return x, (x.sum(1) + 0.1 * x[:, 0] ** 2).astype(np.float32)


class Net(nn.Module):
    """As :func:`torch_net`; two layers have the same shape."""

    def __init__(self):
        super().__init__()
        self.layers = [nn.Linear(3, 8), nn.Linear(8, 8), nn.Linear(8, 8)]
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 1)

    def __call__(self, x):
        for layer in self.layers:
            x = nn.relu(layer(x))
        return self.head(self.norm(x))[:, 0]


def torch_net():
    import torch

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            sizes = ((3, 8), (8, 8), (8, 8))
            layers = [torch.nn.Linear(a, b) for a, b in sizes]
            self.layers = torch.nn.ModuleList(layers)
            self.norm = torch.nn.LayerNorm(8)
            self.head = torch.nn.Linear(8, 1)

        def forward(self, x):
            for layer in self.layers:
                x = torch.relu(layer(x))
            return self.head(self.norm(x))[:, 0]

    torch.manual_seed(0)
    return Net()


def torch_steps(net, optimizer, numbers, scaler=None, after=None):
    """Steps in PyTorch; their losses."""
    import torch

    scaler, losses = scaler or torch.amp.GradScaler("cpu", enabled=False), []
    for number in numbers:
        x, y = map(torch.tensor, batch(number))
        loss = (net(x) - y).pow(2).mean()
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        if after is not None:
            after(net)
        losses.append(loss.item())
    return losses


def square(y, z):
    return ((y - z) ** 2).mean()


def mlx_steps(
    path,
    back,
    numbers,
    net=None,
    data=batch,
    loss_of=square,
    max_norm=None,
    options=None,
    **settings,
):
    """Load a checkpoint, take steps in MLX and save it again; return the losses."""
    net = net or Net()
    options = options or {}
    run = load_torch(path, net, **options, **settings)
    value_and_grad = nn.value_and_grad(net, lambda x, y: loss_of(net(x), y))
    losses = []
    for number in numbers:
        loss, grads = value_and_grad(*map(mx.array, data(number)))
        if max_norm is not None:
            grads, _ = optim.clip_grad_norm(grads, max_norm)
        run.optimizer.update(net, grads)
        losses.append(loss.item())
    save_torch(back, net, run.optimizer, run.scaler, like=path, **options)
    return losses


def convert(torch_path, mlx_path, *flags):
    arguments = ["--torch-path", str(torch_path), "--mlx-path", str(mlx_path)]
    assert main([*arguments, *map(str, flags)]) == 0


# Both sides compute in float32 and add up in another order. The gradients of such
# small nets differ by some 1e-7 relative, Adam's bias correction by up to 6e-6 (MLX's
# is float32), and 20 steps through BatchNorm or attention multiply that by about ten;
# the weights are of order 1. Measured: 4e-6 at most.
TOLERANCE = {"rtol": 2e-5, "atol": 2e-5}
MODEL = ("--model", "support.regression:Net")


def assert_near(losses, want):
    """Losses are PyTorch's own."""
    np.testing.assert_allclose(losses, want, **TOLERANCE)
