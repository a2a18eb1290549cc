"""Start a run in PyTorch, resume it in MLX, and return to PyTorch.

PyTorch trains a small net with AdamW and a GradScaler and saves a checkpoint. MLX
resumes from this checkpoint while PyTorch continues too, and the losses and scales
agree. Then the run returns to PyTorch. The conversion itself does not need PyTorch.

    python examples/torch_resume.py
"""

import tempfile
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import torch

from mlx_gradscale import torch_checkpoint
from mlx_gradscale.convert import load_torch, save_torch

rng = np.random.default_rng(0)
images = rng.normal(size=(64, 8, 8, 1)).astype(np.float32)  # channels last, for MLX
labels = (images.mean((1, 2, 3)) > 0).astype(np.int64)


def torch_net():
    return torch.nn.Sequential(
        torch.nn.Conv2d(1, 8, 3, bias=False),
        torch.nn.BatchNorm2d(8),
        torch.nn.ReLU(),
        torch.nn.Conv2d(8, 8, 3),
        torch.nn.AdaptiveAvgPool2d(1),
        torch.nn.Flatten(),
        torch.nn.Linear(8, 2),
    )


def mlx_net():
    """Return the same net with each layer at the same index."""
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, bias=False),
        nn.BatchNorm(8),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3),
        lambda x: x.mean((1, 2)),
        nn.Identity(),
        nn.Linear(8, 2),
    )


def torch_step(net, optimizer, scaler):
    x, y = torch.tensor(images).permute(0, 3, 1, 2), torch.tensor(labels)
    loss = torch.nn.functional.cross_entropy(net(x), y)
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    return loss.item()


def run(folder):
    torch.manual_seed(0)
    net = torch_net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", growth_interval=8)
    for _ in range(10):
        torch_step(net, optimizer, scaler)
    parts = {"model": net, "optimizer": optimizer, "scaler": scaler}
    states = {key: part.state_dict() for key, part in parts.items()}
    torch.save({**states, "epoch": 10}, folder / "run.pt")

    model = mlx_net()
    resumed = load_torch(folder / "run.pt", model)
    x, y = mx.array(images), mx.array(labels)
    loss_and_grad = resumed.scaler.value_and_grad(
        model, lambda model, x, y: nn.losses.cross_entropy(model(x), y).mean()
    )
    for step in range(10, 20):
        loss, grads = loss_and_grad(model, x, y)
        resumed.scaler.minimize(resumed.optimizer, model, grads)
        theirs, scale = torch_step(net, optimizer, scaler), resumed.scaler.get_scale()
        print(f"step {step}: loss {loss.item():.6f} (PyTorch {theirs:.6f}), ", end="")
        print(f"scale {scale:.0f} (PyTorch {scaler.get_scale():.0f})")

    # The original's weights and states are replaced. MLX has no epoch, so set it.
    original = torch_checkpoint.load(folder / "run.pt")
    original["epoch"] = 20
    parts_in_mlx = (model, resumed.optimizer, resumed.scaler)
    save_torch(folder / "back.pt", *parts_in_mlx, like=original)
    back = torch.load(folder / "back.pt", weights_only=True)
    for key, part in parts.items():
        part.load_state_dict(back[key])
    assert back["epoch"] == 20
    print(f"PyTorch continues: loss {torch_step(net, optimizer, scaler):.6f}")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        run(Path(temporary))
