"""The benchmark of convert, in small: what ran, and what it counted."""

import subprocess
import sys

import pytest

from benchmarks.convert_speed import cost, measure

pytest.importorskip("torch", reason="needs PyTorch")


def test_every_contender_runs_in_every_round():
    total, costs = measure(1e5, rounds=1, width=16, only="convert")
    layer = 16 + 2 * 16 * 64
    assert total % (12 * layer) == 0
    assert 1e5 <= total < 1e5 + 12 * layer
    assert list(costs) == ["convert to MLX", "convert to PyTorch"]
    assert [len(found) for found in costs.values()] == [1, 1]
    assert all(one.peak > total for found in costs.values() for one in found)


def test_a_command_that_fails_is_no_result():
    with pytest.raises(subprocess.CalledProcessError):
        cost(sys.executable, "-c", "raise SystemExit(3)")
