"""Handlers see every call of a module, and leave everything else as it was."""

import copy
import threading
from abc import ABC

import mlx.core as mx
import mlx.nn as nn
import pytest
from support.helpers import Mlp, bits, pickled

from mlx_gradscale.core.intercept import get_handlers, set_handlers, watch

X = mx.ones((1, 8))


def double(module, function, *args, **kwargs):
    return 2 * function(*args, **kwargs)


def add_one(module, function, *args, **kwargs):
    return function(*args, **kwargs) + 1


class Abstract(nn.Linear, ABC):
    """Has a metaclass."""


@pytest.mark.parametrize("cls", [nn.Linear, Abstract])
def test_handlers_run_from_the_innermost_to_the_outermost(cls):
    layer, second, other = cls(8, 8), cls(8, 8), cls(8, 8)
    plain, text = layer(X), repr(layer)
    for each in (layer, second):
        set_handlers(each, (double, add_one))
    with watch([(layer, double)]):
        assert mx.array_equal(layer(X), 2 * (2 * plain + 1))
    assert mx.array_equal(layer(X), 2 * plain + 1)
    assert isinstance(layer, cls)
    assert type(second) is type(layer)  # one subclass for all
    assert repr(layer) == text
    assert (type(other), get_handlers(other)) == (cls, ())
    set_handlers(layer, ())
    assert type(layer) is cls
    assert mx.array_equal(layer(X), plain)


def test_tied_embedding_passes_both_of_its_uses_through_handlers():
    embedding = nn.Embedding(4, 8)
    plain = embedding(mx.array([1])), embedding.as_linear(X)
    with watch([(embedding, double)]):
        found = embedding(mx.array([1])), embedding.as_linear(X)
    assert all(mx.array_equal(x, 2 * y) for x, y in zip(found, plain, strict=True))


def test_module_that_cannot_be_called_stays_so():
    module = nn.Module()
    with watch([(module, double)]):
        assert not callable(module)
        assert type(module) is nn.Module


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickled])
def test_copies_keep_handlers_but_not_those_of_a_watch(copied):
    layers = [nn.Linear(8, 8), nn.Linear(8, 8)]
    plain = layers[0](X), layers[1](X)
    set_handlers(layers[0], (double,))
    with watch([(layer, add_one) for layer in layers]):
        others = [copied(layer) for layer in layers]
    assert mx.array_equal(others[0](X), 2 * plain[0])
    assert mx.array_equal(others[1](X), plain[1])
    assert type(others[1]) is nn.Linear
    assert bits(others[0].parameters()) == bits(layers[0].parameters())
    set_handlers(others[0], ())
    assert mx.array_equal(layers[0](X), 2 * plain[0])


def test_watch_of_a_shared_module_in_a_nested_watch_ends_after_an_error():
    layer = nn.Linear(8, 8)
    plain = layer(X)
    with watch([(layer, double)]):
        with watch([(layer, add_one), (layer, add_one)]):
            assert mx.array_equal(layer(X), 2 * plain + 2)
        with pytest.raises(ValueError), watch([(layer, add_one)]):  # noqa: PT011
            layer(mx.ones((3, 3)))
        assert mx.array_equal(layer(X), 2 * plain)
    assert type(layer) is nn.Linear


def test_handlers_may_change_and_classes_too_while_a_module_is_watched():
    class Other(nn.Linear):
        pass

    first, second = nn.Linear(8, 8), nn.Linear(8, 8)
    plain = first(X)
    with watch([(first, add_one), (second, add_one)]):
        set_handlers(first, (double,))
        assert mx.array_equal(first(X), 2 * plain + 1)
        second.__class__ = Other
    assert mx.array_equal(first(X), 2 * plain)
    assert type(second) is Other


def test_watch_in_one_thread_does_not_reach_other_modules_of_the_class():
    layers = [nn.Linear(8, 8) for _ in range(4)]
    seen = [[] for _ in layers]

    def run(index):
        def note(module, function, x):
            seen[index].append(module)
            return function(x)

        for _ in range(200):
            with watch([(layers[index], note)]):
                layers[index](X)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(layers))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for layer, modules in zip(layers, seen, strict=True):
        assert len(modules) == 200
        assert all(module is layer for module in modules)
        assert type(layer) is nn.Linear


@pytest.mark.compiles
def test_handlers_are_part_of_what_is_compiled_and_recomputed():
    model = Mlp()
    plain = mx.grad(lambda x: model(3 * x).sum())(X)
    set_handlers(model.layers[0], (lambda module, function, x: function(3 * x),))

    def loss_fn(x):
        return mx.checkpoint(lambda x: model(x).sum())(x)

    for gradient in (mx.grad(loss_fn), mx.compile(mx.grad(loss_fn))):
        assert mx.allclose(gradient(X), plain, rtol=1e-5)
