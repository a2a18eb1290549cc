"""Draw the figures of memory, of gradients and of a history in README and docs/.

    python tools/make_pictures.py

The figure of memory shows the first table of docs/performance.md. The others show the
task of examples/quickstart.py. In the figure of the history, the loss scale starts far
too high and doubles every 10 steps instead of every 2000, so that a short run shows how
the scale changes. The examples quickstart.py, finetune.py and float32_layers.py draw
the other figures.
"""

import argparse
import re
import sys
from pathlib import Path

import matplotlib.pyplot as plt
import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim

from mlx_gradscale import GradScaler, LossScaleOptimizer
from mlx_gradscale.diagnostics import ScaleHistory, gradient_histogram
from mlx_gradscale.plot import plot_gradients, plot_history

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"
sys.path.insert(0, str(EXAMPLES))

from quickstart import BlurredPicture, gaussian_blur, photograph  # noqa: E402


def train(scaler: GradScaler, steps: int, history: ScaleHistory) -> dict:
    """Train as in quickstart.py, and return the gradients of the last step."""
    blur = gaussian_blur()
    blurred = blur @ photograph() @ blur.T
    blur = blur.astype(mx.float16)
    model = BlurredPicture(blurred)
    model.set_dtype(mx.float16)
    optimizer = LossScaleOptimizer(optim.Adam(learning_rate=0.01), scaler)

    def loss_fn(blur: mx.array) -> mx.array:
        return nn.losses.mse_loss(model(blur).astype(mx.float32), blurred)

    loss_and_grad = optimizer.value_and_grad(model, loss_fn)
    for _ in range(steps):
        loss, grads = loss_and_grad(blur)
        optimizer.update(model, grads)
        mx.eval(model.state, optimizer.state)
        history.record(optimizer, loss=loss)
    return grads


def draw_memory(path: Path) -> None:
    """Draw the memory that is kept, and the peak of a step with many layers."""
    page = (ROOT / "docs" / "performance.md").read_text().replace("`", "")
    table = page.partition("## Memory")[2].partition("\n\n*")[0]
    rows = re.findall(r"^\| (.*?) \| ([\d.]+) \|.* ([\d.]+) \|$", table, re.MULTILINE)
    names = [name.replace("half precision", "bfloat16") for name, _, _ in rows]
    kept, peak = ([float(row[i]) for row in rows] for i in (1, 2))
    colors = ["#8c959f" if "alone" in name else "#0969da" for name in names]
    figure, axes = plt.subplots(figsize=(10, 3.4), layout="constrained")
    axes.barh(names, peak, color=colors, alpha=0.35)
    axes.bar_label(
        axes.barh(names, kept, color=colors),
        fmt=" %g ",
        color="white",
        label_type="center",
        fontsize=12,
    )
    axes.bar_label(axes.containers[0], fmt=" %g", fontsize=12)
    axes.set_title(
        "Bytes per parameter with AdamW: kept (dark) and peak of a step (light)",
        loc="left",
    )
    axes.invert_yaxis()
    axes.xaxis.set_visible(False)
    axes.tick_params(left=False, labelsize=12)
    axes.spines[:].set_visible(False)
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument(
        "--output", type=Path, default=EXAMPLES / "pictures", help="figure folder"
    )
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)

    scaler = GradScaler()
    grads = train(scaler, options.steps, ScaleHistory())
    histogram = gradient_histogram(grads)
    print(histogram)

    history = ScaleHistory()
    train(GradScaler(2.0**36, growth_interval=10), options.steps, history)

    draw_memory(options.output / "memory.png")
    path = options.output / "gradients.png"
    plot_gradients(histogram, path, scale=scaler.get_scale())
    plot_history(history, options.output / "history.png")
    print(f"The pictures are in {options.output}.")


if __name__ == "__main__":
    main()
