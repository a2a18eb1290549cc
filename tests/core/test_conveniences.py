"""Small things that users of other frameworks stumble over."""

import inspect
import pickle
import subprocess
import sys

import mlx.core as mx
import mlx.optimizers as optim
import numpy as np
import pytest
from support.helpers import INF, Mlp, Traced, batch, mse

from mlx_gradscale import GradScaler, LossScaleOptimizer
from mlx_gradscale.diagnostics import SkipAlarm

pytestmark = pytest.mark.core


def test_the_signature_and_the_text_say_what_there_is():
    names = list(inspect.signature(GradScaler).parameters)
    assert names[:2] == ["init_scale", "growth_factor"]
    assert "hysteresis" in names

    class Named(GradScaler):
        def __init__(self, name):
            super().__init__(4.0)

    assert list(inspect.signature(Named).parameters) == ["name"]
    assert repr(GradScaler(8.0, growth_interval=5)) == (
        "GradScaler(scale=8.0, growth_interval=5, skipped_steps=0)"
    )
    assert repr(GradScaler(enabled=False)) == "GradScaler(enabled=False)"

    @mx.compile
    def traced(scale):
        scaler.state["scale"] = scale
        texts.append(repr(scaler))
        return scale

    scaler, texts = GradScaler(), []
    traced(mx.array(2.0))
    assert texts == ["GradScaler(being traced)"]


def test_a_scaler_has_an_alarm_from_the_beginning():
    assert isinstance(GradScaler().skip_alarm, SkipAlarm)
    assert pickle.loads(pickle.dumps(GradScaler())).skip_alarm.limit == 50


@pytest.mark.parametrize(
    ("name", "ours"),
    [
        ("initial_scale", "init_scale"),
        ("dynamic_growth_steps", "growth_interval"),
        ("init_scale", "init_scale"),
        ("inner_optimizer", "first argument"),
    ],
)
def test_kerass_names_name_ours(name, ours):
    with pytest.raises(TypeError, match=ours):
        LossScaleOptimizer(optim.SGD(0.1), **{name: 2})


def test_numpys_bool_and_one_element_arrays_are_taken():
    assert GradScaler(enabled=np.bool_(True)).is_enabled()
    scaler = GradScaler(dynamic=np.bool_(False))
    scaler.update(mx.array([4.0]))
    assert scaler.get_scale() == 4.0
    assert not scaler.is_dynamic()


@pytest.mark.parametrize("scale", [2**63, 2**64])
def test_large_integers_are_scales(scale):
    assert GradScaler(init_scale=scale, max_scale=2**64).get_scale() == float(scale)
    scaler = GradScaler()
    scaler.update(scale)
    assert scaler.get_scale() == float(scale)


def test_an_empty_state_dict_is_a_runtime_error_as_in_pytorch():
    with pytest.raises(RuntimeError, match="empty"):
        GradScaler().load_state_dict({})


def test_every_setting_has_a_getter_and_a_setter():
    scaler = GradScaler()
    scaler.set_backoff_interval(3)
    assert scaler.get_backoff_interval() == 3
    with pytest.raises(ValueError, match="two rules"):
        scaler.set_hysteresis(2)
    scaler.set_backoff_interval(1)
    scaler.set_hysteresis(2)
    assert scaler.get_hysteresis() == 2
    scaler.set_dynamic(False)
    assert not scaler.is_dynamic()
    with pytest.raises(ValueError, match="two rules"):
        GradScaler(hysteresis=2, backoff_interval=2)


def test_the_norm_to_clip_to_can_be_changed_in_a_compiled_step():
    model = Mlp()
    optimizer = LossScaleOptimizer(optim.SGD(1.0), GradScaler(8.0), max_grad_norm=1e-3)
    loss_and_grad = optimizer.value_and_grad(model, mse(model))
    optimizer.init(model.trainable_parameters())
    state = [model.state, optimizer.state]

    def step(x, y):
        optimizer.update(model, loss_and_grad(x, y)[1])

    traced = Traced(step)
    compiled = mx.compile(traced, inputs=state, outputs=state)

    def moved():
        before = model.layers[0].weight
        compiled(*batch())
        return mx.abs(model.layers[0].weight - before).max().item()

    small = moved()
    optimizer.max_grad_norm = 1e-1
    assert moved() > 20 * small
    assert optimizer.max_grad_norm == pytest.approx(0.1)
    assert traced.count == 1
    for bad in (0, -1.0, "1", None, True):
        with pytest.raises(ValueError, match="positive number"):
            optimizer.max_grad_norm = bad
    with pytest.raises(AttributeError, match="without clipping"):
        LossScaleOptimizer(optim.SGD(0.1)).max_grad_norm = 1.0


def test_attributes_of_the_optimizer_inside_are_read_and_set_through_the_wrapper():
    inner = optim.AdamW(1e-3, weight_decay=0.3)
    optimizer = LossScaleOptimizer(inner)
    assert optimizer.weight_decay == 0.3
    optimizer.weight_decay = 0.0
    optimizer.betas = [0.8, 0.9]
    assert inner.weight_decay == 0.0
    assert inner.betas == [0.8, 0.9]
    optimizer.note = "mine"
    assert not hasattr(inner, "note")
    with pytest.raises(AttributeError, match="Neither LossScaleOptimizer nor AdamW"):
        optimizer.nonsense  # noqa: B018
    assert pickle.loads(pickle.dumps(optimizer)).weight_decay == 0.0


def test_one_optimizer_is_not_wrapped_twice_at_a_time():
    inner = optim.AdamW(1e-3)
    first = LossScaleOptimizer(inner)
    with pytest.raises(ValueError, match="share its moments"):
        LossScaleOptimizer(inner)
    with pytest.raises(ValueError, match="share its moments"):
        LossScaleOptimizer(
            optim.MultiOptimizer([optim.SGD(0.1), inner], [lambda path, x: True])
        )
    del first
    LossScaleOptimizer(inner)


def test_the_warning_about_a_float16_loss_points_to_the_users_line():
    model = Mlp(dtype=mx.float16)
    optimizer = LossScaleOptimizer(optim.SGD(0.1))
    loss_and_grad = optimizer.value_and_grad(model, lambda x: model(x).mean())
    with pytest.warns(UserWarning, match="The loss is float16") as caught:
        loss_and_grad(mx.ones((2, 8), mx.float16))
    assert [w.filename for w in caught] == [__file__]


def test_the_state_of_a_plain_optimizer_is_told_where_it_belongs():
    plain, weights = optim.AdamW(1e-3), {"w": mx.ones(2)}
    plain.init(weights)
    with pytest.raises(ValueError, match=r"wrapper\.optimizer\.state"):
        LossScaleOptimizer(optim.AdamW(1e-3)).state = plain.state


def test_a_payload_of_nan_weights_survives_a_skipped_step():
    weights = mx.array([0x7C01, 0x7E01, 0xFE55, 0x3C00], mx.uint16).view(mx.float16)
    optimizer = LossScaleOptimizer(optim.SGD(0.1), GradScaler(1.0, dynamic=False))
    grads = {"w": mx.array([INF, 0.0, 0.0, 0.0])}
    new = optimizer.apply_gradients(grads, {"w": weights})
    assert new["w"].view(mx.uint16).tolist() == [0x7C01, 0x7E01, 0xFE55, 0x3C00]


def test_without_mlx_the_import_says_what_to_install():
    code = "import sys; sys.modules['mlx'] = None; import mlx_gradscale"
    run = [sys.executable, "-c", code]
    ended = subprocess.run(run, capture_output=True, text=True)
    assert ended.returncode == 1
    last = ended.stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError: MLX cannot be imported")
    assert 'pip install "mlx[cpu]"' in last
