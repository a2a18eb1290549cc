"""Evaluating where MLX lets one."""

import os

import mlx.core as mx
import pytest

from mlx_gradscale.tracing import evaluate_unless_traced


def test_what_is_traced_is_left_alone():
    state, told = {"a": mx.array(1.0) + 1}, []

    def function(x):
        told.append(evaluate_unless_traced(x))
        told.append(evaluate_unless_traced({"sum": x + state["a"]}))
        told.append(evaluate_unless_traced([mx.array(1.0) + 1]))
        return mx.sum(x * state["a"])

    assert mx.compile(function, inputs=state)(mx.ones(2)).item() == 4.0
    assert mx.grad(function)(mx.ones(2)).tolist() == [2.0, 2.0]
    assert told == [False, False, True, True, True, True]
    assert evaluate_unless_traced(state, [mx.ones(2)])


def test_any_other_error_is_raised(tmp_path):
    path = str(tmp_path / "weights.safetensors")
    mx.save_safetensors(path, {"w": mx.ones(1000)})
    lazy = mx.load(path)
    os.truncate(path, 200)
    with pytest.raises(RuntimeError, match=r"read"):
        evaluate_unless_traced(lazy)
