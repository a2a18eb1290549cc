"""mlx-lm's own trainer, unmodified, in float16: the shipped example and more."""

import sys
from pathlib import Path

import mlx.core as mx
import mlx.optimizers as optim
import numpy as np
import pytest
from mlx.utils import tree_flatten

from mlx_gradscale import GradScaler, LossScaleOptimizer

mlx_lm = pytest.importorskip("mlx_lm", reason="mlx-lm is not installed")
from mlx_lm.tuner.trainer import TrainingArgs, default_loss, train  # noqa: E402

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
import lora_trainer  # noqa: E402


class Reports:
    def __init__(self):
        self.train, self.validation = [], []

    def on_train_loss_report(self, report):
        self.train.append(report)

    def on_val_loss_report(self, report):
        self.validation.append(report["val_loss"])


def fit(model, optimizer, folder, loss, iters=24, **arguments):
    np.random.seed(0)  # noqa: NPY002 - the trainer shuffles with this one
    reports = Reports()
    training, validation = lora_trainer.make_data()
    train(
        model,
        optimizer,
        training,
        validation,
        args=TrainingArgs(
            iters=iters,
            val_batches=1,
            steps_per_report=iters // 3,
            steps_per_eval=iters // 2,
            max_seq_length=64,
            adapter_file=str(folder / "adapters.safetensors"),
            **({"batch_size": 4} | arguments),
        ),
        loss=loss,
        training_callback=reports,
    )
    return reports


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
    model = lora_trainer.make_model(full)
    optimizer = LossScaleOptimizer(optim.AdamW(optim.cosine_decay(3e-3, 24)))
    calls = []

    def loss(*arguments):
        calls.append(None)
        return default_loss(*arguments)

    reports = fit(model, optimizer, tmp_path, optimizer.scale_loss(loss))
    # 128 tokens: an untrained model is near log(128) = 4.9. Scaled, the loss would
    # read 300,000.
    assert 3.5 < reports.validation[0] < 6.0
    assert reports.validation[-1] < reports.validation[0] - 0.3
    assert reports.train[-1]["train_loss"] < reports.train[0]["train_loss"]
    assert reports.train[-1]["learning_rate"] < 1e-3
    assert optimizer.step.item() + optimizer.scaler.skipped_steps.item() == 24
    assert optimizer.step.item() > 20
    assert dict(tree_flatten(model.parameters())).popitem()[1].dtype == mx.float16
    # Two traces of the step, as for any optimizer that is not initialised before;
    # the other calls are the validation's, one batch each.
    assert len(calls) == (2 if full else 24) + len(reports.validation)


def test_64_micro_batches_do_not_overflow_by_being_added_up(tmp_path):
    # Each has gradients of up to 6e4 / 16 when scaled: in float16 their sum is inf.
    model = lora_trainer.make_model(full=True)
    scaler = GradScaler(init_scale=2.0**9, growth_interval=10**6)
    optimizer = LossScaleOptimizer(optim.SGD(1e-3), scaler)
    optimizer.init(model.trainable_parameters())

    def loud(*arguments):
        loss, tokens = default_loss(*arguments)
        return loss * 2.0**4, tokens

    loss = optimizer.scale_loss(loud)
    options = {"batch_size": 1, "grad_accumulation_steps": 64}
    fit(model, optimizer, tmp_path, loss, 64, **options)
    assert optimizer.step.item() == 1
    assert optimizer.scaler.skipped_steps.item() == 0
