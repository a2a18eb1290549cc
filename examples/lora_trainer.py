"""Fine-tune LoRA adapters or all weights in float16 with mlx-lm's own trainer.

The trainer does not change. Wrap the optimizer in ``LossScaleOptimizer`` and the loss
in ``optimizer.scale_loss``. The model is a small Llama built from a config, so nothing
is downloaded. For a real model, use ``model, tokenizer = mlx_lm.load(...)``.

    python examples/lora_trainer.py          # LoRA
    python examples/lora_trainer.py --full   # all weights
"""

import argparse
import pydoc_data.topics
import tempfile
from pathlib import Path

import mlx.core as mx
import mlx.optimizers as optim
from mlx_lm.models import llama
from mlx_lm.tuner.trainer import TrainingArgs, default_loss, train
from mlx_lm.tuner.utils import linear_to_lora_layers

from mlx_gradscale import LossScaleOptimizer, grad_checkpoint
from mlx_gradscale.diagnostics import LossScaleCallback

CONFIG = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "vocab_size": 128,
}


def make_model(full: bool) -> llama.Model:
    mx.random.seed(0)
    model = llama.Model(llama.ModelArgs.from_dict(CONFIG))
    if not full:
        model.freeze()
        linear_to_lora_layers(model, 2, {"rank": 8, "scale": 2.0, "dropout": 0.05})
    model.set_dtype(mx.float16)
    return model


def make_data(length: int = 32) -> tuple[list, list]:
    """Return training and validation rows, each (tokens, first position to learn)."""
    tokens = "\n".join(pydoc_data.topics.topics.values()).encode("ascii", "replace")
    rows = [(list(tokens[i : i + length]), 0) for i in range(0, 64 * length, length)]
    return rows[8:], rows[:8]


def main(arguments: list[str] | None = None) -> LossScaleOptimizer:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--full", action="store_true", help="train all weights")
    parser.add_argument("--iters", type=int, default=60)
    parser.add_argument("--accumulate", type=int, default=1, metavar="N")
    parser.add_argument("--grad-checkpoint", action="store_true")
    options = parser.parse_args(arguments)

    model = make_model(options.full)
    training, validation = make_data()
    schedule = optim.cosine_decay(3e-3, options.iters)
    optimizer = LossScaleOptimizer(optim.AdamW(schedule), max_grad_norm=1.0)
    if options.grad_checkpoint:
        grad_checkpoint(model)  # mlx-lm's own is wrong with dropout
    with tempfile.TemporaryDirectory() as folder:
        train(
            model,
            optimizer,
            training,
            validation,
            args=TrainingArgs(
                batch_size=8,
                iters=options.iters,
                val_batches=1,
                steps_per_report=max(options.iters // 4, 1),
                steps_per_eval=max(options.iters // 2, 1),
                max_seq_length=64,
                adapter_file=str(Path(folder) / "adapters.safetensors"),
                grad_accumulation_steps=options.accumulate,
            ),
            loss=optimizer.scale_loss(default_loss),
            training_callback=LossScaleCallback(optimizer),
        )
    scaler = optimizer.scaler
    skipped, norm = scaler.skipped_steps.item(), optimizer.grad_norm.item()
    print(
        f"{optimizer.step.item()} steps applied, {skipped} skipped, scale "
        f"{scaler.get_scale():.0f}, gradient norm {norm:.3f}"
    )
    return optimizer


if __name__ == "__main__":
    main()
