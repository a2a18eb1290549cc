"""Float16 with the wrapper trains as well as float32; with less it does not."""

import math
import sys
from pathlib import Path

import pytest


pytest.importorskip("tqdm", reason="the examples are not installed")
sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
import quickstart  # noqa: E402


@pytest.fixture(scope="module")
def results():
    return {
        # Plain float16 is lost from the first step on, and stays so.
        name: quickstart.train(dtype, make(), steps=6 if name == "float16" else 48)
        for name, (dtype, make) in quickstart.ways().items()
    }


def test_the_wrapper_ends_within_two_percent_of_float32(results):
    expected = results["float32"]["loss"]
    found = results["float16 + masters + loss scale"]
    # From log(128) = 4.85; both must have learned for the comparison to mean much.
    assert expected < 3.0
    assert found["loss"] == pytest.approx(expected, rel=0.02)
    # It started too high, so that it had to look for its scale.
    assert found["optimizer"].scaler.skipped_steps.item() > 0


def test_plain_float16_is_lost(results):
    assert math.isnan(results["float16"]["loss"])


def test_masters_alone_lose_the_gradients_that_are_zero_in_float16(results):
    # Of the zeros in float32 all are unused rows of the embedding.
    zero = {name: result["zero"] for name, result in results.items()}
    assert zero["float16 + masters"] > 5 * zero["float32"]
    assert zero["float16 + masters + loss scale"] == pytest.approx(
        zero["float32"], rel=0.1
    )
    loss = results["float16 + masters"]["loss"]
    assert loss > 1.1 * results["float32"]["loss"]
