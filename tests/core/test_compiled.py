"""A whole step in one trace, and no evaluation in an eager one."""

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import pytest
from mlx.utils import tree_flatten, tree_map
from support.helpers import Mlp, batch, compiled_if, mse
from support.optimizer_helpers import Training, assert_near, loop_of
from support.scaler_helpers import used

from mlx_gradscale import GradScaler


@pytest.mark.compiles
def test_compiled_step_sees_changed_settings_and_states_without_a_retrace():
    training = Training(optim.SGD(0.5), max_grad_norm=1.0)
    optimizer, scaler = training.optimizer, training.optimizer.scaler
    training.run(range(3), bad=(0,))
    saved = tree_map(lambda x: x, optimizer.state)

    def scale_after(**bad):
        training.run([3], **bad)
        return scaler.get_scale()

    scaler.set_growth_interval(1)
    scaler.set_growth_factor(4.0)
    assert scale_after() == 512.0
    scaler.set_backoff_factor(0.25)
    assert scale_after(bad=(3,)) == 128.0
    scaler.load_state_dict(GradScaler(64.0).state_dict())
    scaler.load_state_dict(GradScaler(64.0, dynamic=False).state_dict())
    assert scale_after() == 64.0
    scaler.update(32.0)
    assert scale_after() == 32.0

    optimizer.state = dict(tree_flatten(saved))
    assert optimizer.step.item() == 2
    for rate, norm in ((0.5, 0.25), (0.0, 0.25)):
        optimizer.learning_rate, optimizer.max_grad_norm = rate, norm
        before = optimizer.masters(training.model.trainable_parameters())
        training.run([4])
        after = optimizer.masters(training.model.trainable_parameters())
        moved = tree_map(mx.subtract, after, before)
        size = optim.clip_grad_norm(moved, 1.0)[1].item()
        assert size == pytest.approx(rate * norm, rel=1e-3)
    assert optimizer.step.item() == 4
    assert scaler.get_scale() == 128.0
    assert training.traced.count == 1


@pytest.mark.compiles
@pytest.mark.parametrize("source", ["scaler", "wrapper"])
def test_gradient_function_compiled_alone_is_correct_as_the_scale_changes(source):
    mx.random.seed(3)
    model, scaler = Mlp(), GradScaler(64.0, growth_interval=1)
    _, loss_and_grad, update = loop_of(source, model, optim.SGD(0.0), scaler)
    _, expected = nn.value_and_grad(model, mse(model))(*batch())
    alone = compiled_if(True, loss_and_grad, model.state)
    for _ in range(3):
        _, grads = alone(*batch())
        assert_near(grads, expected)
        update(model, grads)
    assert scaler.get_scale() == 512.0


class Evaluation:
    """Whether anything large was computed since this was made.

    Arrays get their memory when they are computed. (Arrays that raise would show it
    as well, but after an error MLX may wait forever for tasks that it counted.)
    """

    def __init__(self, *arrays):
        self.smallest = min(x.nbytes for _, x in tree_flatten(arrays))
        self.before = mx.get_active_memory()
        mx.reset_peak_memory()

    def happened(self):
        return mx.get_peak_memory() - self.before >= self.smallest


@pytest.mark.parametrize("options", [{}, {"max_grad_norm": 1.0}, {"state_bits": 8}])
@pytest.mark.parametrize("kind", ["scaler", "scaled", "wrapper", "guarded"])
def test_eager_update_evaluates_nothing(kind, options):
    model = nn.Linear(512, 512, bias=False)
    inner, scaler = optim.AdamW(optim.cosine_decay(1e-2, 10)), GradScaler()
    if kind in ("wrapper", "guarded"):
        model.set_dtype(mx.bfloat16 if kind == "guarded" else mx.float16)
    optimizer, _, update = loop_of(kind, model, inner, scaler, **options)
    if kind == "scaled":
        optimizer, scaler = inner, used()

        def update(model, grads):
            scaler.step(inner, model, scaler.unscale_(inner, grads))
            scaler.update()

    optimizer.init(model.trainable_parameters())
    mx.eval(model.parameters())
    grads = {"weight": mx.random.normal((512, 512))}
    evaluation = Evaluation(grads)
    for _ in range(2):
        update(model, grads)
    assert not evaluation.happened()
    mx.eval(model.parameters())
    assert evaluation.happened()


def test_value_and_grad_evaluates_nothing():
    model, scaler = Mlp(), GradScaler()
    x, y = mx.random.normal((4096, 8)), mx.random.normal((4096, 1))
    evaluation = Evaluation(x, y)
    for compute_dtype in (None, mx.float16):
        loss, grads = scaler.value_and_grad(model, mse(model), compute_dtype)(x, y)
    nn.value_and_grad(model, scaler.scale_loss(mse(model), model))(x, y)
    assert not evaluation.happened()
    mx.eval(loss, grads)
    assert evaluation.happened()


@pytest.mark.compiles
def test_uninitialized_optimizer_is_initialized_inside_the_trace():
    training = Training(optim.SGD(0.1, momentum=0.9), init=False)
    training.run(range(4), bad=(0,))
    assert training.optimizer.step.item() == 3
    # One trace more, because the first one made arrays that were not there before.
    assert training.traced.count == 2
