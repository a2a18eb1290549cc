"""Mutants that tools/torch_checkpoint_fuzz.py makes, the same ones every time."""

import warnings

import pytest

from tools import torch_checkpoint_fuzz as fuzz


@pytest.mark.parametrize("seed", range(3))
def test_every_mutated_file_loads_or_raises_checkpoint_error(seed):
    outcomes = {"refused": 0, "loaded": 0}
    for _, data in fuzz.mutants(130, seed):
        outcomes[fuzz.judge(data)] += 1
    # Both happen, or the mutants would test nothing.
    assert outcomes["refused"] > 20
    assert outcomes["loaded"] > 2


def test_mutated_files_that_pytorch_reads_have_the_same_values():
    torch = pytest.importorskip("torch")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch's, about what the mutants hold
        outcomes = [fuzz.judge(data, torch) for _, data in fuzz.mutants(300, 11)]
    assert outcomes.count("same as torch") > 10


def test_fuzz_check_detects_an_unsound_object():
    with pytest.raises(AssertionError, match="object came out"):
        fuzz.check_sound({"x": [object()]}, set())
