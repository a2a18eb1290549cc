"""Which of the model's parameters each of the optimizer's is."""

import mlx.core as mx
import mlx.nn as nn
import pytest
from support.convert_runs import Holder, Small, small, small_adam

from mlx_gradscale import torch_checkpoint as pt
from mlx_gradscale.convert import ConvertError, Options, load_torch
from mlx_gradscale.convert.groups import read_groups
from mlx_gradscale.convert.names import make_plan
from mlx_gradscale.convert.order import Order


def named(**shapes):
    return {name.replace("__", "."): mx.zeros(shape) for name, shape in shapes.items()}


def adam_state(groups, tensors):
    """A state whose groups hold these names, and what each index means."""
    names = [name for group in groups for name in group]
    moments = ("exp_avg", "exp_avg_sq")
    state = {
        i: {"step": 1, **dict.fromkeys(moments, tensors[n])}
        for i, n in enumerate(names)
    }
    start, packed = 0, []
    for group in groups:
        indices = list(range(start, start + len(group)))
        packed.append(small_adam()[2] | {"params": indices})
        start += len(group)
    return {"state": state, "param_groups": packed}, dict(enumerate(names))


def find(state, tensors, model=None, is_ordered=True, **options):
    """The names by index, and notes; a safetensors file's are not in order."""
    if not is_ordered:
        tensors = dict(sorted(tensors.items()))
    parameters = {n: x for n, x in tensors.items() if not n.endswith("tracked")}
    model = model or Holder(parameters)
    order = Order(read_groups(state, "Adam"), tensors, make_plan(tensors, model))
    found, notes = order.find(Options(**options), model, is_ordered)
    return dict(zip(order.indices, found, strict=True)), notes


LAYERS = named(a__weight=(3, 2), a__bias=(3,), n__weight=(3,), n__bias=(3,),
               b__weight=(2, 3), b__bias=(2,))  # fmt: skip


def test_parameters_are_assigned_to_decay_groups_by_shape():
    decay = [n for n, t in LAYERS.items() if t.ndim == 2]
    state, want = adam_state([decay, [n for n in LAYERS if n not in decay]], LAYERS)
    assert find(state, LAYERS)[0] == want


def test_names_in_model_order_are_assigned_to_the_trainer_groups():
    tensors = named(a__weight=(3, 2), a__bias=(3,), n__weight=(3,), b__weight=(3, 2))
    decay = [n for n, t in tensors.items() if t.ndim == 2]
    rest = [n for n in tensors if n not in decay]
    state, want = adam_state([decay, rest], tensors)
    for names in ((*decay, *rest), tuple(tensors)):
        assert find(state, tensors, is_ordered=False, names=names) == (want, [])
    state, _ = adam_state([["a.weight", "a.bias"], ["b.weight", "n.weight"]], tensors)
    with pytest.raises(ConvertError, match="More than one order"):
        find(state, tensors, is_ordered=False, names=(*decay, *rest))


def test_buffers_are_not_taken_for_parameters():
    tensors = named(w=(3, 2), z=(5,), bn__weight=(3,), bn__bias=(3,))
    for buffer in ("running_mean", "running_var", "num_batches_tracked"):
        tensors[f"bn.{buffer}"] = mx.zeros(3)
    state, want = adam_state([["w", "z", "bn.weight", "bn.bias"]], tensors)
    assert find(state, tensors)[0] == want
    # A buffer of another name, whose shape no parameter has, is passed over.
    tensors = named(w=(3, 2), mask=(7,), z=(5,))
    state, want = adam_state([["w", "z"]], tensors)
    assert find(state, tensors)[0] == want


def test_ambiguous_order_is_an_error_that_asks_for_names():
    tensors = named(a=(3,), b=(3,), c=(3,))
    state, _ = adam_state([["a", "c"], ["b"]], tensors)
    with pytest.raises(ConvertError, match=r"More than one order.*--names"):
        find(state, tensors)
    want = dict(enumerate("acb"))
    assert find(state, tensors, names=("a", "c", "b"))[0] == want
    state["param_groups"][0]["param_names"] = ["a", "c"]
    state["param_groups"][1]["param_names"] = ["b"]
    assert find(state, tensors)[0] == want
    for names, word in (
        (("a", "b"), "3 parameters .* list of 2 names"),
        (("a", "b", "x"), "No match or no unique match: x"),
        (("a", "b", "b"), "matches 2 different tensors"),
    ):
        with pytest.raises(ConvertError, match=word):
            find(state, tensors, names=names)


def test_names_option_overrides_the_strings_that_the_optimizer_uses_as_indices():
    tensors = named(a=(3,), b=(3,))
    state, _ = adam_state([["a", "b"]], tensors)
    state["param_groups"][0]["params"] = ["0", "1"]
    with pytest.raises(ConvertError, match=r"no unique match: 0, 1\. .*--names"):
        find(state, tensors)
    assert find(state, tensors, names=("b", "a"))[0] == {"0": "b", "1": "a"}


def test_frozen_subset_of_equal_layers_requires_the_trained_names():
    tensors = named(a=(3,), b=(3,))
    state, _ = adam_state([["b"]], tensors)
    with pytest.raises(ConvertError, match=r"if p\.requires_grad"):
        find(state, tensors)


def test_safetensors_file_does_not_define_the_parameter_order():
    tensors = named(a=(3,), b=(4,))
    state, _ = adam_state([["b", "a"]], tensors)
    with pytest.raises(ConvertError, match=r"No order of .*--names"):
        find(state, tensors, is_ordered=False)


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.second = nn.GroupNorm(2, 4)  # MLX's has its bias before its weight
        self.first = nn.Linear(4, 4)


def test_mlx_model_order_is_used_for_safetensors_with_a_note():
    names = ["second.weight", "second.bias", "first.weight", "first.bias"]
    tensors = {n: mx.zeros((4, 4) if n == "first.weight" else 4) for n in names}
    state, want = adam_state([names], tensors)
    found, notes = find(state, tensors, Pair(), is_ordered=False)
    assert found == want
    assert "the order of the MLX model's layers was used. second.weight" in notes[0]
    tensors = named(a=(3,), b=(4,))  # shapes leave no doubt
    state, want = adam_state([["a", "b"]], tensors)
    assert find(state, tensors, is_ordered=False) == (want, [])


def test_equal_modules_that_may_be_in_another_order_are_reported(tmp_path):
    """Nothing in the file tells net[2], net[0] from net[0], net[2]."""
    torch = pytest.importorskip("torch")
    net = torch.nn.Sequential(
        torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 8)
    )
    given = [*net[2].parameters(), *net[0].parameters()]
    optimizer = torch.optim.Adam(given)
    net(torch.ones(1, 8)).sum().backward()
    optimizer.step()
    torch.save({"m": net.state_dict(), "o": optimizer.state_dict()}, tmp_path / "a.pt")
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    run = load_torch(tmp_path / "a.pt", model)
    (note,) = [note for note in run.notes if "swapped" in note]
    assert "0, 2 have equal shapes" in note
    assert "--names" in note
    names = ("2.weight", "2.bias", "0.weight", "0.bias")
    run = load_torch(tmp_path / "a.pt", model, Options(names=names))
    moment = optimizer.state[net[2].bias]["exp_avg"].numpy()
    assert (moment == run.optimizer.state["layers"][2]["bias"]["m"]).all()
    assert not any("swapped" in note for note in run.notes)


def test_transformer_layers_and_states_without_moments_are_unambiguous():
    shapes = {"embed.weight": (9, 4), "norm.weight": (4,)}
    for i in range(3):
        shapes |= {f"layers.{i}.w": (4, 4), f"layers.{i}.v": (8, 4)}
    tensors = {name: mx.zeros(shape) for name, shape in shapes.items()}
    state, want = adam_state([list(shapes)], tensors)
    assert find(state, tensors) == (want, [])
    state, _ = adam_state([["a.w", "b.w"]], named(a__w=(3,), b__w=(3,)))
    state["state"] = {}
    assert find(state, named(a__w=(3,), b__w=(3,)))[1] == []


@pytest.mark.parametrize("wrapper", ["module.", "_orig_mod.", "module._orig_mod."])
@pytest.mark.parametrize("where", ["model", "optimizer"])
def test_parameter_names_match_with_or_without_a_wrapper(wrapper, where, tmp_path):
    model, optimizer, _ = small()
    in_model = wrapper if where == "model" else ""
    in_names = wrapper if where == "optimizer" else ""
    (group,) = optimizer["param_groups"]
    group["param_names"] = [f"{in_names}fc.weight", f"{in_names}fc.bias"]
    model = {f"{in_model}{name}": x for name, x in model.items()}
    pt.save(tmp_path / "a.pt", {"model": model, "optimizer": optimizer})
    run = load_torch(tmp_path / "a.pt", Small())
    assert run.optimizer.state["fc"]["bias"]["v"].tolist() == [3.0, 4.0]
