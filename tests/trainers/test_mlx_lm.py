"""mlx-lm's own trainer, unmodified, in float16: the shipped example and more."""

import sys
from pathlib import Path
from types import SimpleNamespace

import mlx.core as mx
import mlx.optimizers as optim
import numpy as np
import pytest
from mlx.utils import tree_flatten

from mlx_gradscale import LossScaleOptimizer

mlx_lm = pytest.importorskip("mlx_lm", reason="mlx-lm is not installed")
from mlx_lm.tuner.trainer import TrainingArgs, default_loss, train  # noqa: E402

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
import lora_trainer  # noqa: E402


@pytest.mark.parametrize("full", [False, True], ids=["LoRA", "full"])
def test_lora_trainer_example_applies_most_of_its_steps(full, capsys):
    arguments = ["--full"] if full else ["--accumulate", "2", "--grad-checkpoint"]
    optimizer = lora_trainer.main(["--iters", "12", *arguments])
    applied, skipped = optimizer.step.item(), optimizer.scaler.skipped_steps.item()
    assert applied + skipped == (12 if full else 6)
    assert applied > skipped
    out = capsys.readouterr().out
    assert "scale 2^" in out
    assert f"{applied} steps applied, {skipped} skipped" in out


@pytest.mark.parametrize(
    "full",
    [False, pytest.param(True, marks=pytest.mark.compiles)],
    ids=["LoRA", "full, compiled"],
)
def test_mlx_lm_trainer_learns_in_float16_and_reports_unscaled_losses(full, tmp_path):
    np.random.seed(0)  # noqa: NPY002 - the trainer shuffles with this one
    model = lora_trainer.make_model(full)
    optimizer = LossScaleOptimizer(optim.AdamW(optim.cosine_decay(3e-3, 24)))
    calls, trained, validated = [], [], []

    def loss(*arguments):
        calls.append(None)
        return default_loss(*arguments)

    train(
        model,
        optimizer,
        *lora_trainer.make_data(),
        args=TrainingArgs(
            batch_size=4,
            iters=24,
            val_batches=1,
            steps_per_report=8,
            steps_per_eval=12,
            max_seq_length=64,
            adapter_file=str(tmp_path / "adapters.safetensors"),
        ),
        loss=optimizer.scale_loss(loss),
        training_callback=SimpleNamespace(
            on_train_loss_report=trained.append,
            on_val_loss_report=lambda report: validated.append(report["val_loss"]),
        ),
    )
    # 128 tokens: an untrained model is near log(128) = 4.9. Scaled, the loss would
    # read 300,000.
    assert 3.5 < validated[0] < 6.0
    assert validated[-1] < validated[0] - 0.3
    assert trained[-1]["train_loss"] < trained[0]["train_loss"]
    assert trained[-1]["learning_rate"] < 1e-3
    assert optimizer.step.item() + optimizer.scaler.skipped_steps.item() == 24
    assert optimizer.step.item() > 20
    assert dict(tree_flatten(model.parameters())).popitem()[1].dtype == mx.float16
    # Two traces of the step, as for any optimizer that is not initialized before;
    # the other calls are the validation's, one batch each.
    assert len(calls) == (2 if full else 24) + len(validated)
