"""Handlers see every call of a module, and leave everything else as it was."""

import copy
from abc import ABC
from concurrent.futures import ThreadPoolExecutor

import mlx.core as mx
import mlx.nn as nn
import pytest
from support.helpers import pickled, same

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
        assert same(layer(X), 2 * (2 * plain + 1))
    assert same(layer(X), 2 * plain + 1)
    assert isinstance(layer, cls)
    assert type(second) is type(layer)  # one subclass for all
    assert repr(layer) == text
    assert (type(other), get_handlers(other)) == (cls, ())
    set_handlers(layer, ())
    assert type(layer) is cls
    assert same(layer(X), plain)


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickled])
def test_copies_keep_handlers_but_not_those_of_a_watch(copied):
    layers = [nn.Linear(8, 8), nn.Linear(8, 8)]
    plain = layers[0](X), layers[1](X)
    set_handlers(layers[0], (double,))
    with watch([(layer, add_one) for layer in layers]):
        others = [copied(layer) for layer in layers]
    assert same([other(X) for other in others], [2 * plain[0], plain[1]])
    assert type(others[1]) is nn.Linear
    set_handlers(others[0], ())
    assert same(layers[0](X), 2 * plain[0])


def test_watch_of_a_shared_module_in_a_nested_watch_ends_after_an_error():
    layer = nn.Linear(8, 8)
    plain = layer(X)
    with watch([(layer, double)]):
        with watch([(layer, add_one), (layer, add_one)]):
            assert same(layer(X), 2 * plain + 2)
        with pytest.raises(ValueError), watch([(layer, add_one)]):  # noqa: PT011
            layer(mx.ones((3, 3)))
        assert same(layer(X), 2 * plain)
        set_handlers(layer, (add_one,))  # which may change
        assert same(layer(X), 2 * (plain + 1))
    assert same(layer(X), plain + 1)


def test_watch_in_one_thread_does_not_reach_other_modules_of_the_class():
    def run(layer):
        seen = []

        def note(module, function, x):
            seen.append(module)
            return function(x)

        for _ in range(200):
            with watch([(layer, note)]):
                layer(X)
        return seen

    layers = [nn.Linear(8, 8) for _ in range(4)]
    mx.eval([layer.parameters() for layer in layers])
    with ThreadPoolExecutor() as threads:
        for layer, seen in zip(layers, threads.map(run, layers), strict=True):
            assert len(seen) == 200
            assert all(module is layer for module in seen)
            assert type(layer) is nn.Linear
