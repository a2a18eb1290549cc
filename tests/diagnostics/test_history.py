"""Histories read nothing per step, and append to files that survive a crash."""

import json
import math
from functools import partial

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_gradscale import GradScaler, LossScaleOptimizer
from mlx_gradscale.diagnostics import ScaleHistory, ScaleRecord

NUMBERS = st.none() | st.floats(width=32, allow_nan=False)
RECORDS = st.lists(
    st.builds(
        ScaleRecord,
        step=st.integers(0, 10**9),
        scale=st.floats(min_value=2.0**-100, max_value=2.0**100, width=32),
        applied=st.booleans(),
        grad_norm=NUMBERS,
        loss=NUMBERS,
    ),
    unique_by=lambda record: record.step,
    max_size=20,
).map(lambda records: sorted(records, key=lambda record: record.step))


def train(history, overflow_at=(), steps=10, scaler=None, compiled=True, bad=1e19):
    """Train a small model; the batch is infinite at the steps named."""
    mx.random.seed(0)
    model, optimizer = nn.Linear(3, 1), optim.SGD(1e-3)
    optimizer.init(model.trainable_parameters())
    scaler = scaler or GradScaler(init_scale=256.0)
    state = [model.state, optimizer.state, scaler.state]
    loss_and_grad = scaler.value_and_grad(model, lambda x: model(x).square().mean())

    def step(x):
        loss, grads = loss_and_grad(x)
        grads = scaler.unscale_(optimizer, grads)
        grads, norm = optim.clip_grad_norm(grads, 1.0)
        scaler.minimize(optimizer, model, grads)
        return loss, norm

    if compiled:
        step = partial(mx.compile, inputs=state, outputs=state)(step)
    for i in range(1, steps + 1):
        # Its square fits in float32, and a gradient 256 times as large does not.
        x = mx.full((2, 3), bad if i in overflow_at else 1.0)
        loss, norm = step(x)
        history.record(scaler, loss=loss, grad_norm=norm)
    return scaler


@pytest.mark.parametrize("compiled", [True, False])
def test_history_has_every_step(compiled):
    history = ScaleHistory(every=4)
    train(history, overflow_at=(3, 7), compiled=compiled)
    assert len(history) == 10
    assert [record.step for record in history] == list(range(1, 11))
    assert history.skipped == [3, 7]
    assert [record.scale for record in history] == [256.0] * 2 + [128.0] * 4 + [
        64.0
    ] * 4
    losses = [record.loss for record in history]
    assert losses[2] > 1e30
    assert losses[-1] < losses[0]
    assert all(record.grad_norm > 0 for record in history if record.applied)


def test_record_reads_nothing():
    # An array that cannot be evaluated: inside a trace, reading raises.
    history, scaler = ScaleHistory(every=100), GradScaler()

    @mx.compile
    def step(x):
        history.record(scaler, loss=x * 2, grad_norm=x)
        with pytest.raises(ValueError, match="eval"):
            history.flush()
        return x

    step(mx.array(1.0))


def test_optimizer_provides_its_gradient_norm():
    model = nn.Linear(3, 1)
    optimizer = LossScaleOptimizer(optim.SGD(0.1), max_grad_norm=1.0)
    loss_and_grad = optimizer.value_and_grad(model, lambda x: model(x).sum())
    optimizer.update(model, loss_and_grad(mx.array([[3.0, 0.0, 4.0]]))[1])
    history = ScaleHistory()
    history.record(optimizer)
    assert history[0].grad_norm == pytest.approx(26**0.5)


@settings(deadline=None, max_examples=40)
@given(records=RECORDS, suffix=st.sampled_from([".csv", ".jsonl"]))
def test_files_round_trip(records, suffix, tmp_path_factory):
    path = tmp_path_factory.mktemp("history") / f"run{suffix}"
    history = ScaleHistory()
    history._records = records
    history.save(path)
    assert ScaleHistory.load(path).records == records


@pytest.mark.parametrize("suffix", [".csv", ".jsonl"])
def test_nonfinite_values_round_trip(tmp_path, suffix):
    path = tmp_path / f"run{suffix}"
    history, scaler = ScaleHistory(path, every=2), GradScaler()
    history.record(
        scaler, loss=mx.array(float("nan")), grad_norm=mx.array(float("inf"))
    )
    history.record(scaler, loss=float("-inf"))
    first, second = ScaleHistory.load(path)
    assert math.isnan(first.loss)
    assert first.grad_norm == math.inf
    assert (second.loss, second.grad_norm) == (-math.inf, None)
    if suffix == ".jsonl":
        for line in path.read_text().splitlines():
            json.loads(line, parse_constant=pytest.fail)


@pytest.mark.parametrize("suffix", [".csv", ".jsonl"])
def test_line_that_a_crash_cut_off_is_dropped(tmp_path, suffix):
    path = tmp_path / f"run{suffix}"
    train(ScaleHistory(path, every=2), steps=4)
    whole = path.read_bytes()
    for cut in range(len(whole)):
        path.write_bytes(whole[:cut])
        found = ScaleHistory.load(path).records
        assert [record.step for record in found] == list(range(1, len(found) + 1))
        resumed = ScaleHistory(path, every=1)
        resumed.record(GradScaler(init_scale=4.0), step=len(found) + 1)
        again = ScaleHistory.load(path).records
        assert again[:-1] == found
        assert again[-1] == ScaleRecord(len(found) + 1, 4.0, True)


def test_run_that_went_back_replaces_later_steps(tmp_path):
    path = tmp_path / "run.csv"
    history, scaler = ScaleHistory(path, every=1), GradScaler()
    for step in (1, 2, 3):
        history.record(scaler, loss=0.0, step=step)
    resumed = ScaleHistory(path, every=1)
    for step in (2, 3, 4):
        resumed.record(scaler, loss=1.0, step=step)
    loaded = ScaleHistory.load(path)
    assert [(r.step, r.loss) for r in loaded] == [
        (1, 0.0),
        (2, 1.0),
        (3, 1.0),
        (4, 1.0),
    ]


@pytest.mark.parametrize("suffix", [".csv", ".jsonl"])
def test_second_run_continues_the_file(tmp_path, suffix):
    path, scaler = tmp_path / f"run{suffix}", GradScaler()
    for steps in (100, 30):
        with ScaleHistory(path) as history:
            for _ in range(steps):
                history.record(scaler, loss=float(steps))
    loaded = ScaleHistory.load(path)
    assert [record.step for record in loaded] == list(range(1, 131))
    assert [record.loss for record in loaded] == [100.0] * 100 + [30.0] * 30


def test_with_block_reads_the_rest_and_hides_no_error(tmp_path):
    path = tmp_path / "run.csv"

    def run(loss, path=None):
        with ScaleHistory(path) as history:
            history.record(GradScaler(), loss=loss)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run(mx.array(1.0), path)
    assert len(ScaleHistory.load(path)) == 1
    with pytest.raises(ZeroDivisionError):
        mx.compile(run)(mx.array(1.0))  # inside a trace nothing can be read

    @mx.compile
    def unbroken(x):
        with ScaleHistory() as history:
            history.record(GradScaler(), loss=x)
        return x

    with pytest.raises(ValueError, match="eval"):
        unbroken(mx.array(1.0))


@pytest.mark.parametrize("name", ["run.csv", "run.jsonl"])
@pytest.mark.parametrize("content", ["my thesis", "a,b\n1,2\n", "{}\n", "[1]\n"])
def test_other_file_is_left_alone(tmp_path, name, content):
    path = tmp_path / name
    path.write_text(content)
    with pytest.raises(ValueError, match="another file name"):
        ScaleHistory(path)
    with pytest.raises(ValueError, match="is not a history"):
        ScaleHistory.load(path)
    assert path.read_text() == content


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("run.csv", "1,2.0,yes,,"),
        ("run.csv", "1,2.0"),
        ("run.csv", "one,2.0,1,,"),
        ("run.jsonl", '{"step": 1, "applied": true}'),
        ("run.jsonl", '{"step": 1, "scale": 2.0, "applied": 1}'),
        ("run.jsonl", '{"step": 1'),
        ("run.jsonl", '{"step": ' + "[" * 100_000),
        ("run.jsonl", '{"step": 1, "applied": true, "scale": ' + "9" * 400 + "}"),
    ],
)
def test_broken_line_is_named(tmp_path, name, line):
    path = tmp_path / name
    ScaleHistory(path)
    with open(path, "a") as file:
        file.write(line + "\n")
    with pytest.raises(ValueError, match=f"{name}, line .*is no record"):
        ScaleHistory.load(path)


def test_misuse_raises(tmp_path):
    with pytest.raises(ValueError, match=r"\.csv or \.jsonl"):
        ScaleHistory(tmp_path / "run.txt")
    with pytest.raises(ValueError, match="every"):
        ScaleHistory(every=0)
    with pytest.raises(TypeError, match="GradScaler"):
        ScaleHistory().record(optim.SGD(0.1), loss=1.0)
    history = ScaleHistory()
    with pytest.raises(ValueError, match="one number per step"):
        history.record(GradScaler(), loss=mx.ones(3))
    assert len(history) == 0
