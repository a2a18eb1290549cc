"""Extra values are restored unchanged, or refused before anything is written."""

import json

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.checkpoint_writers import small
from support.helpers import bits

from mlx_gradscale import restore_checkpoint, save_checkpoint
from mlx_gradscale.files.arrays import decode, encode


def saved_and_restored(path, **extra):
    save_checkpoint(path, *small(), **extra)
    return restore_checkpoint(path, *small())


TEXT = st.text(st.characters(), max_size=9)
TAGS = st.sampled_from(["array", "tuple", "dict"])  # of the encoding itself
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | TEXT,
    lambda inside: (
        st.lists(inside, max_size=4)
        | st.lists(inside, max_size=4).map(tuple)
        | st.dictionaries(TEXT | TAGS, inside, max_size=4)
    ),
)


@given(st.dictionaries(TEXT, VALUES, max_size=4))
def test_plain_extra_values_are_restored_with_their_types(extra):
    text = json.dumps(encode(extra, {}))
    # repr tells 1 from True, 0.0 from -0.0 and a tuple from a list; NaN is "nan".
    assert repr(decode(json.loads(text), {})) == repr(extra)


def test_arrays_nested_in_extra_values_are_restored_bit_identically(tmp_path):
    arrays = {
        "half": mx.arange(6.0).reshape(2, 3).astype(mx.bfloat16),
        "large": mx.array(np.array([2**63, 2**64 - 1], np.uint64)),
        "empty": mx.zeros((0, 3)),
        "scalar": mx.array(2.5),
    }
    same_path = {"a.b": [arrays], "a": {"b": [{"half": mx.array(2)}]}}
    found = saved_and_restored(tmp_path, deep=(same_path,))["deep"][0]
    for key in same_path:
        assert bits(found[key]) == bits(same_path[key])


LOOP = []
LOOP.append(LOOP)
REFUSED = {
    "set": ({*range(52_000)}, TypeError, r"\{0, 1, .* unsupported type set\. Use"),
    "tuple keys": ({(i, i): i for i in range(10**5)}, TypeError, "with string keys"),
    "6 M ints": ([0] * 6_000_000, ValueError, r"Pass long lists to .* as mx\.array"),
    "loop": (LOOP, RecursionError, "recursion"),
    "int": (1 << 20_000, ValueError, "4300 digits"),
    "bytes": (b"bytes", TypeError, "unsupported type bytes"),
    "function": ([{"x": small}], TypeError, "unsupported type function"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_extra_value_that_cannot_be_restored_is_refused_before_writing(kind, tmp_path):
    value, error, sentence = REFUSED[kind]
    save_checkpoint(tmp_path / "run", *small(), step=1)
    with pytest.raises(error, match=sentence):
        save_checkpoint(tmp_path / "run", *small(), it=value)
    with pytest.raises(error, match=sentence):
        save_checkpoint(tmp_path / "new", *small(), it=value)
    assert restore_checkpoint(tmp_path / "run", *small()) == {"step": 1}
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
