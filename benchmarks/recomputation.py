"""How much memory and time does recomputation take in a training step?

Bfloat16 Llamas of mlx-lm with a vocabulary of 1,024 tokens train in one compiled step,
with AdamW or a MasterWeightOptimizer around it. The table shows the MB at the peak
beyond those between steps: without recomputation, with mlx-lm's grad_checkpoint and
with ours, and ours as a ratio to mlx-lm's with plain AdamW. The last column is the
processor time of a step with our recomputation as a ratio to that of a step without.
"""

import time
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim

from mlx_gradscale import MasterWeightOptimizer, grad_checkpoint

from .harness import Rows, release_memory
from .steps import arrays_of

NO_MLX_LM: Rows = [{"note": "mlx-lm is not installed: pip install -e '.[lora]'"}]
VOCABULARY = 1024


@dataclass(frozen=True)
class Training:
    """A model, what is trained, and the rows and tokens of a batch."""

    hidden: int
    layers: int
    batch: tuple[int, int]
    lora: bool = False
    quantized: bool = False

    def model(self) -> nn.Module:
        """Return the model with random weights."""
        from mlx_lm.models import llama
        from mlx_lm.tuner.utils import linear_to_lora_layers

        mx.random.seed(0)
        config = {
            "model_type": "llama",
            "hidden_size": self.hidden,
            "intermediate_size": 3 * self.hidden,
            "num_hidden_layers": self.layers,
            "num_attention_heads": 4,
            "rms_norm_eps": 1e-5,
            "vocab_size": VOCABULARY,
            "tie_word_embeddings": True,
        }
        model: nn.Module = llama.Model(llama.ModelArgs.from_dict(config))
        model.set_dtype(mx.bfloat16)
        if self.quantized:
            nn.quantize(model, 32, 4)
        if self.lora:
            model.freeze()
            parameters = {"rank": 8, "scale": 20.0, "dropout": 0.0}
            linear_to_lora_layers(model, self.layers, parameters)
        return model


TRAININGS = {
    "full, 10 M parameters, 4 x 256 tokens": Training(256, 12, (4, 256)),
    "LoRA, 10 M, 4 x 256": Training(256, 12, (4, 256), lora=True),
    "LoRA, 3 M, 1 x 1024": Training(128, 12, (1, 1024), lora=True),
    "LoRA, 24 layers, 5 M, 4 x 128": Training(128, 24, (4, 128), lora=True),
    "QLoRA, 3 M, 4 x 128": Training(128, 12, (4, 128), lora=True, quantized=True),
}
QUICK = {"full, 12 layers, 1 x 64 tokens": Training(64, 12, (1, 64))}


def measure(quick: bool = False) -> Rows:
    """Measure every training with both optimizers."""
    if find_spec("mlx_lm") is None:
        return NO_MLX_LM
    rows: Rows = []
    for name, training in (QUICK if quick else TRAININGS).items():
        plain = 0.0
        for optimizer in ("AdamW", "master weights"):
            kinds = ("none", "mlx-lm", "ours")
            steps = {kind: step(training, optimizer, kind) for kind in kinds}
            (none, seconds), (theirs, _), (ours, more) = steps.values()
            plain = plain or theirs
            rows.append(
                {
                    "training": name,
                    "optimizer": optimizer,
                    "none": round(none / 1e6, 1),
                    "mlx-lm's": round(theirs / 1e6, 1),
                    "ours": round(ours / 1e6, 1),
                    "ratio": round(ours / plain, 2),
                    "time": round(more / seconds, 2),
                }
            )
    return rows


def step(training: Training, optimizer_name: str, kind: str) -> tuple[int, float]:
    """Return the bytes that a step adds at its peak, and its processor time."""
    from mlx_lm.models.llama import TransformerBlock
    from mlx_lm.tuner import trainer

    release_memory()
    model, call = training.model(), TransformerBlock.__call__
    optimizer: optim.Optimizer = optim.AdamW(1e-5)
    if optimizer_name != "AdamW":
        optimizer = MasterWeightOptimizer(optimizer)
    optimizer.init(model.trainable_parameters())
    tokens = mx.random.randint(0, VOCABULARY, training.batch)
    state: list[Any] = [model.state, optimizer.state, mx.random.state]

    def loss_fn(tokens: mx.array) -> mx.array:
        logits = model(tokens).astype(mx.float32)
        return nn.losses.cross_entropy(logits, tokens).mean()

    def update(tokens: mx.array) -> mx.array:
        loss, grads = nn.value_and_grad(model, loss_fn)(tokens)
        optimizer.update(model, grads)
        return loss

    compiled = mx.compile(update, inputs=state, outputs=state)
    mx.eval(arrays_of(state), tokens)
    try:
        if kind == "mlx-lm":
            trainer.grad_checkpoint(model.layers[0])
        elif kind == "ours":
            grad_checkpoint(model)
        mx.synchronize()
        kept, start = mx.get_active_memory(), time.process_time()
        mx.reset_peak_memory()
        mx.eval(compiled(tokens), state)
        mx.synchronize()
    finally:
        TransformerBlock.__call__ = call  # mlx-lm replaces it for good
    return mx.get_peak_memory() - kept, time.process_time() - start
