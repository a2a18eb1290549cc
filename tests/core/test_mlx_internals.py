"""What optimizers.py knows of MLX's private names, one by one.

If one fails, MLX has renamed something: change mlx_gradscale/core/optimizers.py alone.
"""

import ast
from pathlib import Path

import mlx.core as mx
import mlx.optimizers as optim
import pytest

import mlx_gradscale
from mlx_gradscale.core import optimizers as internals

PACKAGE = Path(mlx_gradscale.__file__).parent
PRIVATE = {"_schedulers", "_initialized", "_split_dictionary"}
# A LossScaleOptimizer is an Optimizer itself, and sets attributes of its base class.
OF_ITS_OWN = {"optimizer.py"}


def two(predicate=lambda path, _: path == "a"):
    return optim.MultiOptimizer([optim.SGD(0.1), optim.Lion(0.1)], [predicate])


def test_every_optimizer_has_the_private_attributes_that_are_not_settings():
    optimizer = optim.AdamW(1e-3)
    private = {name for name in vars(optimizer) if name.startswith("_")}
    assert private == set(internals._NOT_SETTINGS)


def test_init_initialises_and_setting_an_empty_state_undoes_it():
    optimizer = optim.Adam(1e-3)
    assert internals.needs_init(optimizer)
    optimizer.init({"w": mx.ones(2)})
    assert not internals.needs_init(optimizer)
    optimizer.state = {}
    assert internals.needs_init(optimizer)
    internals.mark_initialized(optimizer)
    assert optimizer._initialized


def test_a_multi_optimizer_needs_init_until_all_of_its_parts_have_state():
    both = two()
    both.optimizers[0].init({"a": mx.array(1.0)})
    assert internals.needs_init(both)
    both.init({"a": mx.array(1.0), "b": mx.array(2.0)})
    assert not internals.needs_init(both)


def test_a_multi_optimizer_splits_a_tree_by_its_filters():
    both = two()
    tree = {"a": mx.array(1.0), "b": mx.array(2.0)}
    found = list(internals.parts(both, tree))
    assert [optimizer for optimizer, _ in found] == both.optimizers
    assert [list(part) for _, part in found] == [["a"], ["b"]]
    assert list(internals.single_optimizers(both)) == both.optimizers


def test_a_schedule_is_found_under_the_name_of_its_setting():
    optimizer = optim.SGD(optim.linear_schedule(1.0, 0.0, 10))
    [values] = internals.scheduled_values(optimizer)
    assert (list(values), values["learning_rate"].item()) == (["learning_rate"], 1.0)
    assert internals.scheduled_values(optim.SGD(0.1)) == [{}]


def test_a_trial_step_is_rolled_back_with_its_state_and_schedules():
    optimizer = optim.SGD(optim.linear_schedule(1.0, 0.0, 10))
    optimizer.init({"w": mx.ones(2)})
    state, schedules = optimizer.state, optimizer._schedulers
    with internals.borrowed(optimizer, [{"learning_rate": mx.array(0.25)}]):
        new = optimizer.apply_gradients({"w": mx.ones(2)}, {"w": mx.ones(2)})
        optimizer._state = {}
    assert new["w"].tolist() == [0.75, 0.75]
    assert optimizer.state is state
    assert optimizer._schedulers is schedules
    assert optimizer.step.item() == 0


def private_names(path):
    """The private attributes of MLX that a file reads, but for those of ``self``."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute):
            of_self = isinstance(node.value, ast.Name) and node.value.id == "self"
            if not (path.name in OF_ITS_OWN and of_self):
                yield node.attr


@pytest.mark.parametrize(
    "path", sorted((PACKAGE / "core").glob("*.py")), ids=lambda p: p.name
)
def test_only_optimizers_py_uses_private_attributes_of_mlx(path):
    found = set(private_names(path)) & PRIVATE
    assert found == (PRIVATE if path.name == "optimizers.py" else set())
