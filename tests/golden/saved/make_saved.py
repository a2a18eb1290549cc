"""Write what this version saves, for later versions to read.

    python tests/golden/saved/make_saved.py

Run it for each release. Files of an earlier version are never made again.
"""

from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
from mlx.utils import tree_flatten, tree_map

from mlx_gradscale import (
    GradScaler,
    LossScaleOptimizer,
    __version__,
    save_checkpoint,
    torch_checkpoint,
)
from mlx_gradscale.convert.command import main as convert
from mlx_gradscale.diagnostics import ScaleHistory
from mlx_gradscale.float32 import Float32Search

SCALE, GROWTH_INTERVAL, STEPS = 512.0, 7, 3


def make_run() -> tuple[nn.Module, LossScaleOptimizer]:
    """Return a model of known weights, and an optimizer with known settings."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    known = lambda x: mx.full(x.shape, 0.5 if x.ndim > 1 else 0.0)  # noqa: E731
    model.update(tree_map(known, model.parameters()))
    model.set_dtype(mx.float16)
    scaler = GradScaler(SCALE, growth_interval=GROWTH_INTERVAL, hysteresis=2)
    return model, LossScaleOptimizer(optim.AdamW(1e-2), scaler)


def steps(model: nn.Module, optimizer: LossScaleOptimizer) -> list[mx.array]:
    """Take three steps with gradients that every machine computes alike."""
    parameters = model.trainable_parameters()
    gradients = tree_map(lambda x: mx.full(x.shape, 0.25), parameters)
    optimizer.scale_loss(lambda model: model, model)  # true gradients from here on
    for _ in range(STEPS):
        optimizer.update(model, gradients)
        mx.eval(model.state, optimizer.state)
    return [x for _, x in tree_flatten(optimizer.masters(model.trainable_parameters()))]


def make_linear() -> nn.Module:
    return nn.Linear(2, 1)


def main(folder: Path) -> None:
    folder.mkdir()
    model, optimizer = make_run()
    steps(model, optimizer)
    for suffix in ("json", "pt", "safetensors", "json.gz", "pt.gz"):
        optimizer.scaler.save(folder / f"scaler.{suffix}")
    save_checkpoint(folder / "checkpoint", model, optimizer, step=STEPS, note="kept")
    state = dict(tree_flatten(optimizer.state))
    mx.save_safetensors(str(folder / "state.safetensors"), state)
    torch = {"model": {"weight": mx.ones((1, 2)), "bias": mx.zeros(1)}, "epoch": 3}
    torch["scaler"] = GradScaler().state_dict()
    torch_checkpoint.save(folder / "run.pt", torch)
    paths = ["--torch-path", f"{folder}/run.pt", "--mlx-path", f"{folder}/run"]
    convert([*paths, "--model", f"{__name__}:make_linear"])
    with ScaleHistory(folder / "history.csv") as history:
        history.record(optimizer, loss=mx.array(0.5))
    Float32Search(["layers.0"]).save(folder / "float32_layers.json")


if __name__ == "__main__":
    main(Path(__file__).parent / __version__)
