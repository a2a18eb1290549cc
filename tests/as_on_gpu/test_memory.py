"""How much memory a step takes on a GPU. Here, g++ compiles the fused kernels."""

import pytest

from benchmarks import peak_memory

# Bytes per parameter: kept between steps, and beyond that at the peak of an update.
# An update writes new arrays for all that is kept, and the check joins eight
# leaves into one, which takes half a byte for float32.
MEMORY = {
    "AdamW, float32, MLX alone": (12, 12),
    "AdamW, float32": (12, 12.5),
    "AdamW, float32, max_grad_norm": (12, 12.5),
    "AdamW, float16, float32 master weights": (14, 14.25),
    "AdamW, float16, remainders": (12, 12.25),
    "AdamW, float32 computed in float16": (12, 12.25),
}


@pytest.mark.parametrize("name", peak_memory.RUNS)
def test_step_takes_no_more_bytes_per_parameter_than_documented(name):
    most_kept, most_added = MEMORY[name]
    kept, _ = peak_memory.whole_step(name, width=128)
    assert kept == pytest.approx(most_kept, abs=0.1)
    assert peak_memory.update(name) <= most_added + 0.01
