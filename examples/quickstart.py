"""Sharpen a blurred photograph in float32 and in three variants of float16.

The parameters are the pixels of a picture. Training makes the blurred version of this
picture match a blurred photograph, so the picture itself becomes sharp. The loss is a
mean over 110,592 values, so the gradient of each pixel is small, and shrinks further as
the picture improves.

The same optimizer minimizes the same loss in float32, in float16, in float16 with
float32 master weights, and in float16 with master weights and loss scaling. The script
takes about a minute and draws quickstart.png.

    python examples/quickstart.py
"""

import argparse
import math
import warnings

import matplotlib.pyplot as plt
import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
from matplotlib.cbook import get_sample_data
from PIL import Image
from tqdm import tqdm

from mlx_gradscale import LossScaleOptimizer, MasterWeightOptimizer

SIZE = 192  # 3 colors x 192 x 192 pixels = 110,592 values


class BlurredPicture(nn.Module):
    """A picture seen through a blur."""

    def __init__(self, start: mx.array):
        super().__init__()
        self.picture = mx.array(start)

    def __call__(self, blur: mx.array) -> mx.array:
        return blur @ self.picture @ blur.T


def photograph() -> mx.array:
    """Load a photograph with axes (color, row, column).

    The photograph of Grace Hopper is in the public domain and ships with matplotlib.
    """
    with get_sample_data("grace_hopper.jpg") as file:
        square = Image.open(file).crop((0, 0, 512, 512)).resize((SIZE, SIZE))
    return mx.array(np.asarray(square, np.float32) / 255).transpose(2, 0, 1)


def gaussian_blur(sigma: float = 2.0) -> mx.array:
    """Return a matrix that blurs the columns of a picture."""
    row = mx.arange(SIZE)
    return mx.softmax(-(((row[:, None] - row) / sigma) ** 2) / 2, axis=1)


def quality(picture: mx.array, sharp: mx.array) -> float:
    """Return the peak signal-to-noise ratio in decibels."""
    return (-10 * mx.log10(mx.mean((picture - sharp) ** 2))).item()


def train(
    name: str,
    dtype: mx.Dtype,
    optimizer: optim.Optimizer,
    blurred: mx.array,
    steps: int,
) -> tuple[mx.array, list[float], float]:
    """Train; return the picture, the losses and the final share of zero gradients."""
    model = BlurredPicture(blurred)
    model.set_dtype(dtype)
    blur = gaussian_blur().astype(dtype)

    def loss_fn(blur: mx.array) -> mx.array:
        return nn.losses.mse_loss(model(blur).astype(mx.float32), blurred)

    # With a wrapped optimizer, only this line differs.
    if isinstance(optimizer, (LossScaleOptimizer, MasterWeightOptimizer)):
        loss_and_grad = optimizer.value_and_grad(model, loss_fn)
    else:
        loss_and_grad = nn.value_and_grad(model, loss_fn)

    losses = []
    progress = tqdm(range(steps), f"{name:37}", disable=None)  # only on a terminal
    for _ in progress:
        loss, grads = loss_and_grad(blur)
        optimizer.update(model, grads)
        mx.eval(model.state, optimizer.state)
        losses.append(loss.item())
        progress.set_postfix(loss=f"{losses[-1]:.1e}")
    last = grads["picture"]
    zero = mx.mean(mx.where(mx.isnan(last), last, last == 0)).item()
    return model.picture.astype(mx.float32), losses, zero


def draw(
    pictures: dict[str, mx.array], losses: dict[str, list], sharp: mx.array, path: str
) -> None:
    """Draw the pictures in a row and the losses below them."""
    figure = plt.figure(figsize=(11, 5.4), layout="constrained")
    top, bottom = figure.subfigures(2, 1, height_ratios=(3, 2))
    panels = top.subplots(1, len(pictures))
    for panel, (name, picture) in zip(panels, pictures.items(), strict=True):
        decibels = quality(picture, sharp)
        result = "NaN" if math.isnan(decibels) else f"{decibels:.1f} dB"
        panel.imshow(np.nan_to_num(np.array(picture)).clip(0, 1).transpose(1, 2, 0))
        panel.set_title(name.replace(" + ", "\n+ "), fontsize=10)
        panel.text(0.5, -0.1, result, ha="center", transform=panel.transAxes)
        panel.axis("off")
    axes = bottom.subplots()
    for (name, values), style in zip(
        losses.items(), ("-", "-", "--", ":"), strict=True
    ):
        label = f"{name} (NaN)" if math.isnan(values[-1]) else name
        axes.semilogy(values, style, label=label, linewidth=2.5)
    axes.set(xlabel="step", ylabel="mean squared error")
    axes.legend(frameon=False, fontsize=9)
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--picture", default="quickstart.png")
    options = parser.parse_args()

    def adam() -> optim.Optimizer:
        return optim.Adam(learning_rate=0.01)

    half = mx.float16
    # The third run shows what this warning is about.
    warnings.filterwarnings("ignore", "Some parameters are float16, but no scale")
    runs = {
        "float32": (mx.float32, adam()),
        "float16": (half, adam()),
        "float16 + master weights": (half, MasterWeightOptimizer(adam())),
        "float16 + master weights + loss scale": (half, LossScaleOptimizer(adam())),
    }
    sharp = photograph()
    blurred = gaussian_blur() @ sharp @ gaussian_blur().T
    pictures, losses, rows = {"blurred": blurred}, {}, []
    for name, (dtype, optimizer) in runs.items():
        result = train(name, dtype, optimizer, blurred, options.steps)
        pictures[name], losses[name], zero = result
        row = f"{name:37}{losses[name][-1]:10.1e}"
        row += f"{quality(pictures[name], sharp):9.1f} dB{zero:17.0%}"
        rows.append(row)

    print(f"\n{'':37}{'loss':>10}{'quality':>12}{'zero gradients':>17}")
    print(*rows, sep="\n")
    print(
        "\nfloat16 alone is NaN because Adam's epsilon, 1e-8, is zero in float16.\n"
        "Master weights fix that, but gradients below 3e-8 still round to zero. The\n"
        "default loss scale, 65536, keeps them in range."
    )
    draw(pictures, losses, sharp, options.picture)
    print(f"The pictures are in {options.picture}.")


if __name__ == "__main__":
    main()
