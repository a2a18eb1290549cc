"""Long training leaks nothing, is traced once, and counts right."""

import pytest

from tools.soak import soak


@pytest.mark.compiles
@pytest.mark.parametrize(("steps", "compiled"), [(1000, True), (300, False)])
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_long_training_leaks_no_memory_and_follows_the_scale_rule(steps, compiled):
    assert soak(steps, compiled, seed=1)
