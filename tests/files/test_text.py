"""Text for people: no control characters, bounded length, aligned columns."""

import mlx.core as mx
import pytest

from mlx_gradscale.files import text


def test_long_values_and_long_lists_are_shortened():
    assert text.shorten("a\x1b\u202e") == r"a\x1b\u202e"
    assert text.shorten("abcdefghij", 8) == "abcde..."
    assert text.shorten([1, 2]) == "[1, 2]"
    assert text.list_some(["a", "b"], 2) == "a, b"
    assert text.list_some(["a", "b", "c"], 2) == "a, b and 1 more"


def test_first_columns_are_left_aligned_and_the_others_right_aligned():
    rows = [("leaf", "dtype", "nan"), ("a.weight", "float16", 12)]
    assert text.align(rows, left=2).splitlines() == [
        "leaf      dtype    nan",
        "a.weight  float16   12",
    ]


@pytest.mark.parametrize("dtype", [mx.float16, mx.bool_])
def test_dtype_name_is_the_same_for_an_array_and_its_dtype(dtype):
    assert text.dtype_name(mx.zeros(2, dtype)) == text.dtype_name(dtype)
    assert text.dtype_name(mx.float16) == "float16"


@pytest.mark.parametrize(
    ("write", "texts"),
    [
        (
            text.power,
            {65536.0: "2^16", 0.5: "2^-1", 1000.0: "1000", 0.0: "0.0", -2.0: "-2.0"},
        ),
        (text.percent, {0.0: "0", 1e-7: "<0.01%", 0.5: "50.00%"}),
        (lambda n: text.plural(n, "step"), {1: "1 step", 1000: "1,000 steps"}),
    ],
    ids=["power", "percent", "plural"],
)
def test_numbers_are_written_for_people(write, texts):
    assert {value: write(value) for value in texts} == texts
