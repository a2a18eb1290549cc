"""Names and layouts: the same function after conversion, and no silent guess."""

import re

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten
from support.convert_runs import Holder

from mlx_gradscale.convert import ConvertError
from mlx_gradscale.convert.layouts import Row
from mlx_gradscale.convert.rows import Options, make_table


def convert(tensors, model, **options):
    plan = make_table(tensors, model, Options(**options))
    weights = to_mlx(plan, tensors)
    model.load_weights(list(weights.items()), strict=True)
    for name, row in plan.rows.items():
        assert mx.array_equal(row.to_torch(weights), tensors[name])
    return plan


def to_mlx(plan, tensors):
    weights = {}
    for name, row in plan.rows.items():
        weights |= row.to_mlx(tensors[name])
    return weights


def state_dict(module):
    return {n: mx.array(t.numpy()) for n, t in module.state_dict().items()}


def channels_last(x):
    return np.moveaxis(x, 1, -1)


LAYERS = {
    "Conv1d": ((4, 6, 3), {"stride": 2}, (2, 4, 9)),
    "Conv2d": ((4, 6, (3, 2)), {"padding": 1}, (2, 4, 7, 8)),
    "Conv2d groups": ((4, 6, 3), {"groups": 2}, (2, 4, 7, 8)),
    "Conv3d": ((2, 3, (3, 2, 1)), {}, (2, 2, 4, 5, 6)),
    "ConvTranspose1d": ((4, 6, 3), {"stride": 2}, (2, 4, 5)),
    "ConvTranspose2d": ((4, 6, (3, 2)), {"stride": 2, "padding": 1}, (2, 4, 5, 4)),
    "ConvTranspose3d": ((2, 3, (3, 2, 1)), {}, (2, 2, 3, 3, 3)),
    "Bilinear": ((3, 4, 5), {}, (2, 3), (2, 4)),
}


def is_equal(theirs, ours, *shapes):
    """Whether both layers compute the same; PyTorch's channels are at axis 1."""
    rng = np.random.default_rng(0)
    inputs = [rng.normal(size=shape).astype(np.float32) for shape in shapes]
    want = theirs(*map(theirs.weight.new_tensor, inputs)).detach().numpy()
    got = np.array(ours(*(mx.array(channels_last(x)) for x in inputs)))
    # Sums of at most 27 products of order 1 in float32.
    return np.allclose(got, channels_last(want), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", LAYERS)
def test_converted_layer_computes_the_same_outputs(kind):
    torch = pytest.importorskip("torch")
    positional, keywords, *shapes = LAYERS[kind]
    name = kind.split()[0]
    theirs = getattr(torch.nn, name)(*positional, **keywords)
    ours = getattr(nn, name)(*positional, **keywords)
    convert(state_dict(theirs), ours)
    assert is_equal(theirs, ours, *shapes)


@pytest.mark.parametrize(
    ("groups", "settings", "is_right"),
    [(2, {}, False), (2, {"pytorch_compatible": True}, True), (1, {}, True)],
)
def test_group_norm_with_different_results_is_reported(groups, settings, is_right):
    torch = pytest.importorskip("torch")
    theirs, ours = torch.nn.GroupNorm(groups, 4), nn.GroupNorm(groups, 4, **settings)
    plan = convert(state_dict(theirs), ours)
    assert is_equal(theirs, ours, (2, 4, 3)) == is_right
    assert any("pytorch_compatible=True" in note for note in plan.notes) != is_right


@pytest.mark.parametrize("bias", [True, False])
def test_fused_attention_computes_the_same_outputs_after_conversion(bias):
    torch = pytest.importorskip("torch")
    theirs = torch.nn.MultiheadAttention(8, 2, bias=bias, batch_first=True)
    ours = nn.MultiHeadAttention(8, 2, bias=bias)
    plan = convert(state_dict(theirs), ours)
    assert len(plan.rows["in_proj_weight"].mlx) == 3
    x = np.random.default_rng(0).normal(size=(2, 5, 8)).astype(np.float32)
    t, a = torch.tensor(x), mx.array(x)
    want = theirs(t, t, t, need_weights=False)[0].detach().numpy()
    np.testing.assert_allclose(np.array(ours(a, a, a)), want, rtol=1e-5, atol=1e-5)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 4, 3), nn.BatchNorm(4), nn.Sequential(nn.Conv2d(4, 4, 3))
        )
        self.blocks = [nn.Linear(4, 4), nn.Linear(4, 4)]


def net_tensors():
    net = Net()
    tensors = {}
    for name, array in tree_flatten(net.parameters()):
        conv = array.ndim == 4
        tensors[name] = mx.moveaxis(array, -1, 1) if conv else array
    return tensors


WRAPPED = [
    "module.{}",
    "_orig_mod.{}",
    "module._orig_mod.{}",
    "_orig_mod.module.{}",
    "model.{}",
    "model._orig_mod.{}",
    "module.model.{}",
    "_fsdp_wrapped_module.{}",
]


@pytest.mark.parametrize("wrapped", WRAPPED)
@pytest.mark.parametrize("renamed", [False, True])
def test_wrapper_prefixes_are_removed_from_names_and_restored(wrapped, renamed):
    start = "x." if renamed else ""
    tensors = {wrapped.format(start + n): x for n, x in net_tensors().items()}
    options = Options(rename=lambda name: re.sub(r"^x\.", "", name))
    plan = make_table(tensors, Net(), options)
    weights = to_mlx(plan, tensors)
    assert weights.keys() == dict(tree_flatten(Net().parameters())).keys()
    unused = tensors.keys() - plan.rows.keys()
    assert all(name.endswith("num_batches_tracked") for name in unused)


def test_error_names_missing_extra_and_equal_names_and_wrong_shapes():
    tensors = net_tensors()
    del tensors["blocks.1.bias"]
    tensors["head.weight"] = mx.zeros((2, 2))
    with pytest.raises(ConvertError, match=r"head\.weight\. .* for blocks\.1\.bias"):
        make_table(tensors, Net())
    for name, shape, word in (
        ("blocks.0.weight", (5, 4), r"blocks\.0\.weight has shape \(5, 4\)"),
        ("features.layers.0.weight", (4, 3, 3, 2), r"MLX's layout \(conv\)"),
    ):
        with pytest.raises(ConvertError, match=word):
            make_table(net_tensors() | {name: mx.zeros(shape)}, Net())
    two = {"a": mx.zeros(2), "b": mx.zeros(2)}
    with pytest.raises(ConvertError, match="would both become table"):
        make_table(two, custom(2), Options(rename=lambda _: "table"))


def test_dropped_tensors_are_kept_for_pytorch_only():
    extra = {"mask": mx.zeros((2, 2)), "blocks.0._extra_state": mx.zeros(3, mx.uint8)}
    plan = make_table(net_tensors() | extra, Net(), Options(drop=("mask",)))
    assert plan.rows.keys() == net_tensors().keys()


def test_transposed_weights_are_an_error_that_mentions_square_ones():
    """As GPT-2 in Transformers, whose Conv1D stores (in, out)."""
    shapes = {"h.0.c_proj.weight": (4, 4), "h.0.c_attn.weight": (12, 4)}
    own = {n: mx.random.normal(shape) for n, shape in shapes.items()}
    tensors, model = {n: x.T for n, x in own.items()}, Holder(own)
    with pytest.raises(ConvertError, match=r"c_attn.*=transpose.*Square weights"):
        make_table(tensors, model)
    plan = make_table(tensors, model, Options(layouts={"*.weight": "transpose"}))
    assert all(mx.array_equal(x, own[n]) for n, x in to_mlx(plan, tensors).items())


def test_tied_weights_are_stored_once_by_the_name_that_mlx_has():
    weight = mx.ones((5, 3))
    tensors = {"embed.weight": weight, "head.weight": weight}
    for own, other in (tensors, [*tensors][::-1]):
        tied = Holder({own: mx.zeros((5, 3))})
        plan = convert(tensors, tied)
        assert plan.rows[other] is plan.rows[own] == Row(own, (own,), "same")
        # Kept apart, it would come back with its old values, and win in PyTorch.
        plan = make_table(tensors, tied, Options(drop=(other,)))
        assert plan.rows[other] is plan.rows[own]
    # Equal values in two tensors are not tied.
    apart = {"embed.weight": weight, "head.weight": mx.ones((5, 3))}
    with pytest.raises(ConvertError, match=r"no parameter for embed\.weight"):
        make_table(apart, tied)
    with pytest.raises(ConvertError, match=r"separate parameters.*embedding\.as_lin"):
        make_table(tensors, Holder(apart))


def custom(*shape):
    return Holder({"table": mx.zeros(shape)})


def test_custom_layer_keeps_its_layout_unless_another_layout_matches_too():
    plan = make_table({"table": mx.zeros((1, 7, 5))}, custom(1, 7, 5))
    assert plan.rows["table"].layout == "same"
    for shape, mlx in (((4, 4, 4), (4, 4, 4)), ((4, 3, 5), (4, 5, 3))):
        tensors = {"table": mx.zeros(shape)}
        with pytest.raises(ConvertError, match="table=conv"):
            make_table(tensors, custom(*mlx))
        kind = "same" if shape == mlx else "conv"
        make_table(tensors, custom(*mlx), Options(layouts={"table": kind}))


def test_patterns_that_match_nothing_and_unknown_layouts_are_errors():
    tensors, model = {"table": mx.zeros((2, 3, 4))}, custom(2, 4, 3)
    with pytest.raises(ConvertError, match="matches no tensor"):
        make_table(tensors, model, Options(layouts={"b.*": "conv"}))
    with pytest.raises(ConvertError, match="'turn' is not a layout"):
        make_table(tensors, model, Options(layouts={"*": "turn"}))
    first = make_table(tensors, model, Options(layouts={"*": "conv", "t*": "same"}))
    assert first.rows["table"].layout == "conv"
