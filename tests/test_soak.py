"""The soak, for a short while, and that it would notice."""

import mlx.core as mx
import pytest
from soak import soak


@pytest.mark.parametrize(("steps", "compiled"), [(3000, True), (600, False)])
@pytest.mark.filterwarnings("ignore:Some parameters are float16")
def test_long_training_leaks_nothing_and_counts_right(steps, compiled):
    assert soak(steps, compiled, seed=1)


@pytest.mark.parametrize(
    ("leak", "what"),
    [(lambda: mx.ones(1) + 0, "active"), (lambda: [0.5], "objects")],
    ids=["an array", "a list"],
)
def test_a_leak_in_every_step_is_noticed(leak, what):
    kept = []

    def each_step():
        kept.append(leak())
        mx.eval(kept[-1])

    with pytest.raises(AssertionError, match="active memory") as found:
        soak(1000, True, seed=1, each_step=each_step)
    assert f"end.{what}" in str(found.traceback[-1].statement)
