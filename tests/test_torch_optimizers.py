"""Each optimizer's state, both ways, against PyTorch's own next steps."""

import mlx.core as mx
import mlx.optimizers as optim
import numpy as np
import pytest
from mlx.utils import tree_flatten, tree_unflatten
from torch_optimizers_helpers import (
    ENTRIES,
    EVERY,
    KINDS,
    NAMES,
    as_mlx,
    as_torch,
    close,
    convert,
    gradients,
    mlx_steps,
    resumed,
    torch_side,
    torch_steps,
)

from mlx_gradscale.convert.optimizers import ROWS, OptimizerMismatch, build, settings
from mlx_gradscale.convert.optimizers.state import to_mlx, to_torch

torch = pytest.importorskip("torch")


@EVERY
@pytest.mark.parametrize("k", [1, 7])
def test_mlx_goes_on_where_pytorch_stopped(kind, k):
    params, optimizer = torch_side(kind)
    torch_steps(params, optimizer, range(k))
    tree, done = convert(params, optimizer)
    mlx = resumed(done)
    tree = mlx_steps(tree, mlx, range(k, k + 20))
    torch_steps(params, optimizer, range(k, k + 20))
    close(tree, params)


@EVERY
def test_pytorch_goes_on_where_mlx_stopped(kind):
    params, optimizer = torch_side(kind)
    torch_steps(params, optimizer, range(2))
    tree, done = convert(params, optimizer)
    mlx = resumed(done)
    tree = mlx_steps(tree, mlx, range(2, 9))
    state, notes = to_torch(dict(tree_flatten(mlx.state)), done.record, ENTRIES)
    assert notes == []

    fresh, other = torch_side(kind)
    for name, array in tree_flatten(tree):
        fresh[name].data = torch.tensor(np.array(array))
    other.load_state_dict(as_torch(state))
    torch_steps(fresh, other, range(9, 29))
    torch_steps(params, optimizer, range(2, 29))
    close(tree_unflatten([(n, as_mlx(p)) for n, p in fresh.items()]), params)
    if ROWS[done.record.name].counts:
        assert other.state_dict()["state"][0]["step"].item() == 29


@EVERY
@pytest.mark.parametrize("k", [0, 3])
def test_there_and_back_is_equal_in_every_bit(kind, k):
    params, optimizer = torch_side(kind)
    torch_steps(params, optimizer, range(k))
    if k == 0 and kind == "SGD dampening":
        optimizer.param_groups[0]["dampening"] = 0  # else refused, see below
    _, done = convert(params, optimizer)
    back, _ = to_torch(done.flat, done.record, ENTRIES)
    want = optimizer.state_dict()
    assert back["param_groups"] == want["param_groups"]
    assert back["state"].keys() == want["state"].keys()
    for index, state in want["state"].items():
        got = as_torch(back["state"][index])
        assert got.keys() == state.keys()
        for key, tensor in state.items():
            assert got[key].dtype == tensor.dtype
            assert got[key].numpy().tobytes() == tensor.numpy().tobytes()


@pytest.mark.parametrize("kind", [k for k in KINDS if k != "SGD dampening"])
def test_a_pytorch_that_has_not_stepped_starts_the_same(kind):
    params, optimizer = torch_side(kind)
    tree, done = convert(params, optimizer)
    mlx = resumed(done)
    tree = mlx_steps(tree, mlx, range(20))
    torch_steps(params, optimizer, range(20))
    close(tree, params)


@EVERY
def test_the_state_is_the_one_mlx_itself_writes(kind):
    params, optimizer = torch_side(kind)
    torch_steps(params, optimizer, range(3))
    tree, done = convert(params, optimizer)
    mlx = build(done.record.name, done.record.groups)
    mlx.init(tree)
    own = dict(tree_flatten(mlx.state))
    assert own.keys() == done.flat.keys()
    for key, array in own.items():
        assert (array.dtype, array.shape) == (
            done.flat[key].dtype,
            done.flat[key].shape,
        )


def test_an_mlx_momentum_at_zero_goes_on_dampened_in_pytorch():
    params, optimizer = torch_side("SGD dampening")
    tree, done = convert(params, optimizer, accept=["dampening"])
    state, _ = to_torch(done.flat, done.record, ENTRIES)
    optimizer.load_state_dict(as_torch(state))
    tree = mlx_steps(tree, resumed(done), range(5))
    torch_steps(params, optimizer, range(5))
    close(tree, params)


def test_groups_become_a_multi_optimizer():
    params, _ = torch_side("AdamW")
    optimizer = torch.optim.AdamW(
        [
            {"params": [params["a.weight"], params["b"]], "lr": 0.05},
            {"params": [params["a.bias"]], "weight_decay": 0.0},
        ],
        lr=0.01,
        weight_decay=0.2,
    )
    torch_steps(params, optimizer, range(3))
    tensors = {n: as_mlx(p) for n, p in params.items()}
    names = {0: "a.weight", 1: "b", 2: "a.bias"}
    state = as_mlx(optimizer.state_dict())
    done = to_mlx(state, names, ENTRIES, tensors)
    assert not done.record.joined
    mlx = resumed(done)
    assert isinstance(mlx, optim.MultiOptimizer)
    tree = mlx_steps(tree_unflatten(list(tensors.items())), mlx, range(3, 13))
    back, _ = to_torch(dict(tree_flatten(mlx.state)), done.record, ENTRIES)
    torch_steps(params, optimizer, range(3, 13))
    close(tree, params)
    assert [g["lr"] for g in back["param_groups"]] == [0.05, 0.01]
    assert [g["params"] for g in back["param_groups"]] == [[0, 1], [2]]
    single = {"step": mx.array(1), "learning_rate": mx.array(0.1)}
    with pytest.raises(ValueError, match="need a MultiOptimizer"):
        to_torch(single, done.record, ENTRIES)


def test_equal_groups_become_one_optimizer():
    params, _ = torch_side("SGD")
    values = list(params.values())
    groups = [{"params": values[:1]}, {"params": values[1:]}]
    optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.5)
    torch_steps(params, optimizer, range(2))
    _, done = convert(params, optimizer)
    assert done.record.joined
    back, _ = to_torch(done.flat, done.record, ENTRIES)
    assert back["param_groups"] == optimizer.state_dict()["param_groups"]


@pytest.mark.parametrize("like", ["int", "float", "vector"])
def test_step_counts_of_older_pytorch_come_back_as_they_were(like):
    params, optimizer = torch_side("Adam")
    torch_steps(params, optimizer, range(3))
    state = as_mlx(optimizer.state_dict())
    step = {"int": 3, "float": 3.0, "vector": mx.array([3.0])}[like]
    for each in state["state"].values():
        each["step"] = step
    tensors = {n: as_mlx(p) for n, p in params.items()}
    done = to_mlx(state, NAMES, ENTRIES, tensors)
    assert done.flat["step"].item() == 3
    back, _ = to_torch(done.flat, done.record, ENTRIES)
    got = back["state"][0]["step"]
    assert type(got) is type(step)
    assert mx.array_equal(got, step) if like == "vector" else got == step


def test_learning_rate_keeps_its_digits_or_follows_mlx():
    params, optimizer = torch_side("Adam", lr=0.001)
    torch_steps(params, optimizer, range(1))
    _, done = convert(params, optimizer)
    back, _ = to_torch(done.flat, done.record, ENTRIES)
    assert back["param_groups"][0]["lr"] == 0.001
    changed = done.flat | {"learning_rate": mx.array(0.5)}
    assert to_torch(changed, done.record, ENTRIES)[0]["param_groups"][0]["lr"] == 0.5


def test_a_tensor_learning_rate_stays_one():
    params, optimizer = torch_side("Adam", lr=torch.tensor(0.25))
    torch_steps(params, optimizer, range(1))
    _, done = convert(params, optimizer)
    assert settings("Adam", done.record.groups[0])["learning_rate"] == 0.25
    back, _ = to_torch(done.flat, done.record, ENTRIES)
    assert isinstance(back["param_groups"][0]["lr"], mx.array)


def test_parameters_without_state_are_named():
    params, optimizer = torch_side("Adam")
    for name, g in gradients(0).items():
        params[name].grad = torch.tensor(g) if name != "b" else None
    optimizer.step()
    _, done = convert(params, optimizer)
    assert any("no optimizer state (b" in note for note in done.notes)
    back, _ = to_torch(done.flat, done.record, ENTRIES)
    assert back["state"].keys() == optimizer.state_dict()["state"].keys() == {0, 1}


def test_a_parameter_that_stayed_at_zero_in_mlx_has_counted_the_steps():
    params, optimizer = torch_side("Adam")
    _, done = convert(params, optimizer)
    later = done.flat | {"step": mx.array(5, mx.uint64)}
    back, _ = to_torch(later, done.record, ENTRIES)
    assert [state["step"].item() for state in back["state"].values()] == [5, 5, 5]


def test_equal_groups_at_different_steps_stay_apart():
    params, _ = torch_side("Adam")
    values = list(params.values())
    groups = [{"params": values[:1]}, {"params": values[1:]}]
    optimizer = torch.optim.Adam(groups)
    torch_steps(params, optimizer, range(2))
    optimizer.state[values[0]]["step"] += 1
    _, done = convert(params, optimizer)
    assert not done.record.joined
    steps = [done.flat[f"states.{i}.step"].item() for i in (0, 1)]
    assert steps == [3, 2]


@pytest.mark.parametrize("kind", ["Adamax", "Adagrad decay", "Adam"])
def test_the_learning_rate_is_the_one_mlx_would_hold(kind):
    params, optimizer = torch_side(kind)
    torch_steps(params, optimizer, range(4))
    _, done = convert(params, optimizer)
    mlx = build(done.record.name, done.record.groups)
    start = {n: mx.array(g) for n, g in gradients(99).items()}
    mlx_steps(tree_unflatten(list(start.items())), mlx, range(4))
    assert done.flat["learning_rate"].item() == mlx.learning_rate.item()


def test_changed_settings_of_the_mlx_run_are_written():
    params, optimizer = torch_side("AdamW")
    torch_steps(params, optimizer, range(1))
    _, done = convert(params, optimizer)
    used = settings("AdamW", done.record.groups[0]) | {
        "betas": [0.5, 0.6],
        "weight_decay": 0.7,
    }
    back, _ = to_torch(done.flat, done.record, ENTRIES, used=[used])
    group = back["param_groups"][0]
    assert (group["betas"], group["weight_decay"]) == ((0.5, 0.6), 0.7)
    with pytest.raises(OptimizerMismatch, match="bias"):
        to_torch(
            done.flat,
            done.record,
            ENTRIES,
            used=[used | {"bias_correction": False}],
        )


def schedules(optimizer):
    """Every schedule that notes something in the groups."""
    schedule = torch.optim.lr_scheduler
    cycles = {"cycle_momentum": True}
    if "nesterov" in optimizer.param_groups[0]:
        schedule.CyclicLR(optimizer, 0.01, 0.1, **cycles)
    has_momentum = {"momentum", "betas"} & set(optimizer.param_groups[0])
    cycles["cycle_momentum"] = bool(has_momentum)
    schedule.OneCycleLR(optimizer, 0.1, total_steps=10, **cycles)
    schedule.LambdaLR(optimizer, lambda step: 1.0)
    torch.optim.swa_utils.SWALR(optimizer, 0.05)


@EVERY
def test_what_pytorch_itself_puts_in_the_groups_is_carried(kind):
    params, optimizer = torch_side(kind)
    if kind in ("SGD", "Lion", "RMSprop"):
        optimizer.param_groups[0]["name"] = "all"
    else:
        schedules(optimizer)
    optimizer.param_groups[0].update(foreach=True, differentiable=False)
    torch_steps(params, optimizer, range(1))
    _, done = convert(params, optimizer)
    back, _ = to_torch(done.flat, done.record, ENTRIES)
    assert back["param_groups"] == optimizer.state_dict()["param_groups"]


def test_the_state_of_parameters_without_a_place_is_kept_aside():
    params, optimizer = torch_side("Adam")
    torch_steps(params, optimizer, range(3))
    state = as_mlx(optimizer.state_dict())
    tensors = {n: as_mlx(p) for n, p in params.items()}
    kept = {n: e for n, e in ENTRIES.items() if n != "a.bias"}
    done = to_mlx(state, NAMES, kept, tensors)
    assert not any("a.bias" in key for key in done.flat)
    assert any("of a.bias is kept for the way back" in note for note in done.notes)
    back, _ = to_torch(done.flat, done.record, kept)
    assert list(back["state"]) == [0, 1, 2]
    assert back["param_groups"] == state["param_groups"]
    for slot in ("step", "exp_avg", "exp_avg_sq"):
        assert mx.array_equal(back["state"][1][slot], state["state"][1][slot])


def test_a_group_without_a_place_keeps_its_optimizer():
    params, _ = torch_side("SGD")
    values = list(params.values())
    groups = [{"params": values[2:], "lr": 0.5}, {"params": values[:2]}]
    optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9)
    torch_steps(params, optimizer, range(2))
    names = {0: "b", 1: "a.weight", 2: "a.bias"}
    kept = {n: e for n, e in ENTRIES.items() if n != "b"}
    tensors = {n: as_mlx(p) for n, p in params.items()}
    done = to_mlx(as_mlx(optimizer.state_dict()), names, kept, tensors)
    tree = tree_unflatten([(n, tensors[n]) for n in kept])
    mlx = build("SGD", done.record.groups, done.record.names)
    mlx.init(tree)
    assert dict(tree_flatten(mlx.state)).keys() == done.flat.keys()
    mlx.state = tree_unflatten(list(done.flat.items()))
    for seed in range(2, 8):
        grads = {n: mx.array(g) for n, g in gradients(seed).items() if n in kept}
        tree = mlx.apply_gradients(tree_unflatten(list(grads.items())), tree)
    torch_steps(params, optimizer, range(2, 8))
    close(tree, params)
    back, _ = to_torch(dict(tree_flatten(mlx.state)), done.record, kept)
    assert back["state"].keys() == {0, 1, 2}
