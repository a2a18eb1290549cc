"""How many bytes does a step move, and how many kernels does it launch?

Both should dominate the time on a GPU. They are counted from the graph of the compiled
step, without the backward pass. The counts are the same on every machine, except that a
CPU casts float16 gradients in separate kernels, one per leaf. This is faster on a CPU
but moves 8 more bytes per parameter.
"""

import io
import re
from collections import Counter
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from . import steps
from .harness import Rows, release_memory
from .steps import CASES, Step, arrays_of

# Primitives that only create a view of a buffer and launch no kernel. Contiguous copies
# nothing here, because kernels write contiguous arrays. CustomTransforms is the loss.
VIEWS = {
    "AsStrided",
    "Broadcast",
    "BroadcastAxes",
    "Contiguous",
    "CustomTransforms",
    "Depends",
    "ExpandDims",
    "Flatten",
    "Reshape",
    "Slice",
    "Split",
    "Squeeze",
    "StopGradient",
    "Transpose",
    "Unflatten",
    "View",
}
_REDUCTIONS = {"All", "And", "Any", "CustomTransforms", "Max", "Min", "Or", "Sum"}
_PRIMITIVE = re.compile(r'{ (\d+) \[label ="([^"]*)", shape=rectangle\]; }')
_INPUT = re.compile(r'^"([^"]+)" -> (\d+)$', re.MULTILINE)
_OUTPUT = re.compile(r'^(\d+) -> "([^"]+)"$', re.MULTILINE)


@dataclass
class Kernel:
    """A primitive in a graph, with the names of the arrays it reads and writes."""

    label: str
    inputs: list[str]
    outputs: list[str]

    @property
    def name(self) -> str:
        """The primitive without arguments, as in "View" for the label "View uint32"."""
        return self.label.split()[0]


def measure(quick: bool = False) -> Rows:
    """Count bytes and kernels for every case, with 32 leaves of 1 M parameters each."""
    shapes = [(1024, 1024)] * 32
    rows = []
    for name, case in CASES.items():
        release_memory()
        gradients = case.gradients(shapes)
        bare = steps.bare_step(case, gradients)
        bare_bytes, bare_kernels = count(bare)
        moved, kernels = count(steps.scaled_step(case, gradients))
        size = steps.parameter_count(shapes)
        rows.append(
            {
                "case": name,
                "bare B/parameter": round(bare_bytes / size, 1),
                "scaled B/parameter": round(moved / size, 1),
                "bare kernels": bare_kernels,
                "scaled kernels": kernels,
            }
        )
    return rows


def count(step: Step) -> tuple[int, int]:
    """Return the bytes that one step reads and writes, and its kernel launches."""
    known = arrays_of([step.state, step.gradients])
    # A kernel reads views of the same buffer, such as weights and their bits, once.
    buffers = {name: _address(x) for name, x in _named(known).items()}
    outputs = arrays_of(step.start())
    primitives = read_graph(outputs, known)
    kernels = [p for p in primitives if p.name not in VIEWS]
    sizes = _sizes(primitives, _named(known + outputs))
    moved = 0.0
    for kernel in kernels:
        read = {buffers.get(name, name): name for name in kernel.inputs}
        for name in [*read.values(), *kernel.outputs]:
            elements, width = sizes[name]
            moved += elements * width
    return round(moved), len(kernels)


def count_kernels(outputs: Any) -> Counter[str]:
    """Count the kernels that evaluating a tree of arrays would launch, by primitive."""
    primitives = read_graph(arrays_of(outputs), [])
    return Counter(p.label for p in primitives if p.name not in VIEWS)


def read_graph(outputs: list[mx.array], known: list[mx.array]) -> list[Kernel]:
    """Return the primitives that ``outputs`` depend on, in topological order."""
    text = io.StringIO()
    mx.export_to_dot(text, outputs, **_named(known + outputs))
    graph = text.getvalue()
    found = {key: Kernel(label, [], []) for key, label in _PRIMITIVE.findall(graph)}
    for name, key in _INPUT.findall(graph):
        found[key].inputs.append(name)
    for key, name in _OUTPUT.findall(graph):
        found[key].outputs.append(name)
    return list(found.values())


def _named(arrays: list[mx.array]) -> dict[str, mx.array]:
    unique = {id(x): x for x in arrays}
    return {f"array{i}": x for i, x in enumerate(unique.values())}


def _address(x: mx.array) -> int:
    bits = x.view(mx.uint16) if x.dtype == mx.bfloat16 else x
    address: int = np.array(bits, copy=False).__array_interface__["data"][0]
    return address


def _sizes(
    primitives: list[Kernel], named: dict[str, mx.array]
) -> dict[str, tuple[float, int]]:
    """Return the number of elements and the item size of every array in the graph.

    Only the sizes of named arrays, the inputs and outputs of the step, are known. The
    sizes of intermediates are inferred: a reduction returns one element, the slices of
    an array have equal sizes, and other results are as large as their largest input.
    """
    sizes: dict[str, tuple[float, int]] = {
        name: (float(x.size), x.dtype.size) for name, x in named.items()
    }
    slices = Counter(p.inputs[0] for p in primitives if p.name == "Slice")
    for primitive in primitives:
        given = [sizes.setdefault(name, (1.0, 4)) for name in primitive.inputs]
        elements = max((n for n, _ in given), default=1.0)
        width = max((w for n, w in given if n == elements), default=4)
        if primitive.name in _REDUCTIONS:
            elements = 1.0
        elif primitive.name == "Slice":
            elements /= slices[primitive.inputs[0]]
        elif "AsType" in primitive.label:
            width = 4
        for name in primitive.outputs:
            sizes.setdefault(name, (elements, width))
    return sizes
