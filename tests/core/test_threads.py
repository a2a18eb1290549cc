"""The same training in other threads and on other streams."""

from concurrent.futures import ThreadPoolExecutor

import mlx.core as mx
import mlx.optimizers as optim
import pytest
from support.optimizer_helpers import Training

pytestmark = pytest.mark.compiles
each_loop = pytest.mark.parametrize(
    "compiled", [False, True], ids=["eager", "compiled"]
)
RATES = [1e-2, 1e-3]


def make(compiled, rate=RATES[0], init=True):
    training = Training(optim.AdamW(rate), compiled=compiled, init=init)
    mx.eval(training.model.parameters())  # MLX cannot do that in another thread
    return training


def train(training):
    """The bits of everything after some steps, of which one overflows."""
    training.run(range(4), bad=(1,))
    assert training.optimizer.scaler.skipped_steps.item() >= 1
    return training.everything()


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


@each_loop
def test_two_models_train_in_two_threads_at_once(compiled):
    expected = [train(make(compiled, rate)) for rate in RATES]
    made = [make(compiled, rate) for rate in RATES]
    with ThreadPoolExecutor() as threads:
        assert list(threads.map(train, made)) == expected


@each_loop
def test_training_on_another_stream_is_bit_identical(compiled):
    expected = train(make(compiled))
    with mx.stream(mx.new_stream(mx.cpu)):
        assert train(make(compiled)) == expected


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
