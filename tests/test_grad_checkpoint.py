"""Recomputed layers train as they do without recomputation."""

import copy
from collections import namedtuple
from functools import partial

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
import pytest
from mlx.utils import tree_flatten
from support.helpers import each_mode, pickled

from mlx_gradscale import LossScaleOptimizer, float32_layers, grad_checkpoint
from mlx_gradscale.core.intercept import get_handlers, set_handlers
from mlx_gradscale.grad_checkpoint import _random_state

X, OTHER = mx.random.normal((2, 4, 8), key=mx.random.key(1))
mx.eval(X, OTHER)
Pair = namedtuple("Pair", "first second")


class Layer(nn.Module):
    """A linear layer; a subclass says how the model uses it."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def __call__(self, x):
        return nn.gelu(self.linear(x))

    def use(self, x):
        return x + self(x)


class Dropout(Layer):
    def __init__(self):
        super().__init__()
        self.dropout = nn.Dropout(0.5)

    def __call__(self, x):
        return self.dropout(super().__call__(self.dropout(x)))


@partial(mx.compile, inputs=mx.random.state, outputs=mx.random.state)
def drop(x):
    return x * mx.random.bernoulli(0.5, x.shape)


class CompiledDropout(Layer):
    def __call__(self, x):
        return drop(super().__call__(x))


class Normalized(Layer):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm(8)

    def __call__(self, x):
        return self.norm(super().__call__(x))


class ReadsWhatItWrites(Layer):
    def __init__(self):
        super().__init__()
        self._mean, self.count = mx.zeros(8), 0
        self._list, self._last = [mx.ones(8), {"x": mx.ones(8)}], (mx.zeros(8), 1)
        self.freeze(keys=["_mean"], recurse=False)

    def __call__(self, x):
        self.count += 1
        self._mean = 0.9 * self._mean + mx.stop_gradient(x.mean(axis=0))
        self._list[1]["x"] = self._mean * self._list[0]
        self._list.append(self._mean)
        x = x * self.count + self._mean + self._list[1]["x"] + self._last[0]
        self._last = (mx.stop_gradient(x[0]), self.count)
        self._new = mx.stop_gradient(x)  # not there before the first call
        return super().__call__(x) + self._list[-1]


class WritesInPlace(Layer):
    def __init__(self):
        super().__init__()
        self._buffer = mx.zeros((2, 8))

    def __call__(self, x):
        x = x + self._buffer[0]
        self._buffer[0] += mx.stop_gradient(x[1])
        return super().__call__(x) * self._buffer[0]


class ChangesItsArgument(Layer):
    def __call__(self, x):
        x += super().__call__(x)
        x[0] = 2 * x[1]
        return x

    def use(self, x):
        return self(2 * x)


class IntegerOutput(Layer):
    def __call__(self, x):
        return mx.argmax(super().__call__(x), axis=-1)

    def use(self, x):
        return x * self(x)[:, None]


class Arguments(Layer):
    """Arrays that need gradients, masks, None and integers, in every place."""

    def __call__(self, x, y, mask, none, n, ids, *, z, pair, box):
        assert none is None
        assert type(pair) is Pair
        out = self.linear(x * y + z["z"] * n) + pair.first * pair.second[0]
        box[0], old = out, box[0]
        return mx.where(mask, out[ids], 0) * old

    def use(self, x):
        mask, ids = OTHER > 0, mx.array([1, 0, 3, 2])
        pair, box = Pair(x.sin(), [x.cos(), "text"]), [3 * x]
        out = self(x, x.exp(), mask, None, 2, ids, z={"z": x - 1}, pair=pair, box=box)
        return out + box[0]


class Outputs(Layer):
    """Several outputs, of which one is behind mx.stop_gradient, one an integer."""

    def __call__(self, x):
        out = super().__call__(x)
        stopped = mx.stop_gradient(3 * out)
        given = {"out": out, "text": "text", "n": mx.argmax(out), "x": x}
        return stopped, given, Pair([out * out], None)

    def use(self, x):
        stopped, given, pair = self(x)
        assert type(pair) is Pair
        x = x + stopped * given["out"] + given["x"]
        return x + pair.first[0] * given["n"] if given["text"] else x


class AuxiliaryLoss(Layer):
    def __call__(self, x):
        out = super().__call__(x)
        self._loss = mx.square(out).sum()
        return out

    def use(self, x):
        return super().use(x) + self._loss


class NoOutput(Layer):
    n_calls = 1

    def __call__(self, x):
        self._out = super().__call__(x)

    def use(self, x):
        return x if self(x) else x + self._out


class CalledTwice(Layer):
    def use(self, x):
        return self(self(x) + x) + x


class NoWeights(Layer):
    def __init__(self):
        nn.Module.__init__(self)

    def __call__(self, x):
        return nn.gelu(x) * mx.random.uniform(shape=x.shape)


class NoGradientOfInput(Layer):
    def use(self, x):
        return x + self(OTHER)


class PartlyFrozen(Layer):
    def __init__(self):
        super().__init__()
        self.linear.freeze(keys="bias")


class Frozen(Layer):
    def __init__(self):
        super().__init__()
        self.freeze()


class Cache:
    def __init__(self):
        self.kept = []

    def append(self, x):
        self.kept.append(x)
        return sum(self.kept)


class Cached(Layer):
    """Called with an object that it writes to, and so not recomputed."""

    n_calls = 1

    def __call__(self, x, cache):
        return super().__call__(cache.append(super().__call__(x)))

    def use(self, x):
        cache = Cache()
        return self(self(x, cache), cache)


class Appends(Layer):
    def __call__(self, x, seen):
        seen.append(self.linear(x))
        return sum(seen)

    def use(self, x):
        seen = []
        x = self(self(x, seen), seen)
        assert len(seen) == 2
        return x + seen[0]


class Nested(Dropout):
    n_calls = 2

    def __init__(self):
        super().__init__()
        grad_checkpoint(self.linear)


class Quantized(Layer):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)
        self.inner = nn.QuantizedLinear(32, 32, group_size=32)

    def __call__(self, x):
        return self.down(self.inner(self.up(x)))


class Lora(Quantized):
    def __init__(self):
        super().__init__()
        lora = pytest.importorskip("mlx_lm.tuner.lora", reason="needs mlx-lm")
        self.freeze()
        self.inner = lora.LoRALinear.from_base(self.inner, dropout=0.3)
        self.inner.lora_b = mx.random.normal(self.inner.lora_b.shape)


def kinds(cls):
    return [
        cls,
        *(kind for subclass in cls.__subclasses__() for kind in kinds(subclass)),
    ]


class Model(nn.Module):
    def __init__(self, make=Layer):
        super().__init__()
        mx.random.seed(0)
        self.first = nn.Linear(8, 8)
        self.layers = [make() for _ in range(3)]
        self.layers[2].shared = self.layers[0].get("linear", [])

    def __call__(self, x):
        x = self.first(x)
        for layer in self.layers:
            x = mx.fast.rms_norm(layer.use(x), None, 1e-5)  # or some would explode
        return x


class Calls:
    """Handler that counts calls."""

    count = 0

    def __call__(self, module, function, *args, **kwargs):
        self.count += 1
        return function(*args, **kwargs)


def contents(model):
    """Everything in a model that a call can change."""
    found = {}
    for path, module in model.named_modules():
        for name, x in [*tree_flatten(dict(module)), *vars(module).items()]:
            if isinstance(x, mx.array | int):
                found[f"{path}.{name}"] = np.array(x)
    return found


def loss_and_grad_of(model, get_gradient=nn.value_and_grad):
    def loss_fn(x):
        return mx.square(model(x).astype(mx.float32)).mean()

    return get_gradient(model, loss_fn)


def train(model, compiled, optimizer=None, get_gradient=nn.value_and_grad):
    """Return losses, gradients and what the model holds after two steps."""
    optimizer = optimizer or optim.SGD(1e-3)
    x = X.astype(model.first.weight.dtype)
    loss_and_grad = loss_and_grad_of(model, get_gradient)
    state = [model.state, optimizer.state, mx.random.state]

    def step(x):
        loss, gradients = loss_and_grad(x)
        optimizer.update(model, gradients)
        return loss, gradients

    if compiled:
        step = mx.compile(step, inputs=state, outputs=state)
    mx.random.seed(1)
    results = [step(x) for _ in range(2)]
    mx.eval(results, state)
    arrays = {path: np.array(x) for path, x in tree_flatten(results)}
    return arrays, contents(model), mx.random.state[0].tolist()


def assert_same(found, wanted, tolerance=1e-4):
    (arrays, held, key), (other_arrays, other_held, other_key) = found, wanted
    assert key == other_key
    assert held.keys() == other_held.keys()
    assert arrays.keys() == other_arrays.keys()
    for path, x in (arrays | held).items():
        other = (other_arrays | other_held)[path]
        assert np.allclose(x, other, rtol=tolerance, atol=tolerance / 10), path


@each_mode
@pytest.mark.parametrize("make", kinds(Layer))
def test_recomputed_layer_trains_as_without_recomputation(make, compiled):
    found, counts = [], []
    for is_recomputed in (False, True):
        model, calls = Model(make), Calls()
        for layer in model.layers:
            set_handlers(layer, (calls,))
        if is_recomputed:
            grad_checkpoint(model)
        found.append(train(model, compiled))
        counts.append(calls.count)
    assert counts[1] == counts[0] * getattr(make, "n_calls", 2)
    assert_same(*found)


WRAPPED = {
    "value_and_grad": lambda opt, *of: opt.value_and_grad(*of),
    "compute_dtype": lambda opt, *of: opt.value_and_grad(*of, mx.float16),
    "scale_loss": lambda opt, model, loss_fn: nn.value_and_grad(
        model, opt.scale_loss(loss_fn, model)
    ),
    "scale_loss, compute_dtype": lambda opt, model, loss_fn: nn.value_and_grad(
        model, opt.scale_loss(loss_fn, model, mx.float16)
    ),
}


@each_mode
@pytest.mark.parametrize("name", WRAPPED)
def test_recomputation_changes_no_loss_or_gradient_of_a_wrapped_optimizer(
    name, compiled
):
    found = []
    for is_recomputed in (False, True):
        model = Model(Dropout)
        if "compute_dtype" not in name:
            model.set_dtype(mx.float16)
        float32_layers(model, ["layers.0.linear", "layers.1"])
        if is_recomputed:
            grad_checkpoint(model)
        optimizer = LossScaleOptimizer(optim.AdamW(1e-3))
        optimizer.init(model.trainable_parameters())
        get_gradient = partial(WRAPPED[name], optimizer)
        found.append(train(model, compiled, optimizer, get_gradient))
        assert optimizer.scaler.skipped_steps.item() == 0
    assert_same(*found, tolerance=1e-2)


def test_recomputation_of_one_layer_leaves_other_layers_of_its_class_alone():
    model, calls = Model(), Calls()
    for layer in model.layers:
        set_handlers(layer, (calls,))
    with grad_checkpoint(model.layers[1]):
        mx.eval(loss_and_grad_of(model)(X))
    assert calls.count == 4
    with grad_checkpoint([model.layers[0], model.layers[1], model.layers[0]]):
        mx.eval(loss_and_grad_of(model)(X))
    assert calls.count == 9


def test_recomputation_that_is_applied_twice_ends_with_the_first_handle():
    model = Model()
    before = [type(module) for module in model.modules()]
    first, second = grad_checkpoint(model), grad_checkpoint(model.layers)
    assert len(get_handlers(model.layers[0])) == 1
    second.undo()
    assert len(get_handlers(model.layers[0])) == 1
    first.undo()
    assert [type(module) for module in model.modules()] == before


@pytest.mark.parametrize("copied", [copy.deepcopy, pickled])
def test_copies_of_a_recomputed_model_are_recomputed(copied):
    model = Model()
    grad_checkpoint(model)
    other = copied(model)
    assert len(get_handlers(other.layers[0])) == 1
    assert_same(train(other, False), train(model, False))


def test_error_in_a_layer_leaves_the_model_and_the_random_key_as_they_were():
    calls = []

    class Fails(Layer):
        def __call__(self, x):
            calls.append(None)
            x = x + mx.random.normal(x.shape)
            if len(calls) > 1:
                self.linear.weight = mx.zeros((1, 1))
                raise KeyError("fails")
            return super().__call__(x)

    layer, key = Fails(), mx.random.key(3)
    weight = layer.linear.weight
    grad_checkpoint(layer)
    mx.random.seed(3)
    with pytest.raises(KeyError, match="fails"):
        mx.grad(lambda x: layer(x).sum())(X)
    assert layer.linear.weight is weight
    assert mx.array_equal(mx.random.state[0], mx.random.split(key)[0])


def test_model_holds_the_same_arrays_after_the_backward_pass():
    model = Model(Arguments)
    before = [id(x) for _, x in tree_flatten(model.parameters())]
    grad_checkpoint(model)
    x, box = X, [1, (2, {"x": mx.ones(3)})]
    model.layers[0].box = box
    mx.eval(mx.grad(lambda x: mx.square(model(x)).mean())(x))
    assert [id(x) for _, x in tree_flatten(model.parameters())] == before
    assert model.layers[0].box is box


class Wide(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(64, 512), nn.Linear(512, 64)

    def __call__(self, x):
        return x + self.down(nn.gelu(self.up(x)))


def test_recomputation_keeps_the_activations_of_one_layer_at_a_time():
    model, x = nn.Sequential(*(Wide() for _ in range(16))), mx.ones((256, 64))
    loss_and_grad = nn.value_and_grad(model, lambda x: mx.square(model(x)).mean())
    mx.eval(model.parameters(), x)

    def peak():
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        mx.eval(loss_and_grad(x))
        return mx.get_peak_memory() - before

    plain = peak()
    with grad_checkpoint(model):
        # 12.3 of 37.5 MB; 16.4 if the gradients of inputs do not wait for the weights'.
        assert peak() < 0.38 * plain


def test_random_key_of_this_thread_can_be_set():
    # grad_checkpoint() relies on this detail of MLX.
    key = mx.random.key(5)
    _random_state()[0] = key
    drawn = mx.random.normal((4,))
    assert mx.array_equal(drawn, mx.random.normal((4,), key=mx.random.split(key)[1]))


@pytest.mark.parametrize(
    ("layers", "error", "sentence"),
    [
        (lambda model: [], ValueError, "the list is empty"),
        (lambda model: nn.Module(), TypeError, "Expected a module with __call__"),
        (lambda model: [model.first, None], TypeError, "with layers, got NoneType"),
        (lambda model: model.parameters(), TypeError, "got dict"),
        (lambda model: "layers", TypeError, "got str"),
    ],
)
def test_recomputation_of_something_else_is_an_error_that_changes_nothing(
    layers, error, sentence
):
    model = Model()
    with pytest.raises(error, match=sentence):
        grad_checkpoint(layers(model))
    assert all(get_handlers(module) == () for module in model.modules())
