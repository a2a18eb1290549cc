"""mlx-lm's own trainer, unmodified, in float16: the shipped example."""

import re
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("mlx_lm", reason="mlx-lm is not installed")

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
import lora_trainer


@pytest.mark.parametrize(
    "full",
    [False, pytest.param(True, marks=pytest.mark.compiles)],
    ids=["LoRA", "full, compiled"],
)
def test_mlx_lm_trainer_learns_in_float16_and_reports_unscaled_losses(
    full, capsys, monkeypatch
):
    np.random.seed(0)  # noqa: NPY002 - the trainer shuffles with this one
    calls, loss_fn = [], lora_trainer.default_loss

    def loss(*arguments):
        calls.append(None)
        return loss_fn(*arguments)

    monkeypatch.setattr(lora_trainer, "default_loss", loss)
    arguments = ["--full"] if full else ["--accumulate", "2", "--grad-checkpoint"]
    optimizer = lora_trainer.main(["--iters", "24", *arguments])
    applied, skipped = optimizer.step.item(), optimizer.scaler.skipped_steps.item()
    assert applied + skipped == (24 if full else 12)
    assert applied > 4 * skipped
    assert optimizer.learning_rate.item() < 2e-3  # the schedule starts at 3e-3
    out = re.sub(r"\x1b\[[\d;]*m", "", capsys.readouterr().out)
    assert "scale 2^" in out
    assert f"{applied} steps applied, {skipped} skipped" in out
    # 128 tokens: an untrained model is near log(128) = 4.9. Scaled, the loss would
    # read 300,000.
    validated = [float(x) for x in re.findall(r"val (\d+\.\d+)", out)]
    assert 3.5 < validated[0] < 6.0
    assert validated[-1] < validated[0] - 0.3
    # Two traces of the step, as for any optimizer that is not initialized before;
    # the other calls are the validation's, one batch each.
    assert len(calls) == (2 if full else 24) + len(validated)
