"""Train one small language model four ways: what float16 loses, and what saves it.

Start here. The same transformer learns Python's own documentation byte by byte, from
the same start and on the same batches: in float32, in plain float16, in float16 with
float32 master weights, and in float16 with master weights and loss scaling, which is
``LossScaleOptimizer``. It takes about a minute and draws ``quickstart.png``.

    python examples/quickstart.py
"""

import argparse
import math
import pydoc_data.topics
from collections.abc import Callable

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
from tqdm import tqdm

from mlx_gradscale import GradScaler, LossScaleOptimizer
from mlx_gradscale.diagnostics import ScaleHistory, gradient_histogram
from mlx_gradscale.plot import plot_history

CONTEXT, BATCH = 64, 8
# Language models are trained on batches of half a million tokens: 1024 times ours,
# and a mean over them makes each token's gradient 1024 times smaller. This trains on
# one micro-batch of 1024 and divides by their number all the same. Adam does not see
# the factor; float16 does.
SHARES = 1024


class Transformer(nn.Module):
    def __init__(self, width: int = 48, layers: int = 2):
        super().__init__()
        self.embedding = nn.Embedding(128, width)
        self.position = nn.Embedding(CONTEXT, width)
        self.encoder = nn.TransformerEncoder(layers, width, 4, norm_first=True)
        self.head = nn.Linear(width, 128)

    def __call__(self, tokens: mx.array) -> mx.array:
        x = self.embedding(tokens) + self.position(mx.arange(tokens.shape[1]))
        mask = nn.MultiHeadAttention.create_additive_causal_mask(
            tokens.shape[1], x.dtype
        )
        return self.head(self.encoder(x, mask))


def text() -> tuple[np.ndarray, np.ndarray]:
    """Return some 450 kB of English that every Python has, to train and to test on."""
    joined = "\n".join(pydoc_data.topics.topics.values())
    tokens = np.frombuffer(joined.encode("ascii", "replace"), np.uint8) & 127
    split = len(tokens) * 9 // 10
    return tokens[:split].astype(np.int32), tokens[split:].astype(np.int32)


def batches(tokens: np.ndarray, count: int, seed: int):
    random = np.random.default_rng(seed)
    for _ in range(count):
        starts = random.integers(0, len(tokens) - CONTEXT - 1, BATCH)
        rows = mx.array(np.stack([tokens[i : i + CONTEXT + 1] for i in starts]))
        yield rows[:, :-1], rows[:, 1:]


def train(
    dtype: mx.Dtype,
    optimizer: optim.Optimizer,
    steps: int,
    label: str = "",
    history: ScaleHistory | None = None,
) -> dict:
    """Train from the same start in ``dtype``; return losses and the last gradients."""
    mx.random.seed(0)
    model = Transformer()
    model.set_dtype(dtype)

    def loss_fn(tokens: mx.array, targets: mx.array) -> mx.array:
        logits = model(tokens).astype(mx.float32)
        return nn.losses.cross_entropy(logits, targets, reduction="mean") / SHARES

    # The one line that differs: the wrapper differentiates a scaled loss.
    is_wrapped = isinstance(optimizer, LossScaleOptimizer)
    value_and_grad = optimizer.value_and_grad if is_wrapped else nn.value_and_grad
    loss_and_grad = value_and_grad(model, loss_fn)
    optimizer.init(model.trainable_parameters())
    state = [model.state, optimizer.state]

    def step(tokens: mx.array, targets: mx.array) -> mx.array:
        loss, gradients = loss_and_grad(tokens, targets)
        optimizer.update(model, gradients)
        return loss * SHARES

    step = mx.compile(step, inputs=state, outputs=state)
    training, testing = text()
    losses = []
    bar = tqdm(batches(training, steps, 1), label, steps, disable=not label)
    for tokens, targets in bar:
        losses.append(step(tokens, targets))
        mx.async_eval(losses[-1], state)
        if history is not None:
            history.record(optimizer, loss=losses[-1])
        if bar.n % 10 == 0:
            bar.set_postfix(loss=f"{losses[-1].item():.3f}")
    test_losses = [loss_fn(*batch) * SHARES for batch in batches(testing, 8, 2)]
    _, gradients = loss_and_grad(tokens, targets)
    return {
        "loss": mx.mean(mx.stack(test_losses)).item(),
        "losses": mx.stack(losses).tolist(),
        "optimizer": optimizer,
        "zero": gradient_histogram(gradients).unscaled.zero,
        "model": model,
    }


def ways() -> dict[str, tuple[mx.Dtype, Callable[[], optim.Optimizer]]]:
    def adamw() -> optim.Optimizer:
        return optim.AdamW(2e-3, bias_correction=True)

    def with_masters() -> optim.Optimizer:
        # A scale that is 1 and stays 1.
        return LossScaleOptimizer(adamw(), GradScaler(1.0, dynamic=False))

    def with_masters_and_scale() -> optim.Optimizer:
        # LossScaleOptimizer(adamw()) would do. This scale starts too high and grows
        # every 25 steps instead of every 2000, so that a short run shows what it does.
        return LossScaleOptimizer(adamw(), GradScaler(2.0**30, growth_interval=25))

    return {
        "float32": (mx.float32, adamw),
        "float16": (mx.float16, adamw),
        "float16 + masters": (mx.float16, with_masters),
        "float16 + masters + loss scale": (mx.float16, with_masters_and_scale),
    }


def draw(history: ScaleHistory, results: dict[str, dict], path: str) -> None:
    """Draw the scaled run, with the losses of the others beside its own."""
    figure = plot_history(history, title="float16 with masters and loss scale")
    axes = figure.axes[0]
    axes.get_lines()[0].set_label("float16 + masters + loss scale")
    for name, style in {"float32": "-", "float16 + masters": "--"}.items():
        losses = results[name]["losses"]
        # Behind the scaled run, and wider where that covers it.
        width = 4 if name == "float32" else 1.5
        look = {"color": "darkgray", "linewidth": width, "zorder": 1.5}
        axes.plot(range(1, 1 + len(losses)), losses, style, label=name, **look)
    axes.legend(frameon=False, fontsize=9)
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--picture", default="quickstart.png")
    options = parser.parse_args()

    results = {}
    with ScaleHistory() as history:
        for name, (dtype, make) in ways().items():
            watched = history if "scale" in name else None
            results[name] = train(dtype, make(), options.steps, name, watched)

    print(f"\n{'':32}{'test loss':>10}{'zero gradients':>16}{'scale':>8}{'skipped':>9}")
    for name, result in results.items():
        scaler = getattr(result["optimizer"], "scaler", None)
        is_lost = math.isnan(result["loss"])
        loss = "NaN" if is_lost else f"{result['loss']:.3f}"
        zero = "-" if is_lost else f"{result['zero']:.0%}"
        scale = f"2^{math.log2(scaler.get_scale()):.0f}" if scaler else "-"
        skipped = f"{scaler.skipped_steps.item()}" if scaler else "-"
        print(f"{name:32}{loss:>10}{zero:>16}{scale:>8}{skipped:>9}")
    print(
        "\nfloat16 alone is NaN because Adam's epsilon of 1e-8 is zero in it: master "
        "weights\ncure that. Gradients below 6e-8 are zero in it too: the loss scale "
        "brings them back."
    )
    draw(history, results, options.picture)
    print(f"\nThe runs, drawn: {options.picture}")


if __name__ == "__main__":
    main()
