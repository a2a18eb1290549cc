"""What a search for float32 layers found, as a list, a table and a file."""

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from ..files.text import align, percent, power
from ..islands.file import save_float32_layers
from ..islands.where import Entry, find_members, is_inside, ordered_modules
from .calls import Call, call_tree
from .measure import Run, Setting

LARGEST = 65504.0


@dataclass(frozen=True)
class Reason:
    """An island and why it is one.

    Attributes:
        entry (str or list): What ``float32_layers`` takes.
        maker (str or None): The path of the layer that made the value; None for the
            loss function.
        why (str): In words.
        by_size (bool): Whether a value between layers is too large, or too near to it.
    """

    entry: Entry
    maker: str | None
    why: str
    by_size: bool = False


@dataclass(frozen=True)
class Row:
    """How large the values of a layer are, in float32 and over all batches.

    Attributes:
        layer (str): Its path; "" is the model.
        forward (float): The largest magnitude that the layer made.
        backward (float): The largest gradient that it hands back, times the loss scale.
        is_float32 (bool): Whether it is in an island.
        why (str): The reason, where this layer made the value.
    """

    layer: str
    forward: float
    backward: float
    is_float32: bool
    why: str = ""

    @property
    def headroom(self) -> float:
        """How many times its values may double before they overflow float16."""
        largest = max(self.forward, self.backward)
        return math.log2(LARGEST / largest) if largest > 0 else math.inf


@dataclass(frozen=True)
class Float32Search:
    """What :func:`find_float32_layers` found; print it to read it.

    Attributes:
        where (list): The layers, as ``float32_layers`` takes them; it takes this
            object, too.
        reasons (list): Why each is among them.
        rows (list): How large the values of every layer are, in the order of the calls.
        problem (str): Why no layers help; "" if ``where`` was checked to suffice.
        losses (list): Of each batch, in float32 and with ``where``.
        scale (float): The smallest loss scale that was needed.
        float16_parameters (float): The share of parameters outside of the float32
            layers.
        float16_multiply_adds (float): The share of multiply-adds, of layers with
            weights.
    """

    where: list[Entry]
    reasons: list[Reason] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    problem: str = ""
    losses: list[tuple[float, float]] = field(default_factory=list)
    scale: float = 1.0
    float16_parameters: float = 1.0
    float16_multiply_adds: float = 1.0

    @property
    def helps(self) -> bool:
        """Whether the model trains with these layers, or without any if none."""
        return not self.problem

    def table(self, limit: int | None = 40) -> str:
        """Return the rows, those with the least headroom if there are too many.

        Args:
            limit (int, optional): Show this many rows; None for all. Default: ``40``.
        """
        shown = self.rows
        if limit is not None and len(shown) > limit:
            least = sorted(shown, key=lambda r: (not r.why, r.headroom))[:limit]
            shown = [row for row in self.rows if row in least]
        head = ("layer", "largest", "gradient", "headroom", "dtype", "why")
        lines = [head, *map(_cells, shown)]
        # The reason to the left, too.
        text = align([line[:-1] for line in lines]).splitlines()
        width = max(map(len, text))
        text = [
            f"{row.ljust(width)}  {line[-1]}".rstrip()
            for row, line in zip(text, lines, strict=True)
        ]
        more = len(self.rows) - len(shown)
        return "\n".join([*text, *([f"... and {more} more"] if more else [])])

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the layers to a ``.json`` file that ``float32_layers`` takes."""
        if not self.helps:
            raise ValueError(f"There is nothing to save: {self.problem}")
        rows = [
            {"layer": _name(r.entry), "made by": r.maker, "why": r.why}
            for r in self.reasons
        ]
        save_float32_layers(path, self.where, rows)

    def __str__(self) -> str:
        if not self.helps:
            return f"No layers in float32 help. {self.problem}"
        if not self.where:
            first = "Every layer can compute in half precision."
        else:
            named = "\n".join(f"  {_name(entry)}" for entry in self.where)
            first = (
                f"These layers must compute in float32:\n{named}\n"
                f"{percent(self.float16_parameters)} of the parameters and "
                f"{percent(self.float16_multiply_adds)} of the multiply-adds stay in "
                "half precision."
            )
        pairs = [f"{b:.5g} ({a:.5g} in float32)" for a, b in self.losses[:3]]
        checked = f"Loss {', '.join(pairs)}; loss scale {power(self.scale)}."
        return "\n".join([first, checked, self.table()])


def make_report(
    setting: Setting,
    references: Sequence[Run],
    reasons: Sequence[Reason],
    halves: Sequence[Run],
    problem: str = "",
) -> Float32Search:
    """Put together what a search found."""
    model = setting.model
    found = find_members(model, [reason.entry for reason in reasons])
    where = [members.name for members in found]
    inside = [path for members in found for path, _ in members.modules]
    scale = min((half.scale for half in halves), default=1.0)
    used = [reason for reason in reasons if reason.entry in where]
    parameters, multiply_adds = _shares(model, references, inside)
    return Float32Search(
        where,
        used,
        _rows(references, used, inside, scale),
        problem,
        [(a.loss, b.loss) for a, b in zip(references, halves, strict=False)],
        scale,
        parameters,
        multiply_adds,
    )


def _rows(
    references: Sequence[Run], reasons: list[Reason], inside: list[str], scale: float
) -> list[Row]:
    forward: dict[str, float] = {}
    backward: dict[str, float] = {}
    for reference in references:
        for call in _calls(call_tree(reference)):
            forward[call.module] = max(call.made(), forward.get(call.module, 0.0))
        for value in reference.backward:
            path = value.event.path
            if value.event.side == "input":
                largest = value.largest * scale
                backward[path] = max(largest, backward.get(path, 0.0))
    why = {reason.maker: reason.why for reason in reasons}
    return [
        Row(
            path,
            largest,
            backward.get(path, 0.0),
            any(is_inside(path, island) for island in inside),
            why.get(path, ""),
        )
        for path, largest in forward.items()
    ]


def _calls(call: Call) -> list[Call]:
    own = [] if call.path is None else [call]
    return own + [inner for child in call.children for inner in _calls(child)]


def _shares(
    model: nn.Module, references: Sequence[Run], inside: list[str]
) -> tuple[float, float]:
    def outside(path: str) -> bool:
        return not any(is_inside(path, island) for island in inside)

    sizes = {path: x.size for path, x in tree_flatten(model.parameters())}
    parameters = sum(n for path, n in sizes.items() if outside(path.rpartition(".")[0]))
    modules = dict(ordered_modules(model))
    counts = [
        (call.module, _multiply_adds(modules[call.module], call))
        for reference in references[:1]
        for call in _calls(call_tree(reference))
    ]
    work = sum(n for path, n in counts if outside(path))
    total = sum(n for _, n in counts)
    return parameters / max(sum(sizes.values()), 1), work / total if total else 1.0


def _multiply_adds(module: nn.Module, call: Call) -> int:
    weight = module.get("weight")
    if not isinstance(weight, mx.array) or weight.ndim < 2 or not call.inputs:
        return 0
    if weight.ndim == 2:
        return call.inputs[0].event.size * weight.shape[0]
    return call.outputs[0].event.size * math.prod(weight.shape[1:])


def _cells(row: Row) -> tuple[Any, ...]:
    headroom = "-" if math.isinf(row.headroom) else f"{row.headroom:+.1f}"
    dtype = "float32" if row.is_float32 else "half"
    name = row.layer or "(model)"
    return name, f"{row.forward:.3g}", f"{row.backward:.3g}", headroom, dtype, row.why


def _name(entry: Entry) -> str:
    return entry if isinstance(entry, str) else " + ".join(entry)
