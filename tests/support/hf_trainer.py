"""Transformers' Trainer on batches of NumPy arrays, with checkpoints to resume from."""

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
