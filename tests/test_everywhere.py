"""``everywhere()``: trainers that make their own optimizer and loss."""

import copy
import math
import pickle
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import pytest
from helpers import Mlp, batch, mse
from mlx.utils import tree_map

from mlx_gradscale import GradScaler, LossScaleOptimizer, everywhere
from mlx_gradscale.__main__ import main

PLAIN = (
    nn.value_and_grad,
    optim.Optimizer.update,
    optim.Optimizer.apply_gradients,
)


def train(dtype=mx.float16, make=lambda: optim.AdamW(1e-2), compiled=True, steps=6):
    """A trainer as others write them: nothing can be handed in."""
    mx.random.seed(3)
    model = Mlp(dtype=dtype)
    loss_and_grad = nn.value_and_grad(model, lambda x, y: 1e-3 * mse(model)(x, y))
    optimizer = make()
    state = [model.state, optimizer.state, mx.random.state]

    def step(x, y):
        loss, grads = loss_and_grad(x, y)
        grads, _ = optim.clip_grad_norm(grads, max_norm=1.0)
        optimizer.update(model, grads)
        return loss

    if compiled:
        step = partial(mx.compile, inputs=state, outputs=state)(step)
    losses = []
    for i in range(steps):
        losses.append(step(*batch(i, dtype=dtype)))
        mx.eval(losses, state)
    return losses[-1].item(), model, optimizer


def is_as_before():
    made = optim.AdamW(1e-2)
    methods = optim.Optimizer.update, optim.Optimizer.apply_gradients
    as_it_was = (nn.value_and_grad, *methods) == PLAIN
    return as_it_was and type(made) is optim.AdamW and made.learning_rate == 1e-2


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_it_follows_float32_where_float16_fails(compiled):
    wanted, *_ = train(mx.float32, compiled=compiled)
    assert math.isnan(train(compiled=compiled)[0])
    with everywhere() as here:
        found, model, optimizer = train(compiled=compiled)
        assert here.optimizers == [optimizer]
    assert found == pytest.approx(wanted, rel=0.02)
    assert isinstance(optimizer, LossScaleOptimizer)
    assert optimizer.step.item() + optimizer.scaler.skipped_steps.item() == 6
    assert optimizer.step.item() >= 5
    assert {x.dtype for x in model.layers[0].values()} == {mx.float16}
    assert is_as_before()


def test_settings_reach_every_optimizer():
    with everywhere(lambda: GradScaler(64.0), max_grad_norm=0.5) as here:
        first, second = optim.SGD(0.1), optim.Lion(1e-3)
        assert here.optimizers == [first, second]
    for optimizer in (first, second):
        assert optimizer.scaler.get_scale() == 64.0
        assert optimizer.max_grad_norm == 0.5


def decayed_norm(dtype, decay=1e-4, steps=80):
    """A trainer as unsloth-zoo's: it decays the weights itself, before the step."""
    mx.random.seed(3)
    model = Mlp(dtype=dtype)
    loss_and_grad = nn.value_and_grad(model, mse(model))
    optimizer = optim.AdamW(1e-4, weight_decay=0.0)
    before = model.layers[0].weight.astype(mx.float32)
    for i in range(steps):
        _, grads = loss_and_grad(*batch(i, dtype=dtype))
        weights = model.trainable_parameters()
        full = tree_map(lambda x: x.astype(mx.float32) * (1 - decay), weights)
        model.update(tree_map(lambda x, y: x.astype(y.dtype), full, weights))
        optimizer.update(model, grads)
        mx.eval(model.state, optimizer.state)
    after = model.layers[0].weight.astype(mx.float32)
    return mx.linalg.norm(after).item() / mx.linalg.norm(before).item()


def test_what_a_trainer_does_to_weights_counts_where_they_are_float32():
    wanted, without = decayed_norm(mx.float32), decayed_norm(mx.float32, decay=0.0)
    small = lambda: GradScaler(256.0)  # noqa: E731 - no step is skipped
    with everywhere(small):
        lost = decayed_norm(mx.float16)
    with everywhere(small, compute_dtype=mx.float16):
        found = decayed_norm(mx.float32)
    # 80 steps of 1e-4, of which float16 weights keep nothing.
    assert without - wanted == pytest.approx(80 * 1e-4, rel=0.05)
    assert lost == pytest.approx(without, abs=4e-4)
    assert found == pytest.approx(wanted, abs=4e-4)


def test_optimizers_inside_of_others_are_parts():
    def several():
        groups = [optim.AdamW(1e-2), optim.SGD(0.1)]
        return optim.MultiOptimizer(groups, [lambda path, x: "0" in path])

    with everywhere() as here:
        *_, optimizer = train(make=several)
        assert here.optimizers == [optimizer]
    kinds = [type(each) for each in optimizer.optimizer.optimizers]
    assert kinds == [optim.AdamW, optim.SGD]


def test_a_class_of_ones_own_and_two_trainings_in_one():
    class Own(optim.Adam):
        def __init__(self, rate):
            super().__init__(rate)
            self.spare = type(optim.SGD(rate))

    with everywhere():
        found = [train(make=lambda: Own(1e-2), steps=2) for _ in range(2)]
    (one, _, first), (other, _, second) = found
    assert one == other
    assert type(first.optimizer) is Own
    assert second.optimizer.spare is optim.SGD


def test_nested_after_an_exception_and_in_threads():
    seen = []
    inside, done = threading.Event(), threading.Event()

    def elsewhere():
        assert inside.wait(60)
        seen.append(type(optim.AdamW(1e-2)))
        seen.append(train(mx.float32, steps=1)[0])
        done.set()

    other = threading.Thread(target=elsewhere)
    other.start()
    wanted = train(mx.float32, steps=1)[0]

    def fail():
        with everywhere(lambda: GradScaler(2.0)):
            assert optim.SGD(0.1).scaler.get_scale() == 2.0
            raise KeyError("a trainer's own")

    with everywhere():
        with pytest.raises(KeyError):
            fail()
        assert optim.SGD(0.1).scaler.get_scale() == 65536.0
        inside.set()
        assert done.wait(60)
    other.join()
    assert seen == [optim.AdamW, wanted]
    assert is_as_before()


@pytest.mark.parametrize("make", [lambda: optim.AdamW(1e-2), optim.Adafactor])
def test_what_is_made_inside_can_be_copied_there(make):
    with everywhere() as here:
        *_, optimizer = train(make=make, steps=2, compiled=False)
        copied = copy.deepcopy(optimizer)
        assert here.optimizers == [optimizer]
        if make is not optim.Adafactor:  # whose __init__ needs no arguments
            copied = pickle.loads(pickle.dumps(copied))
    assert isinstance(copied, LossScaleOptimizer)
    assert type(copied.optimizer) is type(optimizer.optimizer)
    assert copied.step.item() == optimizer.step.item() > 0


def test_a_wrong_call_and_a_new_of_ones_own_are_told():
    class Own(optim.SGD):
        def __new__(cls, rate):
            return super().__new__(cls)

    with everywhere():
        with pytest.raises(TypeError, match="rate"):
            optim.AdamW(rate=1e-2)
        with pytest.raises(RuntimeError, match="by a __new__ of its own"):
            train(make=lambda: Own(1e-2), compiled=False)
    assert is_as_before()


def test_an_optimizer_from_before_is_refused():
    optimizer = optim.AdamW(1e-2)
    with everywhere(), pytest.raises(RuntimeError, match="made before everywhere"):
        train(make=lambda: optimizer, compiled=False)
    weights = {"w": mx.ones(2)}
    with everywhere(), pytest.raises(RuntimeError, match="made before everywhere"):
        optimizer.apply_gradients(weights, weights)
    assert is_as_before()


def test_gradients_of_another_differentiation_are_refused():
    model = Mlp(dtype=mx.float16)
    with everywhere():
        optimizer = optim.AdamW(1e-2)
        grads = mx.grad(lambda p: p["layers"][0]["weight"].sum())(model.parameters())
        with pytest.raises(RuntimeError, match="never scaled a loss"):
            optimizer.update(model, grads)


def test_who_scales_already_is_left_alone():
    model = Mlp(dtype=mx.float16)
    ours = LossScaleOptimizer(optim.SGD(0.1), GradScaler(4.0))
    with everywhere():
        loss_fn = ours.scale_loss(mse(model), model)
        _, grads = nn.value_and_grad(model, loss_fn)(*batch(0, dtype=mx.float16))
        ours.update(model, grads)
    assert ours.scaler.last_step_applied.item()


SCRIPT = """
import sys
import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
from mlx.nn import value_and_grad

model = nn.Linear(4, 1)
model.set_dtype(mx.float16)
optimizer = optim.SGD(float(sys.argv[1]))
x = mx.ones((2, 4), mx.float16)
loss, grads = value_and_grad(model, lambda x: model(x).mean())(x)
optimizer.update(model, grads)
print(__name__, sys.argv[1:], type(optimizer).__name__, model.weight.dtype)
"""


def test_a_script_needs_no_change(tmp_path, capsys):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    before = sys.argv, sys.path
    with pytest.warns(UserWarning, match="The loss is float16"):
        assert main(["run", "--init-scale", "8", str(script), "0.1", "--x"]) == 0
    said = capsys.readouterr()
    wanted = "__main__ ['0.1', '--x'] LossScaleOptimizer mlx.core.float16\n"
    assert said.out == wanted
    assert said.err == "loss scale 8, 0 steps skipped\n"
    assert (sys.argv, sys.path) == before
    assert is_as_before()


COMPUTING = """
import mlx.core as mx, mlx.nn as nn, mlx.optimizers as optim

model, optimizer = nn.Linear(4, 1), optim.SGD(0.1)

def loss_fn(x):
    print(x.dtype, model.weight.dtype)
    return model(x).astype(mx.float32).mean()

loss, grads = nn.value_and_grad(model, loss_fn)(mx.ones((2, 4)))
optimizer.update(model, grads)
print(model.weight.dtype)
"""


def test_a_script_whose_model_stays_float32(tmp_path, capsys):
    script = tmp_path / "train.py"
    script.write_text(COMPUTING)
    assert main(["run", "--compute-dtype", "float16", str(script)]) == 0
    seen = capsys.readouterr().out.replace("mlx.core.", "").splitlines()
    assert seen == ["float16 float16", "float32"]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["nothere.py"], "there is no script nothere.py"),
        (["--init-scale", "0", "x.py"], "scale must be"),
        (["--max-grad-norm", "-1", "x.py"], "max_grad_norm must be a positive number"),
    ],
)
def test_what_cannot_run_is_said_before_it_does(arguments, sentence, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["run", *arguments])
    assert sentence in capsys.readouterr().err


def test_a_script_without_an_optimizer_is_told(tmp_path, capsys):
    (tmp_path / "x.py").write_text("print(1)\n")
    assert main(["run", str(tmp_path / "x.py")]) == 0
    assert "made no optimizer" in capsys.readouterr().err


def test_a_module_and_its_exit_code(tmp_path):
    (tmp_path / "trainer.py").write_text("import sys\nsys.exit(int(sys.argv[1]))\n")
    command = [sys.executable, "-m", "mlx_gradscale", "run", "-m", "trainer", "5"]
    assert subprocess.run(command, cwd=tmp_path, timeout=120).returncode == 5


def test_the_example_learns(monkeypatch):
    examples = Path(__file__).parents[1] / "examples"
    monkeypatch.syspath_prepend(str(examples))
    import everywhere as example

    naive, scaled = example.main()
    assert math.isnan(naive)
    assert scaled < 0.5
