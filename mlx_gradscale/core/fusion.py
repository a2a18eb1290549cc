"""Arrange graphs so that ``mx.compile`` turns a step into few kernels.

None of these functions changes a value. They exist because a step is limited by the
memory it reads and writes, and a value that leaves one kernel for another is written
once and read once more. How MLX 0.32 fuses (``compile_fuse`` in its compile.cpp):

1. It walks from an output to its inputs, depth first and in order, and collects
   elementwise operations, casts, selects and broadcasts of the output's shape. A kernel
   is at most 11 operations deep and has at most 24 arrays. Reductions never fuse.
2. A node joins the kernel only if all its consumers are in the kernel already. A node
   that is reached too early is passed over, and has another chance if a later path
   reaches it. Every node that is left over starts a kernel of its own.

Rule 2 is why a plain ``where(applied, new, old)`` on each result of AdamW gives five
kernels: the new moment has two consumers, its own select and the parameter's, and
neither is an input of the other. ``select`` makes all results inputs of a common root.
``select_in_tree`` does so for deeper graphs: a step in 8 bits would be 14 kernels.
``end_kernel``, ``separate_cast`` and ``join`` shape what the check of the gradients
reads, and ``each_use`` keeps compiling fast. ``casts_first`` and ``factors`` help CPUs
only: g++ compiles the same kernels there, and vectorizes only some of them.

tests/as_on_gpu counts the kernels and bytes of every optimizer. If a new MLX fuses
differently, these tests show it, and only this file has to change.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import reduce
from itertools import repeat
from typing import Any

import mlx.core as mx
from mlx.utils import tree_map

Join = Callable[[mx.array, mx.array], mx.array]

# Leaves of the same dtype and shape are joined elementwise, this many at a time, before
# a reduction. For 448 LoRA-sized leaves, this takes 0.3 times as long as not joining.
JOIN = 8


def select(
    applied: mx.array, new: mx.array, old: mx.array, others: Sequence[mx.array]
) -> mx.array:
    """Return ``where(applied, new, old)``, as a common root of ``others``.

    Each of ``others`` becomes an operand of ``old``, in a branch that is never taken,
    as in ``where(applied, new, where(applied, second, where(applied, first, old)))``:
    where ``old`` is selected, ``applied`` is false. The last one is outermost, so list
    an array before those computed from it.

    By rule 2, an array in ``others`` cannot join the kernel before the walk comes to
    the branch made for it here, however deep the walk has met it before. So the depth
    count restarts there, and a graph deeper than 11 fits if it has enough of them.
    """
    for x in others:
        # Stay in the parameter's own dtype: a round trip through float32 flushes
        # bfloat16 subnormals on Apple GPUs and changes the bits of a float16 NaN.
        old = mx.where(applied, x.astype(old.dtype), old)
    return mx.where(applied, new, old)


def select_in_tree(
    applied: mx.array, new: mx.array, old: mx.array, others: Sequence[mx.array]
) -> mx.array:
    """Return what ``select`` returns, with its branches in a balanced tree.

    The walk meets ``others`` in the same order, but the n-th of them is log(n) deep
    instead of n, so there can be many.
    """

    def tree(values: list[mx.array]) -> mx.array:
        if len(values) == 1:
            return values[0]
        half = len(values) // 2  # the larger half is the one met later
        return mx.where(applied, tree(values[:half]), tree(values[half:]))

    never = [x.astype(old.dtype) for x in reversed(others)]
    return tree([new, *never, old])


def root_of(changed: dict[str, mx.array]) -> dict[str, mx.array]:
    """Return the same 0-d arrays, with all but one as inputs of the last.

    This takes one kernel instead of seven.
    """
    # Of the orders tried, this one gives the fewest kernels.
    *others, name = sorted(changed)
    either = reduce(mx.bitwise_or, [changed[key].astype(mx.bool_) for key in others])
    root = mx.where(either, changed[name], changed[name])  # the same either way
    return changed | {name: root}


def end_kernel(x: mx.array) -> mx.array:
    """Return ``x`` as the output of a kernel, without a copy."""
    return mx.contiguous(x, allow_col_major=True)


def separate(x: mx.array) -> mx.array:
    """Return an alias of a half-precision array, to cast it apart from other casts.

    ``mx.compile`` merges equal nodes. If two kernels shared a cast, such as the check
    and the update that of a gradient, it would become a float32 copy in memory.
    """
    return x.view(mx.uint16).view(x.dtype)


def separate_cast(x: mx.array) -> mx.array:
    """Cast an array to float32, apart from other casts of the array."""
    is_half = x.dtype in (mx.float16, mx.bfloat16)
    return (separate(x) if is_half else x).astype(mx.float32)


def join(operation: Join, values: list[mx.array]) -> mx.array:
    """Combine arrays in pairs, because a kernel is at most 11 operations deep."""
    while len(values) > 1:
        odd_one = values[-1:] if len(values) % 2 else []
        pairs = zip(values[::2], values[1::2], strict=False)
        values = [operation(a, b) for a, b in pairs] + odd_one
    return values[0]


def join_all(operation: Join, values: list[mx.array]) -> mx.array:
    """Combine any number of arrays in identical kernels, to compile only one."""
    while len(values) > JOIN:
        joined = end_kernel(join(operation, values[:JOIN]))
        values = [*values[JOIN:], joined]
    return join(operation, values)


def each_use(array: mx.array) -> Iterator[mx.array]:
    """Yield an array endlessly, switching to a fresh alias after every 512 uses.

    Compiling takes time quadratic in the number of uses of one array.
    """
    while True:
        yield from repeat(array, 512)
        array = mx.depends(array, array)


def casts_first() -> bool:
    """Return whether to unscale half-precision gradients in a kernel of their own.

    On a CPU, a cast inside the update kernel compiles to scalar code. In a benchmark,
    a step then took 1.55 times as long as the bare optimizer, instead of 1.29 times. On
    a GPU, a float32 copy would move 8 more bytes per parameter.
    """
    return mx.default_device() == mx.Device(mx.cpu)


def after(done: list[mx.array], tree: Any) -> Any:
    """Return a tree whose arrays wait for others: parameters are updated in turn.

    MLX evaluates breadth first. Without waiting, the new arrays of many parameters
    would be in memory beside the old ones.
    """
    wait = lambda x: mx.depends(x, done) if isinstance(x, mx.array) else x  # noqa: E731
    return tree_map(wait, tree) if done else tree


def factors(factor: mx.array | None, has_one_moment: bool) -> Iterator[mx.array | None]:
    """Return an endless iterator with the factor for each gradient of a step.

    On CPUs, GCC vectorizes a loop with up to 10 pairs of pointers that may overlap. An
    update with one moment has 11, if the factor is float32 like the arrays. Pointers of
    different types do not overlap, so with a float64 factor, Lion takes 1.0 instead of
    6.7 times as long as the bare optimizer.
    """
    if factor is None:
        return repeat(None)
    if not has_one_moment or not casts_first():
        return each_use(factor)
    # depends() makes a new array for each leaf. If they shared one, MLX would cast it
    # to float32 in a kernel of its own.
    return (mx.depends(x, []) for x in each_use(factor.astype(mx.float64)))
