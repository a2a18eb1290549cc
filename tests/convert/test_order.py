"""Which of the model's parameters each of the optimizer's is."""

from itertools import islice

import mlx.core as mx
import pytest
from support.convert_runs import Holder, Small, small, small_adam

from mlx_gradscale import torch_checkpoint as pt
from mlx_gradscale.convert import ConvertError, load_torch
from mlx_gradscale.convert.names import find_names
from mlx_gradscale.convert.optimizers import read_groups
from mlx_gradscale.convert.rows import Options, make_table


def named(**shapes):
    return {name.replace("__", "."): mx.zeros(shape) for name, shape in shapes.items()}


def adam_state(groups, tensors):
    """A state whose groups hold these names, and what each index means."""
    names = [name for group in groups for name in group]
    state = {
        i: {"step": 1, "exp_avg": tensors[name], "exp_avg_sq": tensors[name]}
        for i, name in enumerate(names)
    }
    left = iter(range(len(names)))
    every = [{"params": [*islice(left, len(group))]} for group in groups]
    packed = [small_adam()[2] | each for each in every]
    return {"state": state, "param_groups": packed}, dict(enumerate(names))


def find(state, tensors, is_ordered=True, **options):
    """The names by index, and notes; a safetensors file's are not in order."""
    if not is_ordered:
        tensors = dict(sorted(tensors.items()))
    parameters = {n: x for n, x in tensors.items() if not n.endswith("tracked")}
    rows = make_table(tensors, Holder(parameters)).rows
    groups = read_groups(state)
    names, notes = find_names(groups, tensors, rows, Options(**options), is_ordered)
    indices = [index for group in groups for index in group.settings["params"]]
    return dict(zip(indices, names, strict=True)), notes


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
    with pytest.raises(ConvertError, match="in 2 of its groups"):
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
    with pytest.raises(ConvertError, match=r"3 of .* in 2 of its groups.*--names"):
        find(state, tensors)
    frozen, _ = adam_state([["a", "c"]], tensors)  # or b, or both are trained
    with pytest.raises(ConvertError, match=r"if p\.requires_grad"):
        find(frozen, tensors)
    want = dict(enumerate("acb"))
    found, (note,) = find(state, tensors, names=("a", "c", "b"))
    assert found == want
    assert "assigned to the optimizer's groups in order" in note
    state["param_groups"][0]["param_names"] = ["a", "c"]
    state["param_groups"][1]["param_names"] = ["b"]
    assert find(state, tensors)[0] == want
    for names, word in (
        (("a", "b"), "3 parameters .* list of 2 names"),
        (("a", "b", "x"), "No match: x"),
        (("a", "b", "b"), "matches 2 different tensors"),
    ):
        with pytest.raises(ConvertError, match=word):
            find(state, tensors, names=names)


def test_names_option_overrides_the_strings_that_the_optimizer_uses_as_indices():
    tensors = named(a=(3,), b=(3,))
    state, _ = adam_state([["a", "b"]], tensors)
    state["param_groups"][0]["params"] = ["0", "1"]
    with pytest.raises(ConvertError, match=r"No match: 0, 1\. .*--names"):
        find(state, tensors)
    assert find(state, tensors, names=("b", "a"))[0] == {"0": "b", "1": "a"}


def test_unordered_file_needs_names_unless_all_shapes_differ():
    """A safetensors file sorts its tensors, so equal shapes could be swapped."""
    tensors = named(b=(3,), a=(4,))
    state, want = adam_state([["b", "a"]], tensors)
    assert find(state, tensors, is_ordered=False) == (want, [])
    tensors = named(b=(3,), a=(3,))
    state, want = adam_state([["b", "a"]], tensors)
    with pytest.raises(ConvertError, match=r"safetensors.*--names"):
        find(state, tensors, is_ordered=False)
    assert find(state, tensors, is_ordered=False, names=("b", "a")) == (want, [])


def test_optimizer_whose_order_differs_from_the_file_needs_names():
    tensors = named(a=(3,), b=(3,), c=(4,))
    state, _ = adam_state([["c", "b", "a"]], tensors)
    with pytest.raises(ConvertError, match=r"another order.*--names"):
        find(state, tensors)
    state, want = adam_state([["c", "a"]], tensors | named(b=(5,)))
    assert find(state, tensors | named(b=(5,)))[0] == want


@pytest.mark.parametrize("names", ["ab", "abc"])
def test_order_is_doubtful_only_if_parameters_with_moments_have_equal_shapes(names):
    tensors = named(a=(8, 3), b=(8,), c=(8,))
    tensors = {name: tensors[name] for name in names}
    state, want = adam_state([[*names]], tensors)
    found, notes = find(state, tensors)
    assert found == want
    assert ["moments are swapped" in note for note in notes] == [True] * (
        len(names) - 2
    )
    assert find(state, tensors, names=(*names,)) == (want, [])
    state["state"] = {}  # without moments, nothing can be swapped
    assert find(state, tensors)[1] == []


@pytest.mark.parametrize(
    ("in_model", "in_names"), [("module._orig_mod.", ""), ("", "_orig_mod.module.")]
)
def test_parameter_names_match_with_or_without_a_wrapper(in_model, in_names, tmp_path):
    model, optimizer, _ = small()
    (group,) = optimizer["param_groups"]
    group["param_names"] = [f"{in_names}fc.weight", f"{in_names}fc.bias"]
    model = {f"{in_model}{name}": x for name, x in model.items()}
    pt.save(tmp_path / "a.pt", {"model": model, "optimizer": optimizer})
    run = load_torch(tmp_path / "a.pt", Small())
    assert run.optimizer.state["fc"]["bias"]["v"].tolist() == [3.0, 4.0]
