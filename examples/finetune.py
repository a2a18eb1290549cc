"""Fine-tune all weights of a small llama in float32, bfloat16 and float16.

The model is pretrained on the sources of Python's standard library and fine-tuned on
Python's help texts, with the same batches and the same optimizer in six variants:
float32, plain bfloat16, bfloat16 with float32 master weights, bfloat16 with master
weights and moments in 8 bits, plain float16, and float16 with master weights and loss
scaling. Each variant runs at four learning rates, and with three seeds for the initial
weights and the order of the batches.

The script downloads nothing. It takes about ten minutes on a CPU, prints two tables
and draws finetune.png. Other versions of Python have other texts, so the losses differ
slightly.

    python examples/finetune.py
"""

import argparse
import math
import sysconfig
from collections.abc import Callable
from functools import partial
from pathlib import Path
from pydoc_data.topics import topics

import matplotlib.pyplot as plt
import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
from mlx_lm.models import llama
from tqdm import tqdm

from mlx_gradscale import LossScaleOptimizer, MasterWeightOptimizer

BATCH, LENGTH = 8, 32  # sequences per batch, and bytes per sequence
EVERY = 20  # steps between two validations
# Name -> dtype, wrapper of the optimizer, style of the curve.
VARIANTS = {
    "float32": (mx.float32, None, {"color": "#8c959f", "linewidth": 7}),
    "bfloat16": (mx.bfloat16, None, {"color": "#cf222e", "marker": "o"}),
    "bfloat16 + master weights": (
        mx.bfloat16,
        MasterWeightOptimizer,
        {"color": "#0969da"},
    ),
    "bfloat16 + state_bits=8": (
        mx.bfloat16,
        partial(MasterWeightOptimizer, state_bits=8),
        {"color": "#8250df", "linestyle": ":", "zorder": 3},
    ),
    "float16": (mx.float16, None, {"color": "#bc4c00", "marker": "X", "zorder": 3}),
    "float16 + master weights + loss scale": (
        mx.float16,
        LossScaleOptimizer,
        {"color": "#1a7f37", "linestyle": "--"},
    ),
}
STYLE = {
    "axes.grid": True,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlelocation": "left",
    "font.size": 12,
    "grid.color": "#d0d7de",
    "lines.linewidth": 2.5,
    "lines.markersize": 8,
}


def source_code() -> np.ndarray:
    """Return the bytes of the modules of the standard library."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    return np.frombuffer(b"".join(file.read_bytes() for file in files), np.uint8)


def help_texts() -> np.ndarray:
    """Return the bytes of the texts that ``help()`` shows about Python's syntax."""
    text = "".join(topics[name] for name in sorted(topics))
    return np.frombuffer(text.encode(), np.uint8)


def make_model() -> nn.Module:
    """Return a llama with 98,624 parameters that predicts bytes."""
    sizes = {"hidden_size": 64, "intermediate_size": 128, "vocab_size": 256}
    layers = {"num_hidden_layers": 2, "num_attention_heads": 4, "rms_norm_eps": 1e-5}
    return llama.Model(llama.ModelArgs("llama", **sizes, **layers))


def next_byte_loss(model: nn.Module) -> Callable[[mx.array], mx.array]:
    """Return the loss function of a model, which is reduced in float32."""

    def loss_fn(x: mx.array) -> mx.array:
        logits = model(x[:, :-1]).astype(mx.float32)
        return nn.losses.cross_entropy(logits, x[:, 1:], reduction="mean")

    return loss_fn


def train(
    model: nn.Module,
    optimizer: optim.Optimizer,
    text: np.ndarray,
    steps: int,
    seed: int,
    progress: tqdm,
    held_out: mx.array | None = None,
) -> list[float]:
    """Train on random batches of a text; return the losses on the held-out text."""
    loss_fn = next_byte_loss(model)
    # With a wrapped optimizer, only this line differs.
    if isinstance(optimizer, (LossScaleOptimizer, MasterWeightOptimizer)):
        loss_and_grad = optimizer.value_and_grad(model, loss_fn)
    else:
        loss_and_grad = nn.value_and_grad(model, loss_fn)

    generator = np.random.default_rng(seed)
    losses = [] if held_out is None else [loss_fn(held_out).item()]
    for i in range(1, steps + 1):
        starts = generator.integers(len(text) - LENGTH, size=(BATCH, 1))
        loss, grads = loss_and_grad(mx.array(text[starts + np.arange(LENGTH + 1)]))
        optimizer.update(model, grads)
        mx.eval(model.state, optimizer.state)
        if i % EVERY == 0:
            progress.update(EVERY)
            progress.set_postfix(loss=f"{loss.item():.3f}")
            if held_out is not None:
                losses.append(loss_fn(held_out).item())
                if math.isnan(losses[-1]):
                    progress.update(steps - i)
                    break
    return losses


def compare(rates: list[float], seeds: int, pretraining: int, steps: int) -> np.ndarray:
    """Return validation losses with axes (variant, rate, seed, validation)."""
    text = help_texts()
    split = len(text) * 9 // 10
    rows = (len(text) - split) // (LENGTH + 1)
    held_out = text[split:][: rows * (LENGTH + 1)].reshape(rows, LENGTH + 1)
    held_out = mx.array(held_out[:: rows // 128])
    results = np.full((len(VARIANTS), len(rates), seeds, steps // EVERY + 1), np.nan)
    total = seeds * (pretraining + len(VARIANTS) * len(rates) * steps)
    progress = tqdm(total=total, unit="step")
    for seed in range(seeds):
        mx.random.seed(seed)
        pretrained = make_model()
        optimizer = optim.AdamW(optim.cosine_decay(3e-3, pretraining))
        progress.set_description(f"{f'seed {seed}, pretraining':54}")
        train(pretrained, optimizer, source_code(), pretraining, seed, progress)
        for i, (name, (dtype, wrap, _)) in enumerate(VARIANTS.items()):
            for j, rate in enumerate(rates):
                model = make_model()
                model.update(pretrained.parameters())
                model.set_dtype(dtype)
                optimizer = optim.AdamW(rate)
                if wrap:
                    optimizer = wrap(optimizer)
                progress.set_description(f"seed {seed}, {in_text(rate)}, {name:38}")
                losses = train(
                    model, optimizer, text[:split], steps, seed, progress, held_out
                )
                results[i, j, seed, : len(losses)] = losses
    progress.close()
    return results


def kept_progress(results: np.ndarray) -> np.ndarray:
    """Return each run's progress as a share of float32's: (variant, rate, seed)."""
    start = results[0, :, :, 0]
    return (start - results[..., -1]) / (start - results[0, ..., -1])


def in_text(rate: float) -> str:
    """Return 1e-5 instead of 1e-05."""
    return f"{rate:.0e}".replace("-0", "-")


def show(title: str, values: np.ndarray, rates: list[float], form: str) -> None:
    """Print the mean of each run over its seeds, and the lowest and the highest."""
    print(f"\n{title:38}" + "".join(f"{in_text(x):>23}" for x in rates))
    for name, row in zip(VARIANTS, values, strict=True):
        cells = [
            f"{x.mean():{form}} ({x.min():{form}} to {x.max():{form}})" for x in row
        ]
        cells = ["NaN" if "nan" in cell else cell for cell in cells]
        print(f"{name:38}" + "".join(f"{cell:>23}" for cell in cells))


def draw(results: np.ndarray, rates: list[float], path: str) -> None:
    """Draw the losses at one rate, and the share of float32's progress at all rates."""
    plt.rcParams.update(STYLE)
    figure, (left, right) = plt.subplots(
        1, 2, figsize=(10, 5), layout="constrained", width_ratios=(4, 3)
    )
    steps = EVERY * np.arange(results.shape[-1])
    shown = rates.index(2e-5)
    kept = 100 * kept_progress(results)
    for i, (name, (_, _, style)) in enumerate(VARIANTS.items()):
        losses = results[i, shown].mean(axis=0)
        label = f"{name}: NaN" if np.isnan(losses[-1]) else name
        left.plot(steps, losses, label=label, **style)
        right.plot(rates, kept[i].mean(axis=-1), **style)
        low, high = kept[i].min(axis=-1), kept[i].max(axis=-1)
        right.fill_between(rates, low, high, color=style["color"], alpha=0.2)
    for rate, share in zip(rates, kept[1].mean(axis=-1), strict=True):
        right.annotate(
            f"{share:.0f}%", (rate, share), (8, -12), textcoords="offset points"
        )
    left.set_title(f"Validation loss, learning rate {in_text(rates[shown])}")
    left.set_xlabel("step of full fine-tuning")
    left.legend(frameon=False, loc="lower left")
    left.margins(y=0.25)
    right.set_title("Share of float32's progress")
    right.set(xlabel="learning rate", xscale="log", ylim=(0, 120))
    right.set_xticks(rates, [in_text(rate) for rate in rates])
    right.minorticks_off()
    right.yaxis.set_major_formatter("{x:.0f}%")
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one short run of each")
    parser.add_argument("--picture", default="finetune.png")
    options = parser.parse_args()
    rates, seeds, pretraining, steps = [1e-5, 2e-5, 1e-4, 1e-3], 3, 500, 200
    if options.quick:
        rates, seeds, pretraining, steps = [2e-5], 1, 100, 40

    results = compare(rates, seeds, pretraining, steps)
    print(f"Steps: {steps}, seeds: {seeds}. Each cell: mean (lowest to highest).")
    print(f"The validation loss starts at {results[0, 0, :, 0].mean():.3f}.")
    show("validation loss, learning rate", results[..., -1], rates, ".3f")
    show("share of float32's progress", kept_progress(results), rates, ".0%")
    draw(results, rates, options.picture)
    print(f"\nThe curves are in {options.picture}.")


if __name__ == "__main__":
    main()
