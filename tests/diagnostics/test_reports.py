"""The table of overflows, and the callback for mlx-lm."""

import mlx.core as mx
import mlx.optimizers as optim

from mlx_gradscale import GradScaler, nonfinite
from mlx_gradscale.diagnostics import LossScaleCallback, overflow_table

INF, NAN = float("inf"), float("nan")
BAD = {"a": mx.ones(2), "layers": [{"weight": mx.array([INF, NAN, -INF, 0.0])}]}


def test_table_names_leaves_that_overflow():
    header, row = overflow_table(BAD).splitlines()
    assert header.split() == ["name", "dtype", "nan", "+inf", "-inf", "of"]
    assert row.split() == ["layers.0.weight", "float32", "1", "1", "1", "4"]
    assert overflow_table(nonfinite(BAD)) == overflow_table(BAD)
    assert overflow_table({"a": mx.ones(2)}) == "Every value is finite."


def test_long_table_is_cut():
    grads = [mx.array(NAN) for _ in range(30)]
    lines = overflow_table(grads).splitlines()
    assert len(lines) == 22
    assert lines[-1] == "... and 10 more"
    assert len(overflow_table(grads, limit=None).splitlines()) == 31


def skipping(times):
    """Return a scaler that has skipped so many steps in a row."""
    scaler, optimizer = GradScaler(init_scale=2.0**20), optim.SGD(0.1)
    scaler.scale(mx.array(1.0))
    for _ in range(times):
        scaler.apply_gradients(optimizer, {"w": mx.array(NAN)}, {"w": mx.array(1.0)})
        scaler.update()
    return scaler


class Sink:
    def __init__(self):
        self.train, self.val = [], []

    def on_train_loss_report(self, info):
        self.train.append(info)

    def on_val_loss_report(self, info):
        self.val.append(info)


def test_callback_adds_to_the_report_and_passes_it_on():
    scaler, sink, lines = skipping(3), Sink(), []
    callback = LossScaleCallback(scaler, sink, lines.append)
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
    assert lines == [
        "Iter 10: loss 1.250, scale 2^17, skipped 3 (3 new)",
        "Iter 20: loss 1.250, scale 2^17, skipped 3",
    ]
