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


NUMBERS = {65536.0: "2^16", 0.5: "2^-1", 1000.0: "1000", 0.0: "0.0", -2.0: "-2.0"}


@pytest.mark.parametrize("value", NUMBERS)
def test_powers_of_two_are_written_as_powers(value):
    assert text.power(value) == NUMBERS[value]
    assert text.power(float("inf")) == "inf"


def test_only_an_exact_zero_is_printed_as_zero_percent():
    assert [*map(text.percent, (0.0, 1e-7, 0.5))] == ["0", "<0.01%", "50.00%"]


def test_one_thing_is_singular_and_other_counts_are_plural():
    counts = [text.plural(n, "step") for n in (0, 1, 2, 1000)]
    assert counts == ["0 steps", "1 step", "2 steps", "1,000 steps"]
