"""Does a model trained from scratch in bfloat16 reach the loss of one in float32?

A llama with 24,736 parameters learns to predict the bytes of Python's standard library,
in float32, in plain bfloat16, and in bfloat16 with master weights and moments in 16 and
in 8 bits. Runs with the same seed have the same initial weights and the same batches.

    python -m benchmarks.quality

Results are appended to quality.json, and runs whose result is there are not repeated,
so the command can be stopped and continued. All runs take about 20 minutes on a CPU.
With other versions of Python, the text and the losses differ slightly.
"""

import itertools
import json
import sysconfig
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
from mlx_lm.models import llama

from mlx_gradscale import MasterWeightOptimizer

BATCH, LENGTH, HELD_OUT = 4, 32, 1024  # sequences, bytes per sequence, sequences
RATE, WARMUP = 1e-3, 100  # then a cosine decay to a tenth
# The dtype of the model, and the state_bits of its optimizer.
VARIANTS = {
    "float32": (mx.float32, None),
    "bfloat16": (mx.bfloat16, None),
    "16 bits": (mx.bfloat16, 16),
    "8 bits": (mx.bfloat16, 8),
}
# beta2, steps and seed of each run, most informative first.
RUNS = [
    *((0.999, 2000, seed) for seed in range(5)),
    (0.95, 2000, 0),
    (0.999, 8000, 0),
    (0.95, 2000, 1),
    (0.999, 8000, 1),
]


def texts() -> tuple[np.ndarray, mx.array]:
    """Return the bytes to learn, and sequences from files that are held out."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    learned, held_out = (
        np.frombuffer(b"".join(x.read_bytes() for x in part), np.uint8) & 127
        for part in ([x for i, x in enumerate(files) if i % 10], files[::10])
    )
    starts = np.linspace(0, len(held_out) - LENGTH - 1, HELD_OUT).astype(int)
    return learned, mx.array(held_out[starts[:, None] + np.arange(LENGTH + 1)])


def make_model() -> nn.Module:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "vocab_size": 128}
    layers = {"num_hidden_layers": 2, "num_attention_heads": 2, "rms_norm_eps": 1e-5}
    return llama.Model(llama.ModelArgs("llama", **sizes, **layers))


def train(variant: str, beta2: float, steps: int, seed: int) -> float:
    """Train a model; return its loss on the held-out text."""
    text, held_out = texts()
    dtype, state_bits = VARIANTS[variant]
    mx.random.seed(seed)
    model = make_model()
    model.set_dtype(dtype)
    rates = [
        optim.linear_schedule(0.0, RATE, WARMUP),
        optim.cosine_decay(RATE, steps - WARMUP, RATE / 10),
    ]
    schedule = optim.join_schedules(rates, [WARMUP])
    optimizer: optim.Optimizer = optim.AdamW(schedule, betas=[0.9, beta2])

    def loss_fn(x: mx.array) -> mx.array:
        logits = model(x[:, :-1]).astype(mx.float32)
        return nn.losses.cross_entropy(logits, x[:, 1:], reduction="mean")

    loss_and_grad = nn.value_and_grad(model, loss_fn)
    if state_bits:
        optimizer = MasterWeightOptimizer(optimizer, state_bits=state_bits)
        loss_and_grad = optimizer.value_and_grad(model, loss_fn)
    optimizer.init(model.trainable_parameters())
    state = [model.state, optimizer.state]

    @partial(mx.compile, inputs=state, outputs=state)
    def step(x: mx.array) -> mx.array:
        loss, gradients = loss_and_grad(x)
        optimizer.update(model, gradients)
        return loss

    generator = np.random.default_rng(seed)
    for _ in range(steps):
        starts = generator.integers(len(text) - LENGTH, size=(BATCH, 1))
        step(mx.array(text[starts + np.arange(LENGTH + 1)]))
        mx.eval(state)
    return loss_fn(held_out).item()


def show(results: list[dict[str, Any]]) -> None:
    """Print each variant's loss, and how much higher than float32's it is."""
    losses = {tuple(x.values())[:4]: x["loss"] for x in results}
    for beta2, steps in dict.fromkeys(run[:2] for run in RUNS):
        print(f"\nbeta2 {beta2}, {steps} steps: loss, and how much above float32's")
        for name in VARIANTS:
            found = [x for x in losses if (x[0], x[1], x[3]) == (beta2, steps, name)]
            if found:
                above = [losses[x] - losses[(*x[:3], "float32")] for x in found]
                each = ", ".join(f"{x:+.4f}" for x in above)
                loss = mean(losses[x] for x in found)
                print(f"{name:10} {loss:.4f} {mean(above):+.4f} ({each})")


def main() -> None:
    path = Path(__file__).with_suffix(".json")
    results = json.loads(path.read_text()) if path.exists() else []
    for (beta2, steps, seed), name in itertools.product(RUNS, VARIANTS):
        run = {"beta2": beta2, "steps": steps, "seed": seed, "variant": name}
        if any(run.items() <= x.items() for x in results):
            continue
        results.append(run | {"loss": round(train(name, beta2, steps, seed), 5)})
        lines = ",\n".join(map(json.dumps, results))
        path.write_text(f"[\n{lines}\n]\n")
        print(lines.splitlines()[-1], flush=True)
    show(results)


if __name__ == "__main__":
    main()
