"""The private names of mlx.optimizers that mlx_optimizers.py knows, one by one.

If one fails, MLX has renamed something: mend guard/mlx_optimizers.py alone.
"""

import ast
from pathlib import Path

import mlx.core as mx
import mlx.optimizers as optim
import pytest

from mlx_gradscale.guard import mlx_optimizers
from mlx_gradscale.state_tree import at_once

pytestmark = pytest.mark.core

PACKAGE = Path(mlx_optimizers.__file__).parent.parent
PRIVATE = {"_schedulers", "_initialized", "_split_dictionary"}
# A LossScaleOptimizer is an Optimizer itself, and sets what the base class has.
OF_ITS_OWN = {"optimizer.py"}


def test_every_optimizer_has_these_attributes_and_nothing_else_private():
    optimizer = optim.AdamW(1e-3)
    private = {name for name in vars(optimizer) if name.startswith("_")}
    assert private == set(mlx_optimizers.NOT_SETTINGS)


def test_init_sets_initialized_and_setting_the_state_takes_it_back():
    optimizer = optim.Adam(1e-3)
    assert not mlx_optimizers.is_initialized(optimizer)
    optimizer.init({"w": mx.ones(2)})
    assert mlx_optimizers.is_initialized(optimizer)
    optimizer.state = {}
    assert not mlx_optimizers.is_initialized(optimizer)


def test_a_multi_optimizer_is_initialized_when_all_in_it_are():
    both = optim.MultiOptimizer(
        [optim.SGD(0.1), optim.Lion(0.1)], [lambda path, _: path == "a"]
    )
    both.optimizers[0].init({"a": mx.array(1.0)})
    assert not mlx_optimizers.is_initialized(both)
    both.init({"a": mx.array(1.0), "b": mx.array(2.0)})
    assert mlx_optimizers.is_initialized(both)


def test_a_schedule_is_under_its_name():
    schedule = optim.linear_schedule(1.0, 0.0, 10)
    assert mlx_optimizers.schedules(optim.SGD(schedule)) == {"learning_rate": schedule}
    assert mlx_optimizers.schedules(optim.SGD(0.1)) == {}


def test_a_multi_optimizer_splits_a_tree_by_its_filters():
    first, second = optim.SGD(0.1), optim.Lion(0.1)
    both = optim.MultiOptimizer([first, second], [lambda path, _: path == "a"])
    tree = {"a": mx.array(1.0), "b": mx.array(2.0)}
    found = list(mlx_optimizers.parts(both, tree))
    assert [optimizer for optimizer, _ in found] == [first, second]
    assert [list(part) for _, part in found] == [["a"], ["b"]]


def test_values_take_the_place_of_schedules_in_a_step_and_the_state_comes_back():
    optimizer = optim.SGD(optim.linear_schedule(1.0, 0.0, 10))
    optimizer.init({"w": mx.ones(2)})
    state, schedules = optimizer.state, mlx_optimizers.schedules(optimizer)
    back = mlx_optimizers.restoring_insides(optimizer)
    mlx_optimizers.set_scheduled([optimizer], [{"learning_rate": mx.array(0.25)}])
    new = optimizer.apply_gradients({"w": mx.ones(2)}, {"w": mx.ones(2)})
    optimizer._state = {}
    at_once(back)()
    assert new["w"].tolist() == [0.75, 0.75]
    assert optimizer.state is state
    assert mlx_optimizers.schedules(optimizer) is schedules


@pytest.mark.parametrize(
    "path",
    [p for p in PACKAGE.rglob("*.py") if p.name != "mlx_optimizers.py"],
    ids=lambda path: str(path.relative_to(PACKAGE)),
)
def test_no_other_file_knows_them(path):
    attributes = {
        node.attr
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute)
        and not (
            path.name in OF_ITS_OWN
            and isinstance(node.value, ast.Name)
            and node.value.id == "self"
        )
    }
    assert attributes & PRIVATE == set()
