"""An exception or Ctrl-C anywhere in a step: the next call just works."""

import linecache
import signal
import sys
from functools import partial

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
import pytest
from helpers import Mlp, Traced, batch, bits, mse
from mlx.utils import tree_flatten, tree_map

from mlx_gradscale import (
    GradScaler,
    LossScaleOptimizer,
    compile_step,
    everywhere,
    float32_layers,
)
from mlx_gradscale.diagnostics import compute_dtypes
from mlx_gradscale.ema import EMA
from mlx_gradscale.precision.dtypes import watched_dtypes


@pytest.fixture(autouse=True)
def _ctrl_c_is_heard():
    # What a shell starts in the background ignores it.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


# Python handles no signal between a finally and what it calls first, nor where a lock
# is taken or given back.
UNINTERRUPTED = "put_back()", "with _lock:"


class Interrupt:
    """Raise KeyboardInterrupt at the n-th line that the package, or a part of it, runs.

    By the interpreter's own signal, so that it comes where Ctrl-C would: between two
    bytecodes, never inside of a call into C.
    """

    def __init__(self, at, part=""):
        self.at, self.lines, self.part = at, 0, f"mlx_gradscale{part}"

    def __enter__(self):
        self.before = sys.gettrace()
        sys.settrace(self._call)
        return self

    def __exit__(self, *_):
        sys.settrace(self.before)

    def _call(self, frame, event, _):
        name = frame.f_globals.get("__name__", "")
        return self._line if name.startswith(self.part) else None

    def _line(self, frame, event, _):
        if event == "line":
            self.lines += 1
            line = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
            if self.lines == self.at and line.strip() not in UNINTERRUPTED:
                signal.raise_signal(signal.SIGINT)
        return self._line


def lines_of(step, part=""):
    with Interrupt(-1, part) as count:
        step()
    return count.lines


class Loop:
    def __init__(self, way):
        mx.random.seed(4)
        self.model = Mlp(dtype=mx.float32 if way == "GradScaler" else mx.float16)
        scaler = GradScaler(64.0, growth_interval=1000)
        model = self.model
        if way == "GradScaler":
            self.optimizer = optim.Adam(1e-2)
            f = scaler.value_and_grad(model, mse(model), mx.float16)
        else:
            self.optimizer = LossScaleOptimizer(optim.Adam(1e-2), scaler)
            f = self.optimizer.value_and_grad(model, mse(model))
        self.x, self.y = batch(dtype=mx.float16)
        self.optimizer.init(model.trainable_parameters())
        self.scaler = scaler

        def step():
            _, grads = f(self.x, self.y)
            if way == "GradScaler":
                scaler.step(self.optimizer, model, grads)
                scaler.update()
            else:
                self.optimizer.update(model, grads)
            mx.eval(model.state, self.optimizer.state, scaler.state)

        self.step = step

    def everything(self):
        tree = [self.model.parameters(), self.optimizer.state]
        return bits(tree)


@pytest.mark.parametrize("way", ["GradScaler", "LossScaleOptimizer"])
def test_state_and_weights_change_together_and_the_next_step_just_works(way):
    loop = Loop(way)
    loop.step()
    total = lines_of(loop.step)
    mx.random.seed(0)
    # Lines here and there: no place is special.
    for at in range(1, total, max(total // 60, 1)):
        loop = Loop(way)
        loop.step()
        before = loop.everything()
        whole = Loop(way)
        whole.step()
        whole.step()
        with pytest.raises(KeyboardInterrupt), Interrupt(at):
            loop.step()
        mx.eval(loop.model.state, loop.optimizer.state, loop.scaler.state)
        weights = {x.dtype for _, x in tree_flatten(loop.model.parameters())}
        assert weights == {mx.float32 if way == "GradScaler" else mx.float16}
        # As before the step or as after it: nothing of it alone. The scaler counts
        # for itself.
        assert loop.everything() in (before, whole.everything()), at
        loop.step()
        assert loop.scaler.last_step_applied.item()


@pytest.mark.parametrize("way", ["GradScaler", "LossScaleOptimizer"])
def test_the_first_step_too_which_traces_the_optimizer(way):
    whole, total = Loop(way), lines_of(Loop(way).step)
    expected = [whole.everything()]
    for _ in range(2):
        whole.step()
        expected.append(whole.everything())
    # Many lines of the step itself, and some of the gradient.
    for at in [*range(1, total // 2, 97), *range(total // 2, total, 11)]:
        loop = Loop(way)
        try:
            with Interrupt(at):
                loop.step()
        except KeyboardInterrupt:
            pass
        mx.eval(loop.model.state, loop.optimizer.state, loop.scaler.state)
        done = expected.index(loop.everything())
        loop.step()
        assert loop.everything() == expected[done + 1], at


def at_every_line(call, check, part=""):
    """Interrupt ``call()`` at each of its lines, and ``check(line)`` what is left."""
    for at in range(1, lines_of(call, part) + 1):
        try:
            with Interrupt(at, part):
                call()
        except KeyboardInterrupt:
            pass
        check(at)


@pytest.mark.parametrize("keep", [None, lambda path, x: "layers.0" in path])
def test_a_model_is_never_left_cast(keep):
    model, data = Mlp(), batch()
    scaler = GradScaler(64.0)
    gradient = scaler.value_and_grad(model, mse(model), mx.float16, keep=keep)
    before = bits(model.parameters())
    gradient(*data)  # the first has more lines
    layer = type(model.layers[0])

    def check(at):
        assert bits(model.parameters()) == before, at
        assert type(model.layers[0]) is layer, at

    at_every_line(lambda: gradient(*data), check)


def test_the_layers_of_a_first_gradient_are_not_watched_for_good():
    model, method = Mlp(dtype=mx.float16), nn.Linear.__call__
    x, y = batch(dtype=mx.float16)

    def first_gradient():
        optimizer = LossScaleOptimizer(optim.SGD(0.1), GradScaler(64.0))
        optimizer.value_and_grad(model, mse(model))(x, y)

    def check(at):
        assert nn.Linear.__call__ is method, at
        with watched_dtypes(model) as calls:
            assert calls.are_seen, at

    at_every_line(first_gradient, check, ".precision.dtypes")


def test_diagnostics_leave_the_model_and_compilation_as_they_were():
    model, data = Mlp(dtype=mx.float16), batch(dtype=mx.float16)
    before = bits(model.parameters())

    def check(at):
        traced = Traced(lambda x: x + 1)
        compiled = mx.compile(traced)
        compiled(compiled(mx.ones(1)))
        assert traced.count == 1, at
        assert bits(model.parameters()) == before, at
        assert type(model.layers[0]) is nn.Linear, at

    report = partial(compute_dtypes, model, mse(model), *data)
    for part in (".diagnostics", ".probes"):
        at_every_line(report, check, part)


def test_calibrate_leaves_buffers_and_random_numbers_as_they_were():
    mx.random.seed(4)
    model = nn.Sequential(
        nn.Linear(8, 8), nn.BatchNorm(8), nn.Dropout(), nn.Linear(8, 1)
    )
    loss_fn, data = mse(model), batch()
    before = bits([model.parameters(), mx.random.state[0]])

    def check(at):
        assert bits([model.parameters(), mx.random.state[0]]) == before, at

    def calibrate():
        GradScaler().calibrate(model, loss_fn, *data, compute_dtype=mx.float16)

    at_every_line(calibrate, check, ".calibration")


def test_an_average_is_not_left_in_the_model():
    model = Mlp()
    ema = EMA(model)
    model.update(tree_map(lambda x: x + 1, model.parameters()))
    before = bits(model.parameters())

    def evaluate():
        with ema.swapped_into(model):
            assert bits(model.parameters()) != before

    def check(at):
        assert bits(model.parameters()) == before, at

    at_every_line(evaluate, check)


def test_the_next_everywhere_does_what_an_interrupted_one_did_not():
    model, data = Mlp(), batch()
    plain = nn.value_and_grad

    def train():
        with everywhere():
            optimizer = optim.SGD(0.1)
            _, gradients = nn.value_and_grad(model, mse(model))(*data)
            optimizer.update(model, gradients)
        return optimizer

    def enter():
        with everywhere():
            pass

    def check(at):
        assert isinstance(optim.SGD(0.1), optim.SGD), at
        assert isinstance(train(), LossScaleOptimizer), at

    at_every_line(enter, check)
    nn.value_and_grad(model, mse(model))(*data)
    with everywhere():
        assert nn.value_and_grad is not plain


def test_update_forgotten_in_an_eager_loop_is_an_error_all_the_same():
    model, optimizer, scaler = Mlp(), optim.SGD(0.1), GradScaler(64.0)
    loss_and_grad = scaler.value_and_grad(model, mse(model), mx.float16)

    def step():
        scaler.step(optimizer, model, loss_and_grad(*batch())[1])

    step()
    step()  # as if the first had been cut short
    with pytest.raises(RuntimeError, match=r"update\(\) was not called"):
        step()
    scaler.update(64.0)
    step()
    scaler.update()


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_a_trace_that_raises_leaves_everything_as_it_was(error):
    mx.random.seed(4)
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm(8), nn.Linear(8, 1))
    model.set_dtype(mx.float16)
    optimizer = LossScaleOptimizer(optim.AdamW(1e-2), GradScaler(64.0))
    loss_and_grad = optimizer.value_and_grad(model, mse(model))
    broken = True

    def step(x, y):
        loss, grads = loss_and_grad(x, y)
        optimizer.update(model, grads)
        if broken:
            raise error("in the middle of a cell")
        return loss

    state = [model.state, optimizer.state, mx.random.state]
    compiled = compile_step(step, state)
    before = bits([model.parameters(), optimizer.state])
    with pytest.raises(error):
        compiled(*batch(dtype=mx.float16))
    assert bits([model.parameters(), optimizer.state]) == before
    # The cell is run again.
    broken = False
    compiled = compile_step(step, state)
    first = compiled(*batch(dtype=mx.float16)).item()
    for _ in range(20):
        loss = compiled(*batch(dtype=mx.float16)).item()
    assert loss < first
    assert np.isfinite(loss)


def test_a_compiled_step_is_what_mlx_makes_of_it():
    model, optimizer = Mlp(), GradScaler(64.0)
    calls = []

    def step(x):
        calls.append(x)
        optimizer.update(optimizer.state["scale"] * 2)
        return model(x)

    compiled = compile_step(step, [model.state, optimizer.state])
    for _ in range(3):
        compiled(mx.ones((2, 8)))
    assert len(calls) == 1
    assert optimizer.get_scale() == 512.0


def test_no_switch_is_left_on_for_what_others_differentiate():
    # Every line of a gradient in which islands keep their gradients in float32.
    model = Mlp(dtype=mx.float16)
    float32_layers(model, ["layers.0"])
    optimizer = LossScaleOptimizer(optim.SGD(0.1), GradScaler(64.0))
    plain = mse(model)
    x, y = batch(dtype=mx.float16)
    scaled = nn.value_and_grad(model, optimizer.scale_loss(plain, model))
    scaled(x, y)
    for at in range(1, lines_of(lambda: scaled(x, y)) + 1):
        with pytest.raises(KeyboardInterrupt), Interrupt(at):
            scaled(x, y)
        _, gradients = nn.value_and_grad(model, plain)(x, y)
        for tree in (gradients, model.parameters()):
            assert {g.dtype for _, g in tree_flatten(tree)} == {mx.float16}, at
