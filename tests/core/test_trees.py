"""Walks over trees and models, and writes that can be rolled back."""

import mlx.core as mx
import mlx.nn as nn
from hypothesis import given
from hypothesis import strategies as st
from mlx.utils import tree_flatten
from support.helpers import bits, parameters, poison

from mlx_gradscale.core.trees import flatten, leaves, restore, slots, snapshot

trees = st.recursive(
    st.integers(0, 9).map(mx.array),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from("abc"), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(st.dictionaries(st.sampled_from("xyz"), trees, max_size=3))
def test_flatten_and_leaves_agree_with_mlx(tree):
    expected = [(path, id(x)) for path, x in tree_flatten(tree)]
    assert [(path, id(x)) for path, x in flatten(tree)] == expected
    assert [id(x) for x in leaves(tree)] == [x for _, x in expected]
    places = slots(tree)
    assert [".".join(map(str, path)) for path, *_ in places] == [p for p, _ in expected]
    assert [id(box[key]) for _, box, key in places] == [x for _, x in expected]


def test_restore_undoes_replaced_added_and_removed_arrays():
    tree, model = parameters(), nn.BatchNorm(4)
    before = bits([tree, model])
    saved = snapshot(tree, model)
    tree["layers"].append({"new": mx.ones(1)})
    tree["pair"][0] = mx.ones(9)
    del tree["scale"]
    model.running_mean = mx.ones(4)
    tree["frozen"][1]["weight"] = poison(tree["frozen"][1], "weight", 1.0)["weight"]
    restore(saved)
    assert bits([tree, model]) == before
