"""Writes the golden checkpoints: in tests/, python -m golden.convert.make.

For each model and optimizer: a checkpoint after BEFORE steps (one of them an
overflow), and PyTorch's own next AFTER steps as the numbers to meet. The tests
use the functions here for live runs too, where PyTorch is installed.
"""

import json
from pathlib import Path

import numpy as np
import torch
from golden.convert.data import (
    AFTER,
    BEFORE,
    CLASSES,
    LENGTH,
    OVERFLOWS,
    TOKENS,
    WIDTH,
    batch,
)
from torch import nn

HERE = Path(__file__).parent
torch.set_num_threads(1)  # tensors this small only wait for each other
OPTIMIZERS = {
    "adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=0.01),
}


# No bias before a BatchNorm and none on the keys: their gradients are zero but for
# rounding, and Adam would make steps of full size out of that.
class ConvNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(2, 4, 3, bias=False),
            nn.BatchNorm2d(4),
            nn.ReLU(),
            nn.Conv2d(4, 6, 3, stride=2, bias=False),
            nn.BatchNorm2d(6),
            nn.Tanh(),
        )
        self.up = nn.ConvTranspose2d(6, 4, 3, stride=2)
        self.head = nn.Linear(4, CLASSES)

    def forward(self, x):
        x = self.up(self.features(x.permute(0, 3, 1, 2)))
        return self.head(x.mean((2, 3)))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1 = nn.LayerNorm(WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 2, bias=False, batch_first=True)
        self.norm2 = nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 2 * WIDTH), nn.ReLU(), nn.Linear(2 * WIDTH, WIDTH)
        )

    def forward(self, x, mask):
        y = self.norm1(x)
        x = x + self.attention(y, y, y, attn_mask=mask, need_weights=False)[0]
        return x + self.mlp(self.norm2(x))


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(TOKENS, WIDTH)
        self.position = nn.Parameter(torch.zeros(1, LENGTH, WIDTH))
        self.blocks = nn.ModuleList([Block()])
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, TOKENS, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x):
        mask = nn.Transformer.generate_square_subsequent_mask(LENGTH)
        x = self.embed(x) + self.position
        for block in self.blocks:
            x = block(x, mask)
        return self.head(self.norm(x))


def two_groups(parameters):
    """Weight decay on the matrices only, and another learning rate."""
    parameters = list(parameters)
    matrices = [p for p in parameters if p.ndim > 1]
    rest = [p for p in parameters if p.ndim <= 1]
    groups = [{"params": matrices}, {"params": rest, "lr": 0.005, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=0.01, weight_decay=0.1)


MODELS = {"conv": ConvNet, "transformer": Transformer}


class Training:
    """One PyTorch run: model, optimizer and scaler, a step at a time."""

    def __init__(self, kind, optimizer):
        torch.manual_seed(0)
        self.kind = kind
        self.model = MODELS[kind]()
        make = OPTIMIZERS.get(optimizer, two_groups)
        self.optimizer = make(self.model.parameters())
        self.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=4)
        self.scaler.scale(torch.zeros(()))  # else PyTorch makes its state later

    def step(self, number):
        x, y = (torch.tensor(a) for a in batch(self.kind, number))
        logits = self.model(x)
        logits = logits.reshape(-1, logits.shape[-1])
        loss = nn.functional.cross_entropy(logits, y.reshape(-1))
        if number in OVERFLOWS:
            loss = loss * float("inf")
        self.optimizer.zero_grad()
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def checkpoint(self):
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scaler": self.scaler.state_dict(),
            "epoch": 3,
            "history": [(0, 1.5), (1, 1.25)],
        }

    def load(self, checkpoint):
        self.model.load_state_dict(checkpoint["model"], strict=True)
        self.optimizer.load_state_dict(checkpoint["optimizer"])
        self.scaler.load_state_dict(checkpoint["scaler"])

    def scale(self):
        state = self.scaler.state_dict()
        return [state["scale"], state["_growth_tracker"]]

    def weights(self):
        state = self.model.state_dict()
        return {name: tensor.numpy().copy() for name, tensor in state.items()}


def main():
    for kind in MODELS:
        for optimizer in OPTIMIZERS:
            run = Training(kind, optimizer)
            for number in range(BEFORE):
                run.step(number)
            name = f"{kind}_{optimizer}"
            torch.save(run.checkpoint(), HERE / f"{name}.pt")
            scales = []
            for number in range(BEFORE, BEFORE + AFTER):
                run.step(number)
                scales.append(run.scale())
            np.savez_compressed(HERE / f"{name}.npz", **run.weights())
            (HERE / f"{name}.json").write_text(json.dumps(scales) + "\n")
            print(name)


if __name__ == "__main__":
    main()
