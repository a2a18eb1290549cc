"""What must hold where subnormals are flushed; see as_on_metal.py, which runs it so."""

import json
import subprocess
import sys

import mlx.core as mx
import mlx.optimizers as optim
import numpy as np
import pytest
from support import as_on_metal

from mlx_gradscale import GradScaler, LossScaleOptimizer
from mlx_gradscale.core.scale import LARGEST_SCALE, SMALLEST_SCALE

pytestmark = pytest.mark.core

# Half of the smallest normal number of each dtype, in MLX and, for one, in Python.
PROBE = """
import json
import mlx.core as mx, numpy as np
kept = [(mx.array(2.0**e).astype(d) * 0.5).item() > 0
        for d, e in ((mx.float32, -126), (mx.bfloat16, -126), (mx.float16, -14))]
print(json.dumps([*kept, bool(np.float32(2.0**-126) * np.float32(0.5) > 0)]))
"""


def test_the_library_flushes_as_apples_gpus_do_and_leaves_python_alone(tmp_path):
    if reason := as_on_metal.why_not():
        pytest.skip(reason)
    library = as_on_metal.build(tmp_path)
    output = subprocess.run(
        [sys.executable, "-c", PROBE],
        env=as_on_metal.environment(library),
        stdout=subprocess.PIPE,
        check=True,
    ).stdout
    # float32 and bfloat16, but not float16.
    assert json.loads(output) == [False, False, True, True]


@pytest.mark.parametrize("scale", [SMALLEST_SCALE, LARGEST_SCALE])
@pytest.mark.parametrize("max_grad_norm", [None, 2.0**-20])
def test_at_its_limits_a_scale_keeps_gradients(scale, max_grad_norm):
    optimizer = LossScaleOptimizer(
        optim.SGD(1.0), GradScaler(scale), max_grad_norm=max_grad_norm
    )
    loss_fn = optimizer.scale_loss(
        lambda p: mx.sum(p["w"] * mx.array([3.0, 2.0**-30])), unscale=False
    )
    weights = {"w": mx.zeros(2)}
    new = optimizer.apply_gradients(mx.grad(loss_fn)(weights), weights)["w"]
    assert optimizer.scaler.last_step_applied.item()
    size = 1.0 if max_grad_norm is None else max_grad_norm / 3.0
    np.testing.assert_allclose(new, [-3.0 * size, -(2.0**-30) * size], rtol=1e-5)


def test_growth_and_backoff_stop_at_the_limits():
    for limit, finite in ((LARGEST_SCALE, True), (SMALLEST_SCALE, False)):
        scaler = GradScaler(limit, growth_interval=1)
        scaler.scale(mx.array(1.0))
        grads = {"w": mx.array([1.0 if finite else float("inf")])}
        scaler.apply_gradients(optim.SGD(0.1), grads, {"w": mx.ones(1)})
        scaler.update()
        assert scaler.get_scale() == limit


@pytest.mark.parametrize("load", ["state_dict", "state"])
@pytest.mark.parametrize(
    ("there", "here"), [(2.0**127, LARGEST_SCALE), (2.0**-149, SMALLEST_SCALE)]
)
def test_a_scale_beyond_the_limits_is_brought_to_them(load, there, here):
    optimizer = LossScaleOptimizer(optim.SGD(0.1))
    scaler = optimizer.scaler
    if load == "state_dict":
        scaler.load_state_dict(GradScaler().state_dict() | {"scale": there})
    else:
        # As versions with other limits have saved it.
        bits = np.float32([there, 2.0**-126, 2.0**127]).view(np.uint32)
        names = ("scale", "min_scale", "max_scale")
        others = {
            k: x.view(mx.float32) for k, x in zip(names, mx.array(bits), strict=True)
        }
        optimizer.state = optimizer.state | {"scaler": scaler.state | others}
        assert scaler.state["min_scale"].item() == SMALLEST_SCALE
        assert scaler.state["max_scale"].item() == LARGEST_SCALE
    assert scaler.get_scale() == here


@pytest.mark.filterwarnings("ignore:Some parameters")
@pytest.mark.parametrize("make", [lambda: optim.SGD(0.1), lambda: optim.AdamW(0.1)])
@pytest.mark.parametrize("wrap", [False, True], ids=["scaler", "wrapper"])
def test_a_skipped_step_keeps_every_bfloat16_there_is(make, wrap):
    # Also the 254 subnormals, and each NaN, which a way over float32 would change.
    bits = mx.arange(2**16, dtype=mx.uint16)
    weights = {"w": bits.view(mx.bfloat16)}
    grads = {"w": mx.full(2**16, float("inf"), mx.bfloat16)}
    scaler = GradScaler()
    scaler.scale(mx.array(1.0))
    if wrap:
        new = LossScaleOptimizer(make(), scaler).apply_gradients(grads, weights)
    else:
        new = scaler.apply_gradients(make(), grads, weights)
    assert not scaler.last_step_applied.item()
    assert mx.array_equal(new["w"].view(mx.uint16), bits).item()
