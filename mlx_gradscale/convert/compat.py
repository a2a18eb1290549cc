"""Temporary: the new torch_checkpoint on today's reader."""

import copy
import mlx.core as mx
from ..torch_checkpoint import (
    Placeholder,
    plain_value,
    CheckpointError,
    load as _load,
    save,
)


class Tensor:
    pass


def shapes(path):
    return _load(path, float64=mx.float64)


def read_all(leaves):
    return list(leaves)


def replace_tensors(tree, function, path=(), memo=None):
    memo = {} if memo is None else memo
    if isinstance(tree, mx.array):
        if id(tree) not in memo:
            memo[id(tree)] = function(path, tree)
        return memo[id(tree)]
    if id(tree) in memo:
        return memo[id(tree)]
    if isinstance(tree, dict):
        new = memo[id(tree)] = copy.copy(tree)
        for k, x in tree.items():
            new[k] = replace_tensors(x, function, (*path, k), memo)
        return new
    if isinstance(tree, list):
        new = memo[id(tree)] = [
            replace_tensors(x, function, (*path, i), memo) for i, x in enumerate(tree)
        ]
        return new
    if type(tree) is tuple:
        return tuple(
            replace_tensors(x, function, (*path, i), memo) for i, x in enumerate(tree)
        )
    return tree
