"""The callback for mlx-lm."""

import mlx.core as mx
import mlx.optimizers as optim

from mlx_gradscale import GradScaler
from mlx_gradscale.diagnostics import LossScaleCallback

NAN = float("nan")


def skipping(times):
    """Return a scaler that has skipped so many steps in a row."""
    scaler, optimizer = GradScaler(init_scale=2.0**20), optim.SGD(0.1)
    scaler.scale(mx.array(1.0))
    for _ in range(times):
        scaler.apply_gradients(optimizer, {"w": mx.array(NAN)}, {"w": mx.array(1.0)})
        scaler.update()
    return scaler


def test_callback_reports_a_disabled_scaler_with_a_scale_of_one(capsys):
    callback = LossScaleCallback(GradScaler(enabled=False))
    callback.on_train_loss_report({"iteration": 1})
    assert capsys.readouterr().out == "Iter 1: scale 2^0, skipped 0\n"


class Sink:
    def __init__(self):
        self.train, self.val = [], []

    def on_train_loss_report(self, info):
        self.train.append(info)

    def on_val_loss_report(self, info):
        self.val.append(info)


def test_callback_adds_to_the_report_and_passes_it_on(capsys):
    scaler, sink = skipping(3), Sink()
    callback = LossScaleCallback(scaler, sink)
    given = {"iteration": 10, "train_loss": 1.25}
    callback.on_train_loss_report(given)
    callback.on_train_loss_report(given | {"iteration": 20})
    callback.on_val_loss_report({"iteration": 20, "val_loss": 1.0})
    assert given == {"iteration": 10, "train_loss": 1.25}
    assert sink.train[0] == given | {
        "loss_scale": 2.0**17,
        "skipped_steps": 3,
        "consecutive_skips": 3,
    }
    assert sink.val == [{"iteration": 20, "val_loss": 1.0}]
    assert capsys.readouterr().out.splitlines() == [
        "Iter 10: loss 1.250, scale 2^17, skipped 3 (3 new)",
        "Iter 20: loss 1.250, scale 2^17, skipped 3",
    ]
