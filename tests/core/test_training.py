"""Whole runs: near float32, in other threads and on other streams, without leaks."""

from concurrent.futures import ThreadPoolExecutor

import mlx.core as mx
import mlx.optimizers as optim
import pytest
from support.helpers import Mlp, batch, mse
from support.optimizer_helpers import Training, loop_of

from mlx_gradscale import GradScaler
from tools.soak import soak

compiles = pytest.mark.compiles
each_loop = pytest.mark.parametrize(
    "compiled", [False, True], ids=["eager", "compiled"]
)


def last_loss(kind, dtype, scaler=None, compute_dtype=None, **options):
    """Return the last loss of a regression whose gradients are 1e-6 as large.

    Float16 cannot hold such gradients by itself.
    """
    mx.random.seed(0)
    model = Mlp(dtype=dtype)
    optimizer, loss_and_grad, update = loop_of(
        kind,
        model,
        optim.AdamW(3e-3, eps=1e-12),
        scaler,
        lambda x, y: mse(model)(x, y) * 1e-6,
        compute_dtype,
        **options,
    )
    for step in range(150):
        loss, grads = loss_and_grad(*batch(step, n=64, dtype=dtype))
        update(model, grads)
        mx.eval(loss, model.state, optimizer.state)
    return loss.item() * 1e6


@pytest.fixture(scope="module")
def expected():
    found = last_loss("plain", mx.float32)
    assert found < 0.3
    return found


@pytest.mark.parametrize("state_bits", [32, 16, 8])
def test_float16_with_the_wrapper_ends_near_float32(expected, state_bits):
    scaler = GradScaler(2.0**40)  # too high, so that it has to find its scale
    found = last_loss("wrapper", mx.float16, scaler, state_bits=state_bits)
    assert found == pytest.approx(expected, rel=0.1)
    assert scaler.skipped_steps.item() > 0


def test_float32_parameters_computed_in_float16_end_near_float32(expected):
    found = last_loss("wrapper", mx.float32, GradScaler(2.0**30), mx.float16)
    assert found == pytest.approx(expected, rel=0.1)


@pytest.mark.filterwarnings("ignore:Some parameters are float16, but no scale")
def test_master_weights_without_loss_scaling_lose_small_gradients(expected):
    assert last_loss("guarded", mx.float16) > 2 * expected


@compiles
@pytest.mark.parametrize(("steps", "compiled"), [(1000, True), (300, False)])
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_long_training_leaks_no_memory_and_follows_the_scale_rule(steps, compiled):
    assert soak(steps, compiled, seed=1)


def make(compiled, rate=1e-2, init=True):
    training = Training(optim.AdamW(rate), compiled=compiled, init=init)
    mx.eval(training.model.parameters())  # MLX cannot do that in another thread
    return training


def train(training):
    """The bits of everything after some steps, of which one overflows."""
    training.run(range(4), bad=(1,))
    assert training.optimizer.scaler.skipped_steps.item() >= 1
    return training.everything()


@compiles
@each_loop
@pytest.mark.parametrize("init", [False, True])
def test_optimizer_made_in_one_thread_trains_in_another(compiled, init):
    expected, training = train(make(compiled)), make(compiled, init=init)
    scaler = training.optimizer.scaler
    scaler.update(256.0)
    with ThreadPoolExecutor() as threads:
        assert threads.submit(scaler.get_scale).result() == 256.0
        assert threads.submit(train, training).result() == expected
    # And back again.
    before = training.optimizer.step.item()
    train(training)
    assert training.optimizer.step.item() == 2 * before


@compiles
@each_loop
def test_two_models_train_in_two_threads_at_once(compiled):
    rates = [1e-2, 1e-3]
    expected = [train(make(compiled, rate)) for rate in rates]
    made = [make(compiled, rate) for rate in rates]
    with ThreadPoolExecutor() as threads:
        assert list(threads.map(train, made)) == expected


@compiles
@each_loop
def test_training_on_another_stream_is_bit_identical(compiled):
    expected = train(make(compiled))
    with mx.stream(mx.new_stream(mx.cpu)):
        assert train(make(compiled)) == expected


@compiles
@each_loop
def test_training_continues_when_the_default_device_changes(compiled):
    devices = [mx.cpu, mx.gpu] if mx.is_available(mx.gpu) else [mx.cpu]
    before = mx.default_device()
    training = make(compiled)
    try:
        for device in [*devices, *devices]:
            mx.set_default_device(device)
            train(training)
            assert training.optimizer.scaler.last_step_applied.item()
    finally:
        mx.set_default_device(before)
    assert training.optimizer.step.item() == 6 * len(devices)
