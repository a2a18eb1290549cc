"""Histories read nothing per step, and append whole lines to a file."""

from functools import partial

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.helpers import each_mode

from mlx_gradscale import GradScaler, LossScaleOptimizer
from mlx_gradscale.diagnostics import ScaleHistory
from mlx_gradscale.diagnostics.history import ScaleRecord

NUMBERS = st.none() | st.floats(width=32)
RECORDS = st.lists(
    st.builds(
        ScaleRecord,
        step=st.integers(0, 10**9),
        scale=st.integers(-60, 60).map(lambda p: 2.0**p),
        applied=st.booleans(),
        grad_norm=NUMBERS,
        loss=NUMBERS,
    ),
    unique_by=lambda record: record.step,
    max_size=20,
).map(lambda records: sorted(records, key=lambda record: record.step))


@each_mode
def test_history_records_every_step(compiled):
    model, optimizer = nn.Linear(3, 1), optim.SGD(1e-3)
    optimizer.init(model.trainable_parameters())
    scaler, history = GradScaler(init_scale=256.0), ScaleHistory(every=4)
    state = [model.state, optimizer.state, scaler.state]
    loss_and_grad = scaler.value_and_grad(model, lambda x: model(x).square().mean())

    def step(x):
        loss, grads = loss_and_grad(x)
        grads, norm = optim.clip_grad_norm(grads, 1.0)
        scaler.minimize(optimizer, model, grads)
        return loss, norm

    if compiled:
        step = partial(mx.compile, inputs=state, outputs=state)(step)
    for i in range(1, 11):
        # The square of 1e19 fits in float32, a gradient 256 times as large does not.
        loss, norm = step(mx.full((2, 3), 1e19 if i in (3, 7) else 1.0))
        history.record(scaler, loss=loss, grad_norm=norm)
    assert [record.step for record in history.records] == list(range(1, 11))
    assert history.skipped == [3, 7]
    scales = [256.0] * 2 + [128.0] * 4 + [64.0] * 4
    assert [record.scale for record in history.records] == scales
    losses = [record.loss for record in history.records]
    assert losses[2] > 1e30
    assert losses[-1] < losses[0]
    assert all(record.grad_norm > 0 for record in history.records if record.applied)


@pytest.mark.compiles
def test_history_does_not_sync_in_record_or_hide_an_error_in_its_block():
    def step(x, error=None):
        with ScaleHistory() as history:
            # Inside a trace, reading raises.
            history.record(GradScaler(), loss=x * 2, grad_norm=x)
            if error is not None:
                raise error
        return x

    with pytest.raises(ValueError, match="eval"):
        mx.compile(step)(mx.array(1.0))
    with pytest.raises(ZeroDivisionError):
        mx.compile(partial(step, error=ZeroDivisionError()))(mx.array(1.0))


def test_history_records_norm_and_step_of_the_optimizer_and_a_disabled_scale(tmp_path):
    model = nn.Linear(3, 1)
    optimizer = LossScaleOptimizer(optim.SGD(0.1), max_grad_norm=1.0)
    loss_and_grad = optimizer.value_and_grad(model, lambda x: model(x).sum())
    optimizer.update(model, loss_and_grad(mx.array([[3.0, 0.0, 4.0]]))[1])
    with ScaleHistory(tmp_path / "run.csv") as history:
        history.record(optimizer, step=optimizer.step + 6)
        history.record(GradScaler(enabled=False))
    assert ScaleHistory.load(tmp_path / "run.csv").records == history.records
    assert [(r.step, r.scale) for r in history.records] == [(7, 65536.0), (8, 1.0)]
    assert history.records[0].grad_norm == pytest.approx(26**0.5)


def write(history, records):
    scaler = GradScaler()
    for record in records:
        scaler.update(record.scale)
        scaler.state["last_step_applied"] = mx.array(record.applied)
        values = {"loss": record.loss, "grad_norm": record.grad_norm}
        history.record(scaler, step=record.step, **values)
    history.flush()


@settings(deadline=None, max_examples=25)
@given(records=RECORDS)
def test_history_files_round_trip(records, tmp_path_factory):
    path = tmp_path_factory.mktemp("history") / "run.csv"
    write(ScaleHistory(path), records)
    # As text, in which NaN is equal to itself.
    assert repr(ScaleHistory.load(path).records) == repr(records)


def test_second_run_appends_to_the_history_file_and_may_repeat_steps(tmp_path):
    path, scaler = tmp_path / "run.csv", GradScaler()
    for steps in (100, 30):
        with ScaleHistory(path) as history:
            for _ in range(steps):
                history.record(scaler, loss=float(steps))
    with ScaleHistory(path) as history:
        for step in (111, 112):
            history.record(scaler, loss=0.0, step=step)
    loaded = ScaleHistory.load(path).records
    assert [record.step for record in loaded] == list(range(1, 113))
    losses = [100.0] * 100 + [30.0] * 10 + [0.0] * 2
    assert [record.loss for record in loaded] == losses


@pytest.mark.parametrize(
    "content",
    ["my thesis", "1,2.0,yes,,\n", "1,2.0\n", ",2.0,1,,\n", "inf,2.0,1,,\n", "\0\0\n"],
)
def test_file_that_is_no_history_is_refused_and_unchanged(tmp_path, content):
    path = tmp_path / "run.csv"
    is_table = content.endswith("\n")
    content = "step,scale,applied,grad_norm,loss\n" * is_table + content
    path.write_text(content)
    for use in (ScaleHistory, ScaleHistory.load):
        with pytest.raises(ValueError, match="is not a history file"):
            use(path)
    assert path.read_text() == content


def test_history_refuses_wrong_suffixes_and_optimizers(tmp_path):
    for use in (ScaleHistory, ScaleHistory.load):
        with pytest.raises(ValueError, match=r"must end in \.csv, got 'run\.jsonl'"):
            use(tmp_path / "run.jsonl")
    history = ScaleHistory()
    with pytest.raises(TypeError, match="GradScaler"):
        history.record(optim.SGD(0.1), loss=1.0)
    assert history.records == []
