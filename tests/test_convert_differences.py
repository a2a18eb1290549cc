"""Where PyTorch and MLX would go apart: frozen layers, layers, optimizers, orders."""

import warnings

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from convert_helpers import fails, forward, paths, small

from mlx_gradscale import torch_checkpoint
from mlx_gradscale.convert import (
    from_torch,
    load_run,
    main,
    save_run,
    to_torch,
    write_run,
)
from mlx_gradscale.convert.layouts import make_plan
from mlx_gradscale.convert.layouts.model_hints import model_notes
from mlx_gradscale.convert.parameter_order import parameter_names
from mlx_gradscale.inspect import describe


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.base = nn.Linear(3, 4)
        self.head = nn.Linear(4, 1)

    def __call__(self, x):
        return self.head(nn.tanh(self.base(x)))[:, 0]


def torch_run(path, groups, kind="AdamW"):
    """A PyTorch run with a frozen base that the optimizer was given all the same."""
    torch = pytest.importorskip("torch")
    torch.manual_seed(0)
    net = torch.nn.ModuleDict({"base": torch.nn.Linear(3, 4)})
    net["head"] = torch.nn.Linear(4, 1)
    net["base"].requires_grad_(False)
    given = net.parameters()
    if groups:
        given = [{"params": m.parameters(), "lr": 0.1 / (i + 1)}
                 for i, m in enumerate(net.values())]  # fmt: skip
    optimizer = getattr(torch.optim, kind)(given, lr=0.1, weight_decay=0.1)

    def step(number):
        x = torch.tensor(data(number))
        loss = (net["head"](torch.tanh(net["base"](x)))[:, 0] - x.sum(1)).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    for number in range(5):
        step(number)
    checkpoint = {"model": net.state_dict(), "opt": optimizer.state_dict()}
    torch.save(checkpoint, path)
    want = [step(number) for number in range(5, 10)]
    return want, optimizer.state_dict()


def data(number):
    return np.random.default_rng(number).standard_normal((8, 3)).astype(np.float32)


def train(model, optimizer, numbers):
    def loss_fn(x):
        return ((model(x) - x.sum(1)) ** 2).mean()

    losses = []
    for number in numbers:
        loss, grads = nn.value_and_grad(model, loss_fn)(mx.array(data(number)))
        optimizer.update(model, grads)
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("groups", [False, True])
def test_layers_frozen_there_and_here(groups, tmp_path, capsys):
    """The natural way: freeze what was frozen, and go on; and back."""
    torch = pytest.importorskip("torch")
    want, after = torch_run(tmp_path / "a.pt", groups)
    forward(tmp_path / "a.pt", tmp_path / "run")
    assert "freeze them in the MLX model, too" in capsys.readouterr().err
    model = Net()
    model.base.freeze()
    run = load_run(tmp_path / "run", model)  # and no warning
    losses = train(model, run.optimizer, range(5, 10))
    np.testing.assert_allclose(losses, want, rtol=2e-5, atol=2e-5)
    save_run(tmp_path / "run", model, run.optimizer, record=run.record)
    forward(tmp_path / "b.pt", tmp_path / "run")
    back = torch.load(tmp_path / "b.pt", weights_only=True)
    assert back["opt"]["state"].keys() == after["state"].keys()  # the head's alone
    for index, state in after["state"].items():
        for slot, value in state.items():
            found = back["opt"]["state"][index][slot]
            np.testing.assert_allclose(found, value, rtol=2e-5, atol=2e-5)
    # Loaded again, it is the same.
    load_run(tmp_path / "run", model)


def test_layers_frozen_there_only_are_told(tmp_path):
    torch_run(tmp_path / "a.pt", False)
    forward(tmp_path / "a.pt", tmp_path / "run")
    with pytest.warns(UserWarning, match=r"base\.weight, base\.bias had no optimizer"):
        run = load_run(tmp_path / "run", Net())
    assert "base" in run.optimizer.state


def test_layers_frozen_here_only_are_an_error(tmp_path):
    torch_run(tmp_path / "a.pt", False)
    forward(tmp_path / "a.pt", tmp_path / "run")
    model = Net()
    model.head.freeze()
    with pytest.raises(ValueError, match="unfreeze a parameter that was trained"):
        load_run(tmp_path / "run", model)


def test_optimizers_that_keep_no_state_have_nothing_frozen(tmp_path):
    torch_run(tmp_path / "a.pt", False, "SGD")
    forward(tmp_path / "a.pt", tmp_path / "run", "--accept", "weight_decay")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load_run(tmp_path / "run", Net())


class Convolutional(nn.Module):
    def __init__(self, inputs, groups=4, compatible=False):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)
        self.norm = nn.GroupNorm(groups, 8, pytorch_compatible=compatible)
        self.fc = nn.Linear(inputs, 16)
        self.head = nn.Linear(16, 2)


def test_layers_that_compute_something_else_are_told():
    norm, linear = model_notes(Convolutional(8 * 49))
    assert norm.startswith("norm: a GroupNorm without pytorch_compatible=True")
    assert linear.startswith("fc has 392 inputs, and conv before it 8 channels")
    assert model_notes(Convolutional(8, groups=1)) == []  # pooled
    assert model_notes(Convolutional(8, groups=8)) == []
    assert model_notes(Convolutional(8, compatible=True)) == []
    assert model_notes(Convolutional(100, compatible=True)) == []


def test_what_the_hints_say_is_so():
    """PyTorch's numbers need what the two hints ask for."""
    torch = pytest.importorskip("torch")
    torch.manual_seed(0)
    conv, norm = torch.nn.Conv2d(3, 8, 3), torch.nn.GroupNorm(4, 8)
    linear = torch.nn.Linear(8 * 9, 2)
    x = torch.randn(2, 3, 5, 5)
    with torch.no_grad():
        want = linear(norm(conv(x)).flatten(1)).numpy()
    tensors = {
        f"{name}.{key}": mx.array(tensor.numpy())
        for name, module in (("conv", conv), ("norm", norm), ("fc", linear))
        for key, tensor in module.state_dict().items()
    }

    def mlx(compatible, first):
        model = Convolutional(8 * 9, compatible=compatible)
        model.fc, model.head = nn.Linear(8 * 9, 2), nn.Identity()
        plan = make_plan(tensors, model)
        model.load_weights(list(plan.to_mlx(tensors).items()), strict=True)
        y = model.norm(model.conv(mx.array(x.permute(0, 2, 3, 1).numpy())))
        y = mx.moveaxis(y, -1, 1).flatten(1) if first else y.flatten(1)
        return np.array(model.fc(y))

    np.testing.assert_allclose(mlx(True, True), want, rtol=1e-5, atol=1e-5)
    for wrong in ((True, False), (False, True)):
        assert np.abs(mlx(*wrong) - want).max() > 1e-2


def test_the_command_tells_of_such_layers(tmp_path, capsys):
    tensors = {"fc.weight": mx.zeros((2, 3)), "fc.bias": mx.zeros(2)}
    model = nn.Module()
    model.norm = nn.GroupNorm(2, 8, affine=False)
    model.fc = nn.Linear(3, 2)
    assert any("GroupNorm" in note for note in from_torch(tensors, model).notes)


def lion(**more):
    model = small()[0]
    group = {"lr": 1e-3, "betas": (0.9, 0.99), "params": [0, 1], **more}
    states = {i: {"exp_avg": x} for i, x in enumerate(model.values())}
    return {"model": model, "opt": {"state": states, "param_groups": [group]}}


def test_lions_hidden_switch_is_told():
    (note,) = (n for n in from_torch(lion(weight_decay=0.1)).notes if "Lion: " in n)
    assert "decoupled_weight_decay=True" in note
    assert "(100)" in note
    for quiet in ({"weight_decay": 0}, {"weight_decay": 0.1, "maximize": False}):
        notes = from_torch(lion(**quiet)).notes
        assert not any("decoupled" in note for note in notes)


def test_the_hidden_switch_is_as_the_note_says(tmp_path):
    """With the weight decay of the note, MLX's Lion makes lion_pytorch's steps."""
    torch = pytest.importorskip("torch")
    package = pytest.importorskip("lion_pytorch", reason="needs the extra interop")
    torch.manual_seed(0)
    net = torch.nn.Linear(3, 1)
    settings = {"lr": 1e-2, "weight_decay": 0.1, "decoupled_weight_decay": True}
    optimizer = package.Lion(net.parameters(), **settings)

    def step(number):
        x = torch.tensor(data(number))
        loss = (net(x)[:, 0] - x.sum(1)).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    for number in range(3):
        step(number)
    checkpoint = {"model": net.state_dict(), "opt": optimizer.state_dict()}
    torch.save(checkpoint, tmp_path / "a.pt")
    want = [step(number) for number in range(3, 8)]
    forward(tmp_path / "a.pt", tmp_path / "run")
    model = nn.Linear(3, 1)
    run = load_run(tmp_path / "run", model)
    run.optimizer.weight_decay = 10.0

    def loss_fn(x):
        return ((model(x)[:, 0] - x.sum(1)) ** 2).mean()

    losses = []
    for number in range(3, 8):
        loss, grads = nn.value_and_grad(model, loss_fn)(mx.array(data(number)))
        run.optimizer.update(model, grads)
        losses.append(loss.item())
    np.testing.assert_allclose(losses, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["NAdam", "ASGD", "Adafactor", "RAdam", "Rprop"])
def test_an_optimizer_that_mlx_has_not_is_the_reason_given(kind, tmp_path, capsys):
    """ "No order fits" was said of states that have other shapes than the weights."""
    torch = pytest.importorskip("torch")
    net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 4))
    optimizer = getattr(torch.optim, kind)(net.parameters())
    net(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    checkpoint = {"model": net.state_dict(), "opt": optimizer.state_dict()}
    torch.save(checkpoint, tmp_path / "a.pt")
    flags = ["--rename", r"^(\d)\.=layers.\1."]
    said = fails(capsys, *paths(tmp_path), *flags)
    assert "order" not in said
    assert "none of the known kinds" in said or kind in said


def order_of(sizes, turned=False):
    tensors = {name: mx.zeros(shape) for name, shape in sizes.items()}
    names = list(tensors)[::-1] if turned else list(tensors)
    states = {i: {"exp_avg": tensors[name]} for i, name in enumerate(names)}
    group = {"params": list(range(len(names)))}
    state = {"state": states, "param_groups": [group]}
    return parameter_names(state, tensors, make_plan(tensors))


def test_an_order_that_no_other_fits_is_not_doubted():
    """Layers of one shape are in nearly every model; the order of all is not chance."""
    sizes = {"a.weight": (4, 3), "a.bias": (4,), "b.weight": (4, 4), "b.bias": (4,)}
    sizes |= {"c.weight": (4, 4), "c.bias": (4,)}
    found, notes = order_of(sizes)
    assert list(found.values()) == list(sizes)
    assert notes == []
    # Where the reverse fits as well, it is said.
    _, notes = order_of({"a.weight": (4, 4), "b.weight": (4, 4)}, turned=True)
    assert len(notes) == 1


def test_a_json_file_is_a_scaler_only_if_it_is_one(tmp_path, capsys):
    (tmp_path / "config.json").write_text('{"model_type": "llama", "scale": 2}')
    found = describe(tmp_path / "config.json")
    assert found["kind"] == "JSON, no scaler state"
    assert found["rest"] == {"model_type": "llama", "scale": 2}
    (tmp_path / "scaler.json").write_text(
        '{"scale": 2.0, "growth_factor": 2.0, "backoff_factor": 0.5, '
        '"growth_interval": 2000, "_growth_tracker": 0}'
    )
    assert describe(tmp_path / "scaler.json")["kind"] == "scaler state"
    assert main([*paths(tmp_path, {"model": small()[0]}), "--dry-run"]) == 0


def test_a_frozen_part_of_a_state_comes_back_without_a_run(tmp_path):
    """to_torch of what from_torch gave, with the frozen parameters' state taken out."""
    model, optimizer, _ = small()
    optimizer["state"].pop(1)
    run = from_torch({"model": model, "opt": optimizer})
    write_run(tmp_path / "run", run)
    del run.optimizer["fc.bias.v"]
    back, _ = to_torch(run)
    assert back["opt"]["state"].keys() == {0}
    torch_checkpoint.save(tmp_path / "b.pt", back)
