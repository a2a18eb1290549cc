"""Transformers' Trainer with checkpoints to resume from; steps of mlx-lm's models."""

import mlx.core as mx
import mlx.nn as nn
import pytest


def train(model, item, folder, most, resume=None, **arguments):
    """Train to ``most`` steps, and return the Trainer, its batches and its losses.

    ``item(i)`` is example number i as a dict of tensors, and ``folder`` is for the
    checkpoints, of which ``resume`` may be one.
    """
    transformers = pytest.importorskip("transformers", reason="needs transformers")
    pytest.importorskip("accelerate", reason="transformers.Trainer needs accelerate")
    batches, losses = [], []

    class Trainer(transformers.Trainer):
        def compute_loss(self, model, inputs, **others):
            loss = super().compute_loss(model, inputs, **others)
            batches.append({name: x.numpy() for name, x in inputs.items()})
            losses.append(loss.item())
            return loss

    settings = transformers.TrainingArguments(
        str(folder),
        max_steps=most,
        per_device_train_batch_size=4,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        lr_scheduler_type="constant",
        **arguments,
    )
    made = Trainer(model, settings, train_dataset=[item(i) for i in range(32)])
    made.train(resume_from_checkpoint=None if resume is None else str(resume))
    return made, batches, losses


def llama():
    transformers = pytest.importorskip("transformers", reason="needs transformers")
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**sizes, **heads, vocab_size=32, rms_norm_eps=1e-6)
    )


def mlx_lm_steps(model, optimizer, batches):
    """Steps of a language model in MLX on batches of tokens; their losses."""

    def loss_fn(x):
        logits = model(x)[:, :-1]
        return nn.losses.cross_entropy(logits, x[:, 1:], reduction="mean")

    losses = []
    for batch in batches:
        loss, grads = nn.value_and_grad(model, loss_fn)(mx.array(batch))
        optimizer.update(model, grads)
        losses.append(loss.item())
    return losses
