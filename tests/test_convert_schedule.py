"""A learning rate schedule for a converted run: in MLX, saved again, and back."""

import functools

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from convert_helpers import TOLERANCE, Small, forward, small, usual

from mlx_gradscale.convert import (
    Options,
    from_torch,
    load_run,
    read_run,
    save_run,
    to_torch,
    write_run,
)

BASE = 0.02


def factor(step):
    """PyTorch's, of plain numbers."""
    return min(1.0, (step + 1) / 5) * 0.9**step


def schedule(step, base=BASE):
    """MLX's, of arrays: it runs in a compiled step."""
    return base * mx.minimum(1.0, (step + 1) / 5) * mx.power(0.9, step)


def batch(number):
    rng = np.random.default_rng(number)
    return rng.normal(size=(8, 3)).astype(np.float32), rng.integers(0, 2, 8)


class Theirs:
    """A PyTorch run whose schedule moves with each step."""

    def __init__(self, kind):
        self.torch = torch = pytest.importorskip("torch")
        torch.manual_seed(0)
        self.model = torch.nn.ModuleDict({"fc": torch.nn.Linear(3, 2)})
        weight, bias = self.model.parameters()
        groups = {
            "AdamW": [{"params": [weight, bias]}],
            "Adamax": [{"params": [weight, bias]}],
            "decay": [{"params": [weight]}, {"params": [bias], "weight_decay": 0.0}],
            "rates": [{"params": [weight]}, {"params": [bias], "lr": BASE / 2}],
        }[kind]
        make = getattr(torch.optim, kind, torch.optim.AdamW)
        self.optimizer = make(groups, lr=BASE)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, factor)
        self.parts = {
            "model": self.model,
            "optimizer": self.optimizer,
            "scaler": self.scaler,
            "scheduler": self.scheduler,
        }

    def steps(self, numbers):
        for number in numbers:
            x, y = map(self.torch.tensor, batch(number))
            loss = self.torch.nn.functional.cross_entropy(self.model["fc"](x), y)
            self.optimizer.zero_grad()
            self.scaler.scale(loss).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.scheduler.step()

    def save(self, path):
        states = {key: part.state_dict() for key, part in self.parts.items()}
        self.torch.save(states, path)

    def load(self, path):
        states = self.torch.load(path, weights_only=True)
        for key, part in self.parts.items():
            part.load_state_dict(states[key])

    def rates(self):
        return [group["lr"] for group in self.optimizer.param_groups]


def mlx_steps(model, run, numbers, compiled):
    def loss_fn(x, y):
        return nn.losses.cross_entropy(model.fc(x), y, reduction="mean")

    loss_and_grad = run.scaler.value_and_grad(model, loss_fn)
    state = [model.state, run.optimizer.state, run.scaler.state]

    def step(x, y):
        _, grads = loss_and_grad(x, y)
        if hasattr(run.optimizer, "scaler"):
            run.optimizer.update(model, grads)
        else:
            run.scaler.minimize(run.optimizer, model, grads)

    if compiled:
        step = functools.partial(mx.compile, inputs=state, outputs=state)(step)
    for number in numbers:
        step(*map(mx.array, batch(number)))
        mx.eval(state)


@pytest.mark.parametrize("kind", ["AdamW", "Adamax", "decay", "rates"])
@pytest.mark.parametrize("loss_scaling", [False, True])
@pytest.mark.parametrize("compiled", [False, True])
def test_a_scheduled_run_goes_on_in_mlx_and_back(
    kind, loss_scaling, compiled, tmp_path
):
    theirs = Theirs(kind)
    theirs.steps(range(4))
    theirs.save(tmp_path / "a.pt")
    flags = ["--model", "convert_helpers:Small"]
    forward(tmp_path / "a.pt", tmp_path / "run", *flags)
    mine = [schedule, lambda step: schedule(step, BASE / 2)]
    given = mine if kind == "rates" else schedule
    for numbers in (range(4, 7), range(7, 10)):  # saved and loaded in between
        model = Small()
        run = load_run(
            tmp_path / "run", model, learning_rate=given, loss_scaling=loss_scaling
        )
        rate = schedule(mx.array(numbers[0])).item()
        if kind != "Adamax":  # its rate holds the bias correction, too
            assert run.optimizer.learning_rate.item() == rate
        mlx_steps(model, run, numbers, compiled)
        done = numbers[-1] + 1
        run.record.checkpoint["scheduler"].update(last_epoch=done, _step_count=done + 1)
        save_run(tmp_path / "run", model, run.optimizer, run.scaler, run.record)
    forward(tmp_path / "b.pt", tmp_path / "run")

    again = Theirs(kind)
    again.load(tmp_path / "b.pt")
    theirs.steps(range(4, 10))
    # MLX's rate is float32.
    assert again.rates() == pytest.approx(theirs.rates(), rel=1e-6)
    again.steps(range(10, 20))
    theirs.steps(range(10, 20))
    assert again.rates() == theirs.rates()
    for got, want in zip(
        again.model.parameters(), theirs.model.parameters(), strict=True
    ):
        np.testing.assert_allclose(got.detach(), want.detach(), **TOLERANCE)


def write(folder, **changes):
    start = usual()
    group = start["optimizer"]["param_groups"][0]
    if changes:
        second = group | {"params": [1], **changes}
        start["optimizer"]["param_groups"] = [group | {"params": [0]}, second]
    write_run(folder, from_torch(start, options=Options(step=5)))


def test_a_number_replaces_the_rate(tmp_path):
    write(tmp_path / "run")
    model = Small()
    run = load_run(tmp_path / "run", model, learning_rate=0.25)
    assert (run.optimizer.learning_rate.item(), run.optimizer.step.item()) == (0.25, 5)
    save_run(tmp_path / "run", model, run.optimizer)
    back, _ = to_torch(read_run(tmp_path / "run"))
    assert back["optimizer"]["param_groups"][0]["lr"] == 0.25


def test_groups_with_rates_of_their_own_need_one_each(tmp_path):
    write(tmp_path / "run", lr=0.3)
    model = Small()
    before = np.array(model.fc.weight)
    with pytest.raises(ValueError, match=r"\[0\.1, 0\.3\].*as a list"):
        load_run(tmp_path / "run", model, learning_rate=0.25)
    with pytest.raises(ValueError, match="3 entries and the MLX optimizer 2 parts"):
        load_run(tmp_path / "run", model, learning_rate=[1, 2, 3])
    assert np.array_equal(np.array(model.fc.weight), before)
    run = load_run(tmp_path / "run", model, learning_rate=[0.25, lambda step: step / 8])
    rates = [part.learning_rate.item() for part in run.optimizer.optimizers]
    assert rates == [0.25, 0.625]


def test_groups_that_a_warmup_starts_alike_stay_apart(tmp_path):
    """Both stand at 0 before the first step, and were made one optimizer."""
    start = usual()
    first = start["optimizer"]["param_groups"][0] | {"lr": 0.0, "initial_lr": 0.1}
    second = first | {"params": [1], "initial_lr": 0.3}
    start["optimizer"]["param_groups"] = [first | {"params": [0]}, second]
    write_run(tmp_path / "run", from_torch(start))
    with pytest.raises(ValueError, match=r"\[0\.1, 0\.3\].*as a list"):
        load_run(tmp_path / "run", Small(), learning_rate=schedule)
    run = load_run(tmp_path / "run", Small(), learning_rate=[0.25, schedule])
    assert [part.learning_rate.item() for part in run.optimizer.optimizers] == [
        0.25,
        pytest.approx(BASE / 5),
    ]


def test_a_schedule_of_the_momentum_is_told():
    """OneCycleLR moves it by default; MLX's schedules are of the learning rate."""
    torch = pytest.importorskip("torch")
    for cycles in (True, False):
        start = usual()
        weight = torch.nn.Parameter(torch.ones(2))
        theirs = torch.optim.SGD([weight], lr=0.1, momentum=0.9)
        torch.optim.lr_scheduler.OneCycleLR(
            theirs, 0.1, total_steps=9, cycle_momentum=cycles
        )
        group = theirs.state_dict()["param_groups"][0] | {"params": [0, 1]}
        start["optimizer"]["param_groups"] = [group]
        said = [note for note in from_torch(start).notes if "momentum" in note]
        assert len(said) == cycles


def test_what_is_no_learning_rate_is_refused(tmp_path):
    write(tmp_path / "run")
    with pytest.raises(TypeError, match=r"must return an mx\.array.*returned 0\.5"):
        load_run(tmp_path / "run", Small(), learning_rate=lambda step: 0.5)
    for wrong in ("0.1", True):
        with pytest.raises(TypeError, match="a number, or a function from the step"):
            load_run(tmp_path / "run", Small(), learning_rate=wrong)
    model, _, scaler = small()
    write_run(tmp_path / "none", from_torch({"model": model, "scaler": scaler}))
    with pytest.raises(ValueError, match="no optimizer state"):
        load_run(tmp_path / "none", Small(), learning_rate=0.1)


def adamax():
    """A checkpoint of an optimizer that needs a schedule in MLX in any case."""
    start = usual()
    group = {"lr": 0.1, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0}
    moments = {
        index: {"step": 5, "exp_avg": x, "exp_inf": x}
        for index, x in enumerate(start["model"].values())
    }
    start["optimizer"] = {
        "state": moments,
        "param_groups": [group | {"params": [0, 1]}],
    }
    return start


@pytest.mark.parametrize("start", [usual, adamax])
def test_a_schedule_that_is_not_given_again_is_missed(start, tmp_path):
    write_run(tmp_path / "run", from_torch(start(), options=Options(step=5)))
    model = Small()
    run = load_run(tmp_path / "run", model, learning_rate=schedule)
    save_run(tmp_path / "run", model, run.optimizer)
    _, said = to_torch(read_run(tmp_path / "run"))
    assert any("rate for the next step, 0.011809" in note for note in said)
    with pytest.warns(UserWarning, match=r"schedule.*learning_rate="):
        load_run(tmp_path / "run", Small())
    load_run(tmp_path / "run", Small(), learning_rate=schedule)
    run = load_run(tmp_path / "run", model, learning_rate=0.25)
    save_run(tmp_path / "run", model, run.optimizer)
    _, said = to_torch(read_run(tmp_path / "run"))
    assert not any("schedule" in note for note in said)
    load_run(tmp_path / "run", Small())  # a warning would be an error


class Halving:
    rate = 0.1  # where it starts: the package's own schedules have a rate, too

    def __call__(self, step):
        return self.rate * mx.power(0.5, step)


def test_a_schedule_of_the_users_own_class_is_missed_too(tmp_path):
    write(tmp_path / "run")
    model = Small()
    run = load_run(tmp_path / "run", model, learning_rate=Halving())
    save_run(tmp_path / "run", model, run.optimizer)
    with pytest.warns(UserWarning, match=r"schedule.*learning_rate="):
        load_run(tmp_path / "run", Small())


def test_a_divided_rate_is_no_schedule(tmp_path):
    write_run(tmp_path / "run", from_torch(adamax()))
    model = Small()
    run = load_run(tmp_path / "run", model)
    save_run(tmp_path / "run", model, run.optimizer)
    load_run(tmp_path / "run", Small())  # a warning would be an error


def test_settings_that_were_changed_are_loaded_again(tmp_path):
    write(tmp_path / "run")
    model = Small()
    run = load_run(tmp_path / "run", model)
    run.optimizer.momentum = 0.5
    save_run(tmp_path / "run", model, run.optimizer)
    assert load_run(tmp_path / "run", Small()).optimizer.momentum == 0.5
