"""Which optimizer a state is of, and what the other side does not compute."""

import mlx.core as mx
import mlx.optimizers as optim
import pytest
from torch_optimizers_helpers import (
    ENTRIES,
    EVERY,
    KINDS,
    as_torch,
    close,
    convert,
    mlx_steps,
    resumed,
    torch_side,
    torch_steps,
)

from mlx_gradscale.convert.optimizers import (
    ROWS,
    OptimizerMismatch,
    check,
    differences,
    mlx_differences,
    recognise,
)
from mlx_gradscale.convert.optimizers.state import to_torch

torch = pytest.importorskip("torch")


@EVERY
def test_the_optimizer_is_known_by_its_keys(kind):
    params, optimizer = torch_side(kind)
    torch_steps(params, optimizer, range(1))
    want = kind.split()[0]
    assert recognise(optimizer.state_dict()) == want
    with pytest.raises(ValueError, match="is not that of"):
        recognise(optimizer.state_dict(), "Lion" if want != "Lion" else "Adam")


@pytest.mark.parametrize(
    "cls", [torch.optim.NAdam, torch.optim.RAdam, torch.optim.Rprop, torch.optim.ASGD]
)
def test_other_optimizers_are_refused(cls):
    p = torch.nn.Parameter(torch.ones(3))
    optimizer = cls([p])
    p.grad = torch.ones(3)
    optimizer.step()
    said = "of none of the known kinds.*--optimizer-key ''"
    with pytest.raises(ValueError, match=said):
        recognise(optimizer.state_dict())


def has_stepped(optimizer, param):
    def closure():
        param.grad = torch.ones_like(param)
        if isinstance(optimizer, torch.optim.SparseAdam):
            param.grad = param.grad.to_sparse()
        return param.detach().sum()

    optimizer.step(closure)
    return optimizer.state_dict()


OPTIMIZERS = [
    cls
    for cls in vars(torch.optim).values()
    if isinstance(cls, type) and torch.optim.Optimizer in cls.__mro__[1:]
]


@pytest.mark.parametrize("cls", OPTIMIZERS)
def test_no_optimizer_of_pytorch_is_taken_for_another(cls):
    p = torch.nn.Parameter(torch.ones(3, 3))
    optimizer = cls([p])
    for state in (optimizer.state_dict(), has_stepped(optimizer, p)):
        if cls.__name__ in ROWS:
            assert recognise(state) == cls.__name__
        else:
            with pytest.raises(ValueError, match="of none of the known kinds"):
                recognise(state)


# What RAdam's groups had not yet, in PyTorch 1.10 to 2.1.
NEW_IN_RADAM = {
    "2.1": {"decoupled_weight_decay", "maximize", "capturable"},
    "1.13": {"decoupled_weight_decay", "maximize", "capturable", "differentiable"},
}
NEW_IN_RADAM["1.11"] = {*NEW_IN_RADAM["1.13"], "foreach"}


@pytest.mark.parametrize("version", NEW_IN_RADAM)
def test_old_radam_before_its_first_step_is_not_taken_for_adamax(version):
    p = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.RAdam([p])
    state, stepped = optimizer.state_dict(), has_stepped(optimizer, p)
    for each in (state, stepped):
        for key in NEW_IN_RADAM[version]:
            del each["param_groups"][0][key]
    said = "Adamax's, or RAdam's.*--optimizer Adamax.*--optimizer-key ''"
    with pytest.raises(ValueError, match=said):
        recognise(state)
    assert recognise(state, "Adamax") == "Adamax"
    with pytest.raises(ValueError, match="of none of the known kinds"):
        recognise(stepped)


def test_old_adamax_is_known_by_its_first_step():
    p = torch.nn.Parameter(torch.ones(3))
    state = has_stepped(torch.optim.Adamax([p]), p)
    for key in ("maximize", "foreach", "differentiable", "capturable"):
        del state["param_groups"][0][key]
    assert recognise(state) == "Adamax"


def test_old_adam_with_decay_needs_its_name():
    params, optimizer = torch_side("AdamW")
    torch_steps(params, optimizer, range(1))
    state = optimizer.state_dict()
    for group in state["param_groups"]:
        del group["decoupled_weight_decay"]
    with pytest.raises(ValueError, match="Adam's or AdamW's"):
        recognise(state)
    assert recognise(state, "AdamW") == "AdamW"
    state["param_groups"][0]["weight_decay"] = 0
    assert recognise(state) == "Adam"


REFUSED = [
    ("Adam", {"weight_decay": 0.1}, "weight_decay"),
    ("Adam", {"amsgrad": True}, "amsgrad"),
    ("AdamW", {"amsgrad": True, "betas": (0.9, 0.5)}, "amsgrad"),
    ("AdamW", {"maximize": True}, "maximize"),
    ("SGD", {"maximize": True}, "maximize"),
    ("RMSprop", {"momentum": 0.9}, "momentum"),
    ("RMSprop", {"centered": True}, "centered"),
    ("RMSprop", {"weight_decay": 0.1}, "weight_decay"),
    ("Adagrad", {"weight_decay": 0.1}, "weight_decay"),
    ("Adadelta", {"weight_decay": 0.1}, "weight_decay"),
    ("Adamax", {"weight_decay": 0.1}, "weight_decay"),
]


@pytest.mark.parametrize(("kind", "changes", "key"), REFUSED)
def test_what_mlx_does_not_compute_is_refused_until_accepted(kind, changes, key):
    params, optimizer = torch_side(kind, **changes)
    torch_steps(params, optimizer, range(2))
    with pytest.raises(OptimizerMismatch, match=f"(?s){key}.*accept"):
        convert(params, optimizer)
    _, done = convert(params, optimizer, accept=[key])
    assert any(key in note for note in done.notes)
    back, _ = to_torch(done.flat, done.record, ENTRIES)
    other = KINDS[kind][0](list(params.values()), **KINDS[kind][1])
    other.load_state_dict(as_torch(back))
    torch_steps(params, other, range(1))  # the dropped setting stays dropped
    assert not other.param_groups[0][key]


@pytest.mark.parametrize(("kind", "changes", "key"), REFUSED)
def test_what_is_refused_really_differs(kind, changes, key):
    """No refusal without a reason: the same steps end somewhere else."""
    params, optimizer = torch_side(kind, **changes)
    torch_steps(params, optimizer, range(2))
    tree, done = convert(params, optimizer, accept=[key])
    tree = mlx_steps(tree, resumed(done), range(2, 22))
    torch_steps(params, optimizer, range(2, 22))
    with pytest.raises(AssertionError):
        close(tree, params)


def test_dampening_before_the_first_step_is_refused():
    params, optimizer = torch_side("SGD dampening")
    with pytest.raises(OptimizerMismatch, match="dampening"):
        convert(params, optimizer)
    without = {"momentum": 0, "dampening": 0.5}
    assert differences("SGD", without, complete=False) == []


def test_what_pytorch_does_not_compute_is_refused():
    assert mlx_differences("AdamW", {"bias_correction": True}) == []
    for name, used in (
        ("Adam", {"bias_correction": False}),
        ("Adamax", {"schedule": False}),
    ):
        with pytest.raises(OptimizerMismatch, match="bias_correction"):
            check(mlx_differences(name, used))


@pytest.mark.parametrize("step", [0, 9])
def test_what_accepting_no_bias_correction_means_is_told(step):
    """The factor in the message is that of the updates of MLX itself."""
    used = {"bias_correction": False, "betas": [0.8, 0.99]}
    (found,) = mlx_differences("AdamW", used, step)
    assert "AdamW(..., bias_correction=True)" in found.text
    moved = []
    for correct in (True, False):
        optimizer = optim.AdamW(
            1.0, betas=used["betas"], weight_decay=0.0, bias_correction=correct
        )
        optimizer.init({"w": mx.array(0.0)})
        optimizer.state["step"] = mx.array(step, mx.uint64)
        optimizer.state["w"].update(m=mx.array(0.2), v=mx.array(0.3))
        new = optimizer.apply_gradients({"w": mx.array(0.5)}, {"w": mx.array(0.0)})
        moved.append(new["w"].item())
    assert f"next update is {moved[0] / moved[1]:.3g} times MLX's" in found.text


def test_a_negative_step_count_is_an_error():
    params, optimizer = torch_side("SGD")
    with pytest.raises(ValueError, match="is -5: it cannot be negative"):
        convert(params, optimizer, step=-5)


def test_different_steps_are_an_error():
    params, optimizer = torch_side("Adam")
    torch_steps(params, optimizer, range(2))
    optimizer.state[params["b"]]["step"] += 1
    with pytest.raises(ValueError, match=r"different steps \(a.weight at 2, b at 3\)"):
        convert(params, optimizer)


class LARS(torch.optim.SGD):
    """Another rule in SGD's clothes: its groups hold one key more."""

    def __init__(self, params, lr, trust_coefficient=0.001):
        super().__init__(params, lr, momentum=0.9)
        for group in self.param_groups:
            group["trust_coefficient"] = trust_coefficient


def test_a_group_key_that_is_not_the_optimizers_is_an_error_until_accepted():
    params, _ = torch_side("SGD")
    optimizer = LARS(list(params.values()), 0.1)
    torch_steps(params, optimizer, range(2))
    with pytest.raises(OptimizerMismatch, match=r"'trust_coefficient'.*--accept"):
        convert(params, optimizer)
    _, done = convert(params, optimizer, accept=["trust_coefficient"])
    assert any("'trust_coefficient'" in note for note in done.notes)
    back, _ = to_torch(done.flat, done.record, ENTRIES)
    assert back["param_groups"] == optimizer.state_dict()["param_groups"]
