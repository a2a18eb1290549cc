"""Each optimizer's state, both ways, against PyTorch's own next steps."""

from types import SimpleNamespace

import mlx.core as mx
import mlx.optimizers as optim
import pytest
from mlx.utils import tree_flatten, tree_unflatten
from support.torch_optimizers import (
    EVERY,
    SHAPES,
    TOLERANCE,
    Mine,
    Params,
    Side,
    assert_close,
    assert_same_state,
)

from mlx_gradscale import save_checkpoint
from mlx_gradscale.convert import ConvertError, build_optimizer, save_torch
from mlx_gradscale.convert.optimizer_table import OPTIMIZERS, recognize

torch = pytest.importorskip("torch")


@EVERY
@pytest.mark.parametrize("k", [0, 1, 7])
def test_state_round_trips_bit_identically_and_mlx_resumes_as_pytorch(
    kind, k, tmp_path
):
    theirs = Side(kind).steps(range(k))
    mine = Mine(path := theirs.save(tmp_path / "a.pt"))
    assert_same_state(path, mine.save(tmp_path / "b.pt"))
    # lion_pytorch may decay its weights in another way.
    notes = [note for note in mine.run.notes if "decoupled_weight_decay=True" in note]
    assert bool(notes) == (kind == "Lion")
    save_checkpoint(tmp_path / "run", mine.model, mine.optimizer)
    own = build_optimizer(tmp_path / "run")
    own.init(Params().parameters())
    loaded = dict(tree_flatten(mine.optimizer.state))
    for key, x in tree_flatten(own.state):
        assert (loaded[key].dtype, loaded[key].shape) == (x.dtype, x.shape)
    mine.steps(range(k, k + 20))
    assert_close(mine, theirs.steps(range(k, k + 20)))


@EVERY
def test_pytorch_resumes_where_mlx_stopped(kind, tmp_path):
    theirs = Side(kind).steps(range(2))
    mine = Mine(theirs.save(tmp_path / "a.pt")).steps(range(2, 9))
    again = Side(kind).load(mine.save(tmp_path / "b.pt")).steps(range(9, 29))
    for name, p in theirs.steps(range(2, 29)).params.items():
        assert torch.allclose(again.params[name], p, **TOLERANCE)
    if OPTIMIZERS[kind.split()[0]].has_step:
        assert again.optimizer.state_dict()["state"][0]["step"].item() == 29


def test_parameter_groups_become_a_multi_optimizer(tmp_path):
    groups = (
        {"params": ("a.weight", "b"), "lr": 0.05},
        {"params": ("a.bias",), "weight_decay": 0.0},
    )
    theirs = Side("AdamW").regroup(*groups, lr=0.01, weight_decay=0.2)
    mine = Mine(theirs.steps(range(3)).save(tmp_path / "a.pt"))
    assert isinstance(mine.optimizer, optim.MultiOptimizer)
    mine.steps(range(3, 13)).save(tmp_path / "b.pt")
    assert_close(mine, theirs.steps(range(3, 13)))
    back = torch.load(tmp_path / "b.pt", weights_only=True)["optimizer"]
    assert [g["lr"] for g in back["param_groups"]] == [0.05, 0.01]
    assert [g["params"] for g in back["param_groups"]] == [[0, 1], [2]]
    one = optim.AdamW(0.1, bias_correction=True)
    one.init(mine.model.parameters())
    with pytest.raises(ConvertError, match="needs a MultiOptimizer of 2"):
        save_torch(tmp_path / "c.pt", mine.model, one, like=mine.path)
    for rate in (0.1, [0.1]):
        with pytest.raises(ValueError, match=r"a list of 2 .* it is \[0.05, 0.01\]"):
            Mine(mine.path, learning_rate=rate)
    mine = Mine(mine.path, learning_rate=[0.3, lambda step: mx.array(0.2)])
    first = mine.optimizer.optimizers[0]
    assert first.learning_rate.item() == pytest.approx(0.3)


def test_equal_groups_become_one_optimizer_unless_their_steps_differ(tmp_path):
    theirs = Side("Adam").regroup({"params": ["a.weight"]}, {"params": ["a.bias", "b"]})
    path = theirs.steps(range(2)).save(tmp_path / "a.pt")
    mine = Mine(path)
    assert isinstance(mine.optimizer, optim.Adam)
    assert_same_state(path, mine.save(tmp_path / "b.pt"))
    weight, bias, _ = theirs.optimizer.state.values()
    weight["step"] += 1
    mine = Mine(theirs.save(tmp_path / "a.pt"))
    assert [part.step.item() for part in mine.optimizer.optimizers] == [3, 2]
    bias["step"] += 2
    with pytest.raises(ConvertError, match=r"different steps \(b at 2, a\.bias at 4"):
        Mine(theirs.save(tmp_path / "a.pt"))


def test_two_optimizers_of_one_model_become_one_and_come_back_as_two(tmp_path):
    theirs = Side("AdamW")
    a, bias, b = theirs.params.values()
    pair = torch.optim.AdamW([a, b], lr=0.02), torch.optim.SGD([bias], 0.1, 0.9)
    theirs.optimizer = SimpleNamespace(step=lambda: [each.step() for each in pair])
    model = {name: p.detach() for name, p in theirs.steps(range(3)).params.items()}
    states = [optimizer.state_dict() for optimizer in pair]
    torch.save({"net": model, "optimizers": states}, tmp_path / "a.pt")
    mine = Mine(tmp_path / "a.pt")
    parts = mine.optimizer.optimizers
    assert [type(part) for part in parts] == [optim.AdamW, optim.SGD]
    # PyTorch's SGD saves no step count, so it has AdamW's.
    assert [part.step.item() for part in parts] == [3, 3]
    mine.steps(range(3, 9)).save(tmp_path / "b.pt")
    assert_close(mine, theirs.steps(range(3, 9)))
    back = torch.load(tmp_path / "b.pt", weights_only=True)["optimizers"]
    for optimizer, state in zip(pair, back, strict=True):
        for index, slots in optimizer.state_dict()["state"].items():
            for slot, value in slots.items():
                got = state["state"][index][slot]
                assert torch.allclose(got, value, **TOLERANCE)
        optimizer.load_state_dict(state)
    save_torch(tmp_path / "c.pt", mine.model, like=mine.path)
    assert torch.load(tmp_path / "c.pt", weights_only=True)["optimizers"] == []


@pytest.mark.parametrize("step", [3, 3.0, [3.0]])
def test_step_counts_of_older_pytorch_versions_keep_their_type(step, tmp_path):
    theirs = Side("Adam").steps(range(3))
    for state in theirs.optimizer.state.values():
        state["step"] = torch.tensor(step) if isinstance(step, list) else step
    mine = Mine(path := theirs.save(tmp_path / "a.pt"))
    assert mine.optimizer.step.item() == 3
    assert_same_state(path, mine.save(tmp_path / "b.pt"))


@pytest.mark.parametrize("lr", [1, 0.001, torch.tensor(0.25)])
def test_learning_rate_keeps_its_digits_and_type_until_mlx_changes_it(lr, tmp_path):
    mine = Mine(Side("Adam", lr=lr).steps(range(1)).save(tmp_path / "a.pt"))
    assert mine.optimizer.learning_rate.dtype == mx.float32
    for rate, want in ((None, lr), (0.5, 0.5)):
        if rate is not None:
            mine.optimizer.learning_rate = rate
        back = torch.load(mine.save(tmp_path / "b.pt"), weights_only=True)
        got = back["optimizer"]["param_groups"][0]["lr"]
        kind = float if (lr, rate) == (1, 0.5) else type(lr)  # 0.5 is no integer
        assert (got, type(got)) == (want, kind)


def test_settings_changed_in_mlx_are_written_back(tmp_path):
    mine = Mine(Side("AdamW").steps(range(1)).save(tmp_path / "a.pt"))
    mine.optimizer.betas, mine.optimizer.weight_decay = [0.5, 0.6], 0.7
    back = torch.load(mine.save(tmp_path / "b.pt"), weights_only=True)
    group = back["optimizer"]["param_groups"][0]
    assert (group["betas"], group["weight_decay"]) == ((0.5, 0.6), 0.7)
    mine.optimizer.bias_correction = False
    with pytest.raises(ConvertError, match=r"AdamW has bias_correction=F.*--accept"):
        mine.save(tmp_path / "c.pt")
    mine.save(tmp_path / "c.pt", accept=("bias_correction",))


@pytest.mark.parametrize("kind", ["AdamW", "SGD momentum", "SGD", "Lion"])
def test_parameters_without_optimizer_state_are_reported_and_stay_without(
    kind, tmp_path
):
    trained = ("a.weight", "b")
    for names, reported in ((tuple(SHAPES), 0), (trained, kind != "SGD"), ((), 0)):
        mine = Mine(path := Side(kind).steps(range(2), names).save(tmp_path / "a.pt"))
        notes = [n for n in mine.run.notes if "no optimizer state for" in n]
        assert len(notes) == reported
        assert all("for a.bias. The moments" in note for note in notes)
        assert_same_state(path, mine.save(tmp_path / "b.pt"))


@pytest.mark.parametrize("steps", [0, 2])
def test_bfloat16_moments_come_back_in_the_dtype_of_pytorch(steps, tmp_path):
    path = Side("AdamW").steps(range(steps)).save(tmp_path / "a.pt")
    mine = Mine(path).steps(range(2))
    state = {k: x.astype(mx.bfloat16) if k.endswith((".m", ".v")) else x
             for k, x in tree_flatten(mine.optimizer.state)}  # fmt: skip
    mine.optimizer.state = tree_unflatten([*state.items()])
    back = torch.load(mine.save(tmp_path / "b.pt"), weights_only=True)["optimizer"]
    for name, slots in zip(SHAPES, back["state"].values(), strict=True):
        for got, ours in ((slots["exp_avg"], "m"), (slots["exp_avg_sq"], "v")):
            assert got.dtype == torch.float32
            assert (got.numpy() == state[f"{name}.{ours}"].astype(mx.float32)).all()


def test_keys_that_schedules_add_to_the_groups_survive_a_round_trip(tmp_path):
    theirs = Side("AdamW")
    torch.optim.lr_scheduler.OneCycleLR(theirs.optimizer, 0.1, total_steps=10)
    torch.optim.lr_scheduler.LambdaLR(theirs.optimizer, lambda step: 1.0)
    torch.optim.swa_utils.SWALR(theirs.optimizer, 0.05)
    theirs.optimizer.param_groups[0].update(foreach=True, name="all")
    path = theirs.steps(range(1)).save(tmp_path / "a.pt")
    assert_same_state(path, Mine(path).save(tmp_path / "b.pt"))


@pytest.mark.parametrize(
    "cls",
    [
        cls
        for cls in vars(torch.optim).values()
        if isinstance(cls, type) and torch.optim.Optimizer in cls.__mro__[1:]
    ],
)
def test_pytorch_optimizers_are_not_mistaken_for_each_other(cls):
    p = torch.nn.Parameter(torch.ones(3, 3))
    optimizer = cls([p])
    before = optimizer.state_dict()

    def closure():
        p.grad = torch.ones_like(p)
        if isinstance(optimizer, torch.optim.SparseAdam):
            p.grad = p.grad.to_sparse()
        return p.detach().sum()

    optimizer.step(closure)
    for held in (before, optimizer.state_dict()):
        slots = {slot for state in held["state"].values() for slot in state}
        if cls.__name__ in OPTIMIZERS:
            assert recognize(held["param_groups"], slots) == cls.__name__
        else:
            with pytest.raises(
                ConvertError, match=r"an unknown format.*--optimizer-key ''"
            ):
                recognize(held["param_groups"], slots)


@pytest.mark.parametrize("kind", ["Adam", "AdamW"])
def test_adam_with_decay_of_old_pytorch_is_converted_as_adamw_if_accepted(
    kind, tmp_path
):
    """PyTorch before 2.7 does not save which of the two has weight decay."""
    theirs = Side(kind, weight_decay=0.1).steps(range(1))
    for group in theirs.optimizer.param_groups:
        del group["decoupled_weight_decay"]
    path = theirs.save(tmp_path / "a.pt")
    with pytest.raises(ConvertError, match="--accept decoupled_weight_decay"):
        Mine(path)
    mine = Mine(path, accept=("decoupled_weight_decay",))
    assert type(mine.optimizer) is optim.AdamW
    assert_same_state(path, mine.save(tmp_path / "b.pt"))
    found = torch.load(path, weights_only=True)
    found["optimizer"]["param_groups"][0]["weight_decay"] = 0.0
    torch.save(found, path)
    assert type(Mine(path).optimizer) is optim.Adam  # the same without decay


REFUSED = [
    ("Adam", {"weight_decay": 0.1}, "weight_decay"),
    ("Adam", {"amsgrad": True}, "amsgrad"),
    ("AdamW", {"amsgrad": True, "betas": (0.9, 0.5)}, "amsgrad"),
    ("AdamW", {"maximize": True}, "maximize"),
    ("RMSprop", {"momentum": 0.9}, "momentum"),
    ("RMSprop", {"centered": True}, "centered"),
    ("Adagrad", {"weight_decay": 0.1}, "weight_decay"),
    ("Adadelta", {"weight_decay": 0.1}, "weight_decay"),
    ("Adagrad", {"lr_decay": 0.1}, "lr_decay"),
    ("SGD momentum", {"dampening": 0.3}, "dampening"),
]


@pytest.mark.parametrize(("kind", "changes", "key"), REFUSED)
def test_option_that_mlx_computes_differently_is_refused_until_accepted(
    kind, changes, key, tmp_path
):
    theirs = Side(kind, **changes).steps(range(2))
    path = theirs.save(tmp_path / "a.pt")
    with pytest.raises(ConvertError, match=f"(?s){key}.*accept"):
        Mine(path)
    Mine(path, accept=key)
    mine = Mine(path, accept=(key,))
    assert any(key in note for note in mine.run.notes)
    other = Side(kind).load(mine.save(tmp_path / "b.pt"))
    other.steps(range(1))
    assert not other.optimizer.param_groups[0][key]  # it stays off
    # No refusal without a reason: the same steps end somewhere else.
    mine.steps(range(2, 22))
    with pytest.raises(AssertionError):
        assert_close(mine, theirs.steps(range(2, 22)))


def test_unknown_group_key_is_refused_until_accepted(tmp_path):
    theirs = Side("SGD momentum")  # another rule in SGD's clothes
    theirs.optimizer.param_groups[0]["trust_coefficient"] = 0.001
    path = theirs.steps(range(2)).save(tmp_path / "a.pt")
    with pytest.raises(ConvertError, match=r"'trust_coefficient'.*--accept"):
        Mine(path)
    mine = Mine(path, accept=("trust_coefficient",))
    assert_same_state(path, mine.save(tmp_path / "b.pt"))
