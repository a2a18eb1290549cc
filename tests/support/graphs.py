"""Count the kernels, arguments and bytes of a lazy graph."""

import io
import re
from collections import Counter

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten

_VIEWS = {
    "Squeeze",
    "ExpandDims",
    "Broadcast",
    "Reshape",
    "Transpose",
    "Slice",
    "Split",
    "View",
    "Contiguous",
    "Depends",
    "Flatten",
    "Unflatten",
}


def kernels(outputs):
    """The primitives that computing ``outputs`` launches; views launch nothing."""
    file = io.StringIO()
    mx.export_to_dot(file, [x for _, x in tree_flatten(outputs)])
    names = re.findall(r'label ="([^"]*)", shape=rectangle', file.getvalue())
    return [name for name in names if name.split()[0] not in _VIEWS]


def most_buffers(inputs, outputs):
    """How many arrays the largest fused kernel that computes ``outputs`` takes.

    Its inputs, scalars among them, and its outputs. Not the constants, which MLX
    prints into the kernel: all that is there at the start and not in ``inputs``.
    """
    given = [x for _, x in tree_flatten(inputs)]
    names = {f"given{i}": x for i, x in enumerate(given)}
    file = io.StringIO()
    mx.export_to_dot(file, [x for _, x in tree_flatten(outputs)], **names)
    text = file.getvalue()
    fused = set(re.findall(r'(\d+) \[label ="Compiled', text))
    sources = set(re.findall(r'rank=source; "(\w+)"', text))
    reads = set(re.findall(r'"(\w+)" -> (\d+)', text))
    writes = set(re.findall(r'(\d+) -> "(\w+)"', text))
    taken = [node for x, node in reads if x not in sources - names.keys()]
    counts = Counter([*taken, *(node for node, _ in writes)])
    return max(counts[node] for node in fused)


def address(x):
    """Where in memory an evaluated array is: views of it have the same."""
    return np.array(x, copy=False).__array_interface__["data"][0]


def bytes_moved(before, after):
    """The bytes of these two trees that computing ``after`` reads and writes.

    What a kernel takes twice, as weights and as their bits, it reads once. Only what
    kernels take as it is: not what they read through a view, as the finite check does,
    not what goes from one to another, and no scalars.
    """
    old, new = ([x for _, x in tree_flatten(t) if x.ndim] for t in (before, after))
    names = {f"x{i}": x for i, x in enumerate([*old, *new])}
    file = io.StringIO()
    mx.export_to_dot(file, [x for _, x in tree_flatten(after)], **names)
    nodes = re.findall(r'(\d+) \[label ="([^"]*)", shape', file.getvalue())
    launched = {node for node, name in nodes if name.split()[0] not in _VIEWS}
    reads = re.findall(r'"(x\d+)" -> (\d+)', file.getvalue())
    writes = re.findall(r'(\d+) -> "(x\d+)"', file.getvalue())
    # Of the old ones only, which are evaluated; nothing is written in their place.
    places = {name: address(x) for name, x in names.items() if int(name[1:]) < len(old)}
    read = {(places[x], node): names[x].nbytes for x, node in reads if node in launched}
    written = [names[x].nbytes for node, x in writes if node in launched]
    return sum([*read.values(), *written])
