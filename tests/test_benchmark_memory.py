"""What a run keeps between its steps, counted in bytes."""

import pytest

from benchmarks import memory


@pytest.mark.parametrize("name", memory.RUNS)
def test_a_run_keeps_what_is_promised_and_more_in_a_step(name):
    dtype, masters, true = memory.RUNS[name]
    standing, peak = memory.run_bytes(dtype, masters, true, width=64)
    # Besides what parameters take there are a few scalars.
    assert standing == pytest.approx(memory.STANDING[dtype, masters], abs=0.05)
    assert peak > standing
