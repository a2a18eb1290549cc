"""The callback for mlx-lm."""

from types import SimpleNamespace

import mlx.optimizers as optim
from support.helpers import NAN
from support.scaler_helpers import apply

from mlx_gradscale import GradScaler
from mlx_gradscale.diagnostics import LossScaleCallback


def test_callback_adds_to_the_report_and_passes_it_on(capsys):
    scaler, optimizer = GradScaler(init_scale=2.0**20), optim.SGD(0.1)
    for _ in range(3):
        apply(scaler, optimizer, NAN)
        scaler.update()
    trained, validated = [], []
    callback = LossScaleCallback(
        scaler,
        SimpleNamespace(
            on_train_loss_report=trained.append, on_val_loss_report=validated.append
        ),
    )
    given = {"iteration": 10, "train_loss": 1.25}
    callback.on_train_loss_report(given)
    callback.on_train_loss_report(given | {"iteration": 20})
    callback.on_val_loss_report({"iteration": 20, "val_loss": 1.0})
    assert given == {"iteration": 10, "train_loss": 1.25}
    assert trained[0] == given | {
        "loss_scale": 2.0**17,
        "skipped_steps": 3,
        "consecutive_skips": 3,
    }
    assert validated == [{"iteration": 20, "val_loss": 1.0}]
    assert capsys.readouterr().out.splitlines() == [
        "Iter 10: scale 2^17, skipped 3 (3 new)",
        "Iter 20: scale 2^17, skipped 3",
    ]
