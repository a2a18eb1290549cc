"""Train one small language model three ways: float32, float16, and float16 with us.

Start here. The same transformer learns Python's own documentation byte by byte, from
the same start and on the same batches: in float32, in plain float16, and in float16
with ``LossScaleOptimizer``. It takes about a minute and draws ``quickstart.png``.

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
from mlx.utils import tree_map
from tqdm import tqdm

from mlx_gradscale import LossScaleOptimizer
from mlx_gradscale.diagnostics import ScaleHistory, gradient_histogram

CONTEXT, BATCH = 64, 8


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
    scaled = isinstance(optimizer, LossScaleOptimizer)

    def loss_fn(tokens: mx.array, targets: mx.array) -> mx.array:
        # In float32. The mean over 512 tokens makes gradients small, but few vanish:
        # plain float16 is lost here to Adam, whose epsilon of 1e-8 is zero in it.
        logits = model(tokens).astype(mx.float32)
        return nn.losses.cross_entropy(logits, targets, reduction="mean")

    scaled_loss: Callable = optimizer.scale_loss(loss_fn, model) if scaled else loss_fn
    loss_and_grad = nn.value_and_grad(model, scaled_loss)
    optimizer.init(model.trainable_parameters())
    state = [model.state, optimizer.state]

    def step(tokens: mx.array, targets: mx.array) -> mx.array:
        loss, gradients = loss_and_grad(tokens, targets)
        optimizer.update(model, gradients)
        return loss

    step = mx.compile(step, inputs=state, outputs=state)
    training, testing = text()
    bar = tqdm(batches(training, steps, 1), label, steps, disable=not label)
    for tokens, targets in bar:
        loss = step(tokens, targets)
        mx.async_eval(loss, state)
        if history is not None:
            history.record(optimizer, loss=loss)
        if bar.n % 10 == 0:
            bar.set_postfix(loss=f"{loss.item():.3f}")
    losses = [loss_fn(*batch) for batch in batches(testing, 8, 2)]
    _, gradients = loss_and_grad(tokens, targets)
    scale = optimizer.scaler.get_scale() if scaled else 1.0
    return {
        "loss": mx.mean(mx.stack(losses)).item(),
        "optimizer": optimizer,
        # As they would be in float32: what did float16 lose of them?
        "gradients": tree_map(lambda g: g.astype(mx.float32) / scale, gradients),
        "model": model,
    }


def ways() -> dict[str, tuple[mx.Dtype, Callable[[], optim.Optimizer]]]:
    def adamw() -> optim.Optimizer:
        return optim.AdamW(2e-3, bias_correction=True)

    return {
        "float32": (mx.float32, adamw),
        "float16": (mx.float16, adamw),
        "float16 + LossScaleOptimizer": (
            mx.float16,
            lambda: LossScaleOptimizer(adamw(), max_grad_norm=1.0),
        ),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--picture", default="quickstart.png")
    options = parser.parse_args()

    history = ScaleHistory()
    results = {}
    for name, (dtype, make) in ways().items():
        watched = history if "Loss" in name else None
        results[name] = train(dtype, make(), options.steps, name, watched)
    history.flush()

    lost = gradient_histogram(results["float32"]["gradients"]).unscaled
    print(
        f"\nOf the float32 gradients, {lost.underflow:.3%} would be zero in float16 "
        f"and {lost.subnormal:.0%} would lose bits.\n"
    )
    print(f"{'':30}{'test loss':>10}{'scale':>10}{'skipped':>9}")
    for name, result in results.items():
        scaler = getattr(result["optimizer"], "scaler", None)
        loss = "NaN" if math.isnan(result["loss"]) else f"{result['loss']:.3f}"
        scale = f"{scaler.get_scale():.0f}" if scaler else "-"
        skipped = f"{scaler.skipped_steps.item()}" if scaler else "-"
        print(f"{name:30}{loss:>10}{scale:>10}{skipped:>9}")

    from mlx_gradscale.plot import plot_history

    plot_history(history, options.picture)
    print(f"\nThe run, drawn: {options.picture}")


if __name__ == "__main__":
    main()
