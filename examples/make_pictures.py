"""Draw the README's pictures; see --help for where to.

Use it as a model for your own: a ScaleHistory collects the run without slowing it
down, a gradient_histogram shows where its gradients lie. The model learns to count:
the first number says how far, then it starts over. The loss scale starts far too high
and grows every 25 steps instead of every 2000, so that a short run shows what it does.
"""

import argparse
from functools import partial
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim

from mlx_gradscale import GradScaler
from mlx_gradscale.diagnostics import ScaleHistory, gradient_histogram
from mlx_gradscale.plot import plot_gradients, plot_history

NUMBERS, LENGTH, WIDTH = 16, 24, 32


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(NUMBERS, WIDTH)
        self.positions = nn.Embedding(LENGTH, WIDTH)
        self.encoder = nn.TransformerEncoder(2, WIDTH, num_heads=4)
        self.out = nn.Linear(WIDTH, NUMBERS)

    def __call__(self, tokens):
        x = self.embed(tokens) + self.positions(mx.arange(tokens.shape[1]))
        n = tokens.shape[1]
        mask = nn.MultiHeadAttention.create_additive_causal_mask(n, x.dtype)
        return self.out(self.encoder(x, mask))


def batch(size=16):
    most = mx.random.randint(2, NUMBERS, (size, 1))
    numbers = mx.concatenate([most, mx.arange(LENGTH) % (most + 1)], axis=1)
    return numbers[:, :-1], numbers[:, 1:]


def main(steps, folder):
    mx.random.seed(0)
    model, optimizer = Transformer(), optim.AdamW(2e-3)
    optimizer.init(model.trainable_parameters())
    scaler = GradScaler(init_scale=2.0**24, growth_interval=25)
    history = ScaleHistory()

    def loss_fn(tokens, targets):
        logits = model(tokens).astype(mx.float32)
        return nn.losses.cross_entropy(logits, targets, reduction="mean")

    loss_and_grad = scaler.value_and_grad(model, loss_fn, mx.float16)
    state = [model.state, optimizer.state, scaler.state]

    @partial(mx.compile, inputs=state, outputs=state)
    def step(tokens, targets):
        loss, grads = loss_and_grad(tokens, targets)
        grads, norm = optim.clip_grad_norm(grads, 1.0)
        scaler.minimize(optimizer, model, grads)
        return loss, norm

    for _ in range(steps):
        loss, norm = step(*batch())
        mx.eval(state)
        history.record(scaler, loss=loss, grad_norm=norm)

    # The true gradients, in float32: float16 would have lost its zeros already.
    _, grads = nn.value_and_grad(model, loss_fn)(*batch())
    histogram = gradient_histogram(grads)
    print(histogram)
    scale = scaler.get_scale()
    folder.mkdir(parents=True, exist_ok=True)
    for dark in (False, True):
        theme = "dark" if dark else "light"
        plot_history(history, folder / f"history-{theme}.png", dark=dark)
        for layers in (False, True):
            name = f"{'layers' if layers else 'gradients'}-{theme}.png"
            options = {"scale": scale, "layers": layers, "dark": dark}
            plot_gradients(histogram, folder / name, **options)
    print(f"{len(history.skipped)} of {steps} steps skipped; see {folder}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=400)
    folder = Path(__file__).parent / "pictures"
    parser.add_argument("--output", type=Path, default=folder, help="a folder")
    options = parser.parse_args()
    main(options.steps, options.output)
