"""Probes see the dtypes that an example computes in."""

import runpy
from pathlib import Path

import mlx.core as mx
import pytest

from mlx_gradscale.float32_layers.trial import probed

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(scope="module")
def gan():
    return runpy.run_path(str(EXAMPLES / "gan.py"))


@pytest.mark.parametrize("name", ["critic_grad", "generator_grad"])
def test_every_layer_of_the_gan_computes_in_float16(gan, name):
    noise = mx.random.normal((8, 4))
    batch = (gan["real"](8), noise) if name == "critic_grad" else (noise,)
    with probed(gan["gan"]) as probes:
        gan[name](*batch)
    layers = {event.path.partition(".")[0] for event in probes.forward}
    assert layers == {"generator", "critic"}
    assert {event.dtype for event in probes.forward} == {mx.float16}
    assert {event.dtype for event in probes.backward} == {mx.float16}
