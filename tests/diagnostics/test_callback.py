"""The alarm, the table of overflows and the callback for mlx-lm."""

import warnings
from functools import partial

import mlx.core as mx
import mlx.optimizers as optim
import pytest

from mlx_gradscale import GradScaler, LossScaleOptimizer, nonfinite
from mlx_gradscale.diagnostics import (
    LossScaleCallback,
    ScaleHistory,
    SkipAlarm,
    SkippedStepsError,
    SkippedStepsWarning,
    check_skips,
    overflow_table,
)

INF, NAN = float("inf"), float("nan")
BAD = {"a": mx.ones(2), "layers": [{"weight": mx.array([INF, NAN, -INF, 0.0])}]}


def skipping(times: int) -> GradScaler:
    """Return a scaler that has skipped so many steps in a row."""
    scaler, optimizer = GradScaler(init_scale=2.0**20), optim.SGD(0.1)
    scaler.scale(mx.array(1.0))
    for _ in range(times):
        scaler.apply_gradients(optimizer, {"w": mx.array(NAN)}, {"w": mx.array(1.0)})
        scaler.update()
    return scaler


def test_the_table_names_what_overflows():
    header, row = overflow_table(BAD).splitlines()
    assert header.split() == ["parameter", "dtype", "nan", "+inf", "-inf", "of"]
    assert row.split() == ["layers.0.weight", "float32", "1", "1", "1", "4"]
    assert overflow_table(nonfinite(BAD)) == overflow_table(BAD)
    assert overflow_table({"a": mx.ones(2)}) == "Every value is finite."


def test_the_optimizer_too_remembers_gradients_for_the_table():
    optimizer = LossScaleOptimizer(optim.SGD(0.1), GradScaler(init_scale=1.0))
    optimizer.scaler.skip_alarm = SkipAlarm(limit=1)
    optimizer.scale_loss(lambda: None)
    grads = {"w": mx.array([NAN])}
    optimizer.apply_gradients(grads, {"w": mx.ones(1)})
    with pytest.warns(SkippedStepsWarning, match="w +float32"):
        check_skips(optimizer)


def test_a_long_table_is_cut():
    grads = [mx.array(NAN) for _ in range(30)]
    lines = overflow_table(grads).splitlines()
    assert len(lines) == 22
    assert lines[-1] == "... and 10 more"
    assert len(overflow_table(grads, limit=None).splitlines()) == 31


def test_it_is_silent_below_the_limit():
    assert check_skips(skipping(3)) == 3


def test_it_warns_with_the_table_and_then_at_each_doubling():
    scaler = skipping(4)
    scaler.skip_alarm = SkipAlarm(limit=4)
    with pytest.warns(SkippedStepsWarning, match=r"2\^16(.|\n)*layers\.0\.weight"):
        assert check_skips(scaler, BAD) == 4
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for skips in [*range(4, 17), 0, 3, 4]:
            scaler.state["consecutive_skips"] = mx.array(skips)
            check_skips(scaler)
    said = [str(warning.message).split()[0] for warning in caught]
    assert said == ["8", "16", "4"]


def test_it_says_how_to_find_the_layer():
    with pytest.warns(SkippedStepsWarning) as caught:
        SkipAlarm(limit=1).check(1, 1.0)
    call = "explain_overflow(model, loss_fn, *batch, scale=scaler, compute_dtype="
    assert call in str(caught[0].message)


def flush(scaler):
    ScaleHistory(every=1).record(scaler)


def read_records(scaler):
    history = ScaleHistory()
    history.record(scaler)
    list(history)


def report_to_mlx_lm(scaler):
    LossScaleCallback(scaler, write=None).on_train_loss_report({})


@pytest.mark.parametrize(
    "read",
    [
        lambda scaler: scaler.get_scale(),
        lambda scaler: check_skips(scaler),
        lambda scaler: scaler.skip_alarm.check(1, 1.0),
        flush,
        read_records,
        report_to_mlx_lm,
    ],
)
def test_it_points_to_the_users_line(read):
    scaler = skipping(1)
    scaler.skip_alarm = SkipAlarm(limit=1)
    with pytest.warns(SkippedStepsWarning) as caught:
        read(scaler)
    lines = {line for *_, line in read.__code__.co_lines()}
    assert caught[0].filename == __file__
    assert caught[0].lineno in lines


def test_it_remembers_gradients_without_keeping_them():
    alarm, grads = SkipAlarm(limit=1), {"w": mx.array([NAN, 1.0])}
    alarm.remember(grads)
    with pytest.warns(SkippedStepsWarning, match="parameter"):
        alarm.check(1, 1.0)
    del grads
    with pytest.warns(SkippedStepsWarning) as caught:
        alarm.check(2, 1.0)
    assert "parameter" not in str(caught[0].message)


def test_gradients_of_a_trace_are_no_table_and_no_error():
    scaler, optimizer, kept = GradScaler(), optim.SGD(0.1), []
    scaler.skip_alarm = SkipAlarm(limit=1)
    scaler.scale(mx.array(1.0))
    optimizer.init({"w": mx.array(1.0)})
    state = [optimizer.state, scaler.state]

    @partial(mx.compile, inputs=state, outputs=state)
    def step(x):
        kept.append({"w": x * 2})
        scaler.apply_gradients(optimizer, kept[-1], {"w": mx.array(1.0)})
        scaler.update()

    step(mx.array(NAN))
    with pytest.warns(SkippedStepsWarning) as caught:
        scaler.get_scale()
    assert "parameter" not in str(caught[0].message)


def test_it_explains_only_when_it_goes_off():
    calls = []
    alarm = SkipAlarm(3, "raise", explain=lambda: calls.append(1) or "It is layer 7.")
    alarm.check(2, 1.0)
    assert not calls
    with pytest.raises(SkippedStepsError, match=r"It is layer 7\."):
        alarm.check(3, 1.0)


@pytest.mark.parametrize(
    "wrong", [{"limit": 0}, {"limit": 2.5}, {"limit": True}, {"action": "shout"}]
)
def test_settings_are_checked(wrong):
    with pytest.raises(ValueError, match=r"limit|action"):
        SkipAlarm(**wrong)


class Sink:
    def __init__(self):
        self.train, self.val = [], []

    def on_train_loss_report(self, info):
        self.train.append(info)

    def on_val_loss_report(self, info):
        self.val.append(info)


def test_the_callback_adds_to_the_report_and_hands_it_on():
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


def test_the_callback_sets_off_the_alarm():
    scaler = skipping(5)
    scaler.skip_alarm = SkipAlarm(limit=5, action="raise")
    sink = Sink()
    with pytest.raises(SkippedStepsError):
        LossScaleCallback(scaler, sink, None).on_train_loss_report({"iteration": 1})
    assert len(sink.train) == 1


def test_mlx_lm_trains_with_the_callback(tmp_path):
    trainer = pytest.importorskip("mlx_lm.tuner.trainer")
    from mlx_lm.models import llama

    model = llama.Model(
        llama.ModelArgs(
            model_type="llama",
            hidden_size=16,
            num_hidden_layers=1,
            intermediate_size=32,
            num_attention_heads=2,
            rms_norm_eps=1e-5,
            vocab_size=32,
        )
    )
    model.set_dtype(mx.float16)
    scaler = GradScaler(init_scale=2.0**30)
    optimizer = LossScaleOptimizer(optim.AdamW(1e-3), scaler, max_grad_norm=1.0)
    sink, lines = Sink(), []
    data = [([i % 32, 1, 2, 3, 4, 5, 6, 7], 0) for i in range(8)]
    trainer.train(
        model,
        optimizer,
        data,
        data,
        args=trainer.TrainingArgs(
            batch_size=2,
            iters=40,
            steps_per_report=10,
            steps_per_eval=100,
            val_batches=1,
            adapter_file=str(tmp_path / "adapters.safetensors"),
            max_seq_length=16,
        ),
        loss=optimizer.scale_loss(trainer.default_loss),
        training_callback=LossScaleCallback(optimizer, sink, lines.append),
    )
    assert [report["iteration"] for report in sink.train] == [10, 20, 30, 40]
    assert len(lines) == 4
    assert sink.val
    first, last = sink.train[0], sink.train[-1]
    assert first["skipped_steps"] > 0
    assert first["loss_scale"] < 2.0**30
    assert last["consecutive_skips"] == 0
    assert 0 < last["grad_norm"] < float("inf")
    assert last["loss_scale"] == scaler.get_scale()
    assert last["train_loss"] < first["train_loss"]
