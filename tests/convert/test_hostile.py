"""Damaged checkpoints: one error that names the fault, and nothing else."""

import mlx.core as mx
import pytest
from support.convert_runs import Small, find, small, usual

from mlx_gradscale import torch_checkpoint as pt
from mlx_gradscale.convert import load_torch


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (("optimizer", "state", 0), 3),
        (("optimizer", "state", 0, "momentum_buffer"), "x"),
        (("optimizer", "state", 0, "momentum_buffer"), mx.zeros(7)),
        (("optimizer", "state", 0, "step"), float("nan")),
        (("optimizer", "param_groups", 0, "lr"), "fast"),
        (("optimizer", "param_groups", 0, "lr"), 10**400),
        (("optimizer", "param_groups", 0, "params"), [0, 0]),
        (("optimizer", "param_groups", 0, "params"), 7),
        (("optimizer", "param_groups", 0, "param_names"), 7),
        (("optimizer", "param_groups", 0, 7), 7),
        (("scaler", "scale"), float("nan")),
        (("scaler", "growth_interval"), 2**200),
    ],
)
def test_damaged_value_is_an_error_and_leaves_the_model_unchanged(
    place, value, tmp_path
):
    checkpoint = usual()
    container = checkpoint
    for key in place[:-1]:
        container = container[key]
    container[place[-1]] = value
    pt.save(tmp_path / "a.pt", checkpoint)
    model = Small()
    before = model.fc.weight
    with pytest.raises(ValueError, match=r"damaged|shape|scale|growth|key 7|no state"):
        load_torch(tmp_path / "a.pt", model)
    assert model.fc.weight is before


def test_containers_that_are_shared_many_times_are_searched_once():
    found = {"x": "text"}
    for _ in range(100):  # 2**100 paths to one leaf
        found = {"a": found, "b": found}
    sections = find({"model": small()[0], "rest": found}, {})
    assert sections["model"] == [("model",)]
