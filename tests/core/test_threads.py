"""The same training in other threads and on other streams."""

import threading

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import pytest
from support.helpers import Mlp, batch, bits, mse

from mlx_gradscale import GradScaler, LossScaleOptimizer

pytestmark = pytest.mark.compiles
LOOPS = ["eager", "compiled"]


def make(seed=0):
    mx.random.seed(seed)
    model = Mlp(dtype=mx.float16)
    mx.eval(model.parameters())
    optimizer = LossScaleOptimizer(optim.AdamW(1e-2), GradScaler(256.0))
    return model, optimizer


def train(loop, model=None, optimizer=None, seed=0, steps=4):
    """The bits of all there is after some steps, of which one overflows."""
    if model is None:
        model, optimizer = make(seed)
    loss_and_grad = nn.value_and_grad(model, optimizer.scale_loss(mse(model), model))
    optimizer.init(model.trainable_parameters())
    state = [model.state, optimizer.state]

    def step(x, y):
        loss, grads = loss_and_grad(x, y)
        optimizer.update(model, grads)
        return loss

    if loop == "compiled":
        step = mx.compile(step, inputs=state, outputs=state)
    for i in range(steps):
        x, y = batch(i, dtype=mx.float16)
        mx.eval(step(x * 30000 if i == 1 else x, y), state)
    assert optimizer.scaler.skipped_steps.item() >= 1
    return bits([model.parameters(), optimizer.state])


def in_threads(*functions):
    """What the functions return, each in a thread of its own, all at once."""
    results = [None] * len(functions)

    def run(i):
        try:
            results[i] = functions[i]()
        except Exception as error:
            results[i] = error

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(functions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for result in results:
        if isinstance(result, Exception):
            raise result
    return results


@pytest.fixture(scope="module")
def expected():
    """In one thread; the seed as key of what differs by it."""
    return {(loop, seed): train(loop, seed=seed) for loop in LOOPS for seed in (0, 1)}


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("initialized", [False, True])
def test_an_optimizer_made_in_one_thread_trains_in_another(loop, initialized, expected):
    model, optimizer = make()
    if initialized:
        optimizer.init(model.trainable_parameters())
    [found] = in_threads(lambda: train(loop, model, optimizer))
    assert found == expected[loop, 0]
    # And back again.
    before = optimizer.step.item()
    train(loop, model, optimizer)
    assert optimizer.step.item() > before


@pytest.mark.parametrize("loop", LOOPS)
def test_two_models_train_in_two_threads_at_once(loop, expected):
    made = [make(seed) for seed in (0, 1)]
    found = in_threads(*(lambda m=m: train(loop, *m) for m in made))
    assert found == [expected[loop, seed] for seed in (0, 1)]


@pytest.mark.parametrize("loop", LOOPS)
def test_training_on_another_stream_is_bit_identical(loop, expected):
    with mx.stream(mx.new_stream(mx.cpu)):
        assert train(loop) == expected[loop, 0]


@pytest.mark.parametrize("loop", LOOPS)
def test_training_continues_when_the_default_device_changes(loop):
    devices = [mx.cpu, mx.gpu] if mx.is_available(mx.gpu) else [mx.cpu]
    before = mx.default_device()
    model, optimizer = make()
    try:
        for device in [*devices, *devices]:
            mx.set_default_device(device)
            train(loop, model, optimizer)
            assert optimizer.scaler.last_step_applied.item()
    finally:
        mx.set_default_device(before)
    assert optimizer.step.item() == 6 * len(devices)
