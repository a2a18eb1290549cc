"""Models of the golden runs, small checkpoints, and steps for the convert tests."""

from collections import Counter, OrderedDict
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from golden.convert.data import CLASSES, LENGTH, OVERFLOWS, TOKENS, WIDTH, batch
from mlx.utils import tree_unflatten

from mlx_gradscale import torch_checkpoint
from mlx_gradscale.convert import TorchRun, load_torch, save_torch
from mlx_gradscale.convert.command import main
from mlx_gradscale.convert.sections import find_sections
from mlx_gradscale.torch_checkpoint import Tensor
from support.regression import TOLERANCE, convert

GOLDEN = Path(__file__).parents[1] / "golden" / "convert"
RUNS = [f"{k}_{o}" for k in ("conv", "transformer") for o in ("adam", "adamw", "sgd")]


class ConvNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(2, 4, 3, bias=False),
            nn.BatchNorm(4),
            nn.ReLU(),
            nn.Conv2d(4, 6, 3, stride=2, bias=False),
            nn.BatchNorm(6),
            nn.Tanh(),
        )
        self.up = nn.ConvTranspose2d(6, 4, 3, stride=2)
        self.head = nn.Linear(4, CLASSES)

    def __call__(self, x):
        return self.head(self.up(self.features(x)).mean((1, 2)))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1 = nn.LayerNorm(WIDTH)
        self.attention = nn.MultiHeadAttention(WIDTH, 2)
        self.norm2 = nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 2 * WIDTH), nn.ReLU(), nn.Linear(2 * WIDTH, WIDTH)
        )

    def __call__(self, x, mask):
        y = self.norm1(x)
        x = x + self.attention(y, y, y, mask)
        return x + self.mlp(self.norm2(x))


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(TOKENS, WIDTH)
        self.position = mx.zeros((1, LENGTH, WIDTH))
        self.blocks = [Block()]
        self.norm = nn.LayerNorm(WIDTH)

    def __call__(self, x):
        x = self.embed(x) + self.position
        mask = nn.MultiHeadAttention.create_additive_causal_mask(LENGTH, x.dtype)
        for block in self.blocks:
            x = block(x, mask)
        return self.embed.as_linear(self.norm(x))


class Small(nn.Module):
    def __init__(self, size=3):
        super().__init__()
        self.fc = nn.Linear(size, 2)


class Holder(nn.Module):
    """A model with these parameters and no layers."""

    def __init__(self, tensors):
        super().__init__()
        for name, value in tree_unflatten(list(tensors.items())).items():
            self[name] = value


MODELS = {"conv": ConvNet, "transformer": Transformer}


def mlx_model(name):
    return MODELS[name.split("_")[0]]()


def model_flag(name):
    return ["--model", f"{__name__}:{MODELS[name.split('_')[0]].__name__}"]


def go_on(name, model, run, steps):
    """MLX's own steps; the scale and tracker after each."""
    kind, scales = name.split("_")[0], []

    def loss_fn(model, x, y, factor):
        logits = model(x)
        logits = logits.reshape(-1, logits.shape[-1])
        return nn.losses.cross_entropy(logits, y.reshape(-1), reduction="mean") * factor

    # PyTorch's way, in which a loss that is inf backs the scale off as there.
    value_and_grad = nn.value_and_grad(model, run.scaler.scale_loss(loss_fn))
    for number in steps:
        x, y = map(mx.array, batch(kind, number))
        factor = float("inf") if number in OVERFLOWS else 1.0
        _, grads = value_and_grad(model, x, y, factor)
        run.scaler.minimize(run.optimizer, model, grads)
        state = run.scaler.state_dict()
        scales.append([state["scale"], state["_growth_tracker"]])
    return scales


def compare(weights, want):
    assert weights.keys() == want.keys()
    for key, value in want.items():
        if key.endswith("num_batches_tracked"):
            continue  # MLX has none
        np.testing.assert_allclose(
            np.array(weights[key]), value, **TOLERANCE, err_msg=key
        )


SMALL = ("--model", f"{__name__}:Small")


def forward(torch_path, mlx_path, *flags):
    convert(torch_path, mlx_path, *SMALL, *flags)


def identical(a, b):
    assert type(a) is type(b)
    if isinstance(a, mx.array):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        assert np.array(a).tobytes() == np.array(b).tobytes()
    elif isinstance(a, dict):
        assert list(a) == list(b)
        assert getattr(a, "_metadata", None) == getattr(b, "_metadata", None)
        for key in a:
            identical(a[key], b[key])
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            identical(x, y)
    else:
        assert a == b


def small(seed=0):
    """A little state dict with an SGD state and a scaler state, as plain objects."""
    weight = mx.arange(6, dtype=mx.float32).reshape(2, 3) + seed
    model = OrderedDict({"fc.weight": weight, "fc.bias": mx.array([1.0, 2.0])})
    optimizer = {
        "state": {
            0: {"momentum_buffer": weight * 2},
            1: {"momentum_buffer": mx.array([3.0, 4.0])},
        },
        "param_groups": [sgd([0, 1])],
    }
    scaler = {
        "scale": 512.0,
        "growth_factor": 2.0,
        "backoff_factor": 0.5,
        "growth_interval": 2000,
        "_growth_tracker": 7,
    }
    return model, optimizer, scaler


def small_adam():
    """The same model with an Adam state at step 3, and its only group."""
    weights = {"fc.weight": mx.ones((2, 3)), "fc.bias": mx.zeros(2)}
    state = {
        i: {"step": mx.array(3.0), "exp_avg": x + 1, "exp_avg_sq": x + 2}
        for i, x in enumerate(weights.values())
    }
    group = {"lr": 0.1, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.0,
             "amsgrad": False, "params": [0, 1]}  # fmt: skip
    return weights, {"state": state, "param_groups": [group]}, group


def small_run(**more):
    """A checkpoint with small_adam() and more entries."""
    weights, optimizer, _ = small_adam()
    return {"model": weights, "optimizer": optimizer, **more}


class Trip(NamedTuple):
    """What became of a checkpoint on its way through MLX."""

    model: nn.Module
    run: TorchRun
    back: Any
    notes: list


def round_trip(folder, checkpoint, steps=0, model=None, **options):
    """Save a checkpoint as a.pt, load it, take steps in MLX, and save it as b.pt."""
    torch_checkpoint.save(folder / "a.pt", checkpoint)
    model = model or Small()
    run = load_torch(folder / "a.pt", model, **options)
    for _ in range(steps):
        take_step(model, run.optimizer)
    parts = model, run.optimizer, run.scaler
    notes = save_torch(folder / "b.pt", *parts, like=folder / "a.pt", **options)
    return Trip(model, run, torch_checkpoint.load(folder / "b.pt"), notes)


def take_step(model, optimizer):
    """One step of a Small model."""
    _, grads = nn.value_and_grad(model, lambda x: model.fc(x).sum())(mx.ones((1, 3)))
    optimizer.update(model, grads)


def sgd(params, **more):
    return {"lr": 0.1, "momentum": 0.9, "dampening": 0, "weight_decay": 0,
            "nesterov": False, "params": params, **more}  # fmt: skip


def shapes_of_checkpoints():
    model, optimizer, scaler = small()
    return {
        "usual": {"model": model, "optimizer": optimizer, "scaler": scaler, "epoch": 3},
        "other names": {"net": model, "opt": optimizer, "amp": scaler, "best": 0.5},
        "nested": {"state": {"net": model, "solver": [optimizer]}, "amp": scaler},
        "lightning": {
            "epoch": 1,
            "global_step": 70,
            "pytorch-lightning_version": "2.5.0",
            "state_dict": model,
            "loops": {"fit_loop": {"state_dict": {}, "epoch_progress": {"n": 1}}},
            "callbacks": {"ModelCheckpoint{'monitor': None}": {"best": ""}},
            "optimizer_states": [optimizer],
            # MultiStepLR's
            "lr_schedulers": [{"last_epoch": 3, "milestones": Counter({8: 1, 11: 2})}],
            "MixedPrecision": scaler,
            "hparams": {"lr": 0.1},
        },
        "mmengine": {
            "state_dict": model,
            "optimizer": {**optimizer, "loss_scaler": scaler},
            "meta": {"epoch": 3},
        },
        # tensors at the top level
        "torchtitan": {**model, "opt": optimizer, "amp": scaler, "train": {"n": 1}},
    }


def paths(tmp_path, checkpoint=None):
    if checkpoint is not None:
        torch_checkpoint.save(tmp_path / "a.pt", checkpoint)
    where = ["--torch-path", f"{tmp_path}/a.pt", "--mlx-path", f"{tmp_path}/run"]
    return [*where, *SMALL]


def usual():
    return shapes_of_checkpoints()["usual"]


def find(tree, keys):
    """The sections of an object, as if it were in a file."""
    tensors = torch_checkpoint.replace_tensors(tree, lambda _, x: Tensor.of(x))
    return find_sections(tensors, keys)


def fails(capsys, *arguments):
    assert main(list(arguments)) == 1
    said = capsys.readouterr().err.strip().splitlines()[-1]
    assert said.startswith("error: ")
    return said
