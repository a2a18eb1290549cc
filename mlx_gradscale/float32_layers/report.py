"""The result of a search for float32 layers: a list, a table and a file."""

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from mlx.utils import tree_flatten

from ..files.text import align, percent, power
from .calls import is_inside
from .trial import Run, Setting
from .where import TO, resolve, save_float32_layers

LARGEST = 65504.0
_MAX_ROWS = 40

WHOLE_MODEL = (
    "The overflow is in the model's own code, between its layers, so only the whole "
    "model in float32 cures it, which costs the time and memory of float32. Better: "
    "cast to float32 in that expression (x.astype(mx.float32)) and back after it, and "
    "reduce (sum, mean) in float32; or move it to a layer of its own; or compute in "
    "bfloat16."
)


@dataclass(frozen=True)
class Reason:
    """Why a layer has to be float32.

    Attributes:
        entry (str): The layer or chain, in the format of ``float32_layers``.
        source (str or None): The path of the layer that computed the value; None for
            the loss function.
        why (str): The reason in words.
        by_size (bool): Whether a value between layers is too large, or nearly so.
    """

    entry: str
    source: str | None
    why: str
    by_size: bool = False


@dataclass(frozen=True)
class Row:
    """The largest values of one layer, in float32 and over all batches.

    Attributes:
        layer (str): Its path; "" is the model.
        forward (float): The largest magnitude that the layer computed.
        backward (float): The largest gradient that it returns, times the loss scale.
        is_float32 (bool): Whether it is a float32 layer, or inside one.
        why (str): The reason, if this layer computed the value.
        overflows_inside (bool): Whether an intermediate result overflows, even if the
            input and output are small.
    """

    layer: str
    forward: float
    backward: float
    is_float32: bool
    why: str = ""
    overflows_inside: bool = False

    @property
    def headroom(self) -> float:
        """How many times its values can double before they overflow float16."""
        largest = max(self.forward, self.backward)
        return math.log2(LARGEST / largest) if largest > 0 else math.inf


@dataclass(frozen=True)
class Float32Search:
    """The result of :func:`find_float32_layers`; print it to read it.

    Attributes:
        where (list): The layers, in the format of ``float32_layers``, which also
            accepts this object.
        reasons (list): The reason for each layer.
        rows (list): The largest values of every layer, in call order.
        problem (str): Why no layers help; "" if ``where`` was verified to suffice.
        losses (list): The loss of each batch, in float32 and with ``where``.
        scale (float): The smallest loss scale that was needed.
        float16_parameters (float): The share of parameters outside the float32 layers.
    """

    where: list[str]
    reasons: list[Reason] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    problem: str = ""
    losses: list[tuple[float, float]] = field(default_factory=list)
    scale: float = 1.0
    float16_parameters: float = 1.0

    @property
    def is_whole_model(self) -> bool:
        """Whether nothing less than the whole model in float32 is enough."""
        return any(not entry.partition(TO)[0] for entry in self.where)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the layers to a ``.json`` file for ``float32_layers``."""
        if self.problem:
            raise ValueError(f"There is nothing to save: {self.problem}")
        reasons = [
            {"layer": r.entry, "computed by": r.source, "why": r.why}
            for r in self.reasons
        ]
        save_float32_layers(path, self.where, reasons)

    def __str__(self) -> str:
        if self.problem:
            return f"No layers in float32 help. {self.problem}"
        if not self.where:
            lines = ["Every layer can compute in half precision."]
        elif self.is_whole_model:
            lines = [WHOLE_MODEL]
        else:
            share = percent(self.float16_parameters)
            lines = [
                "These layers must compute in float32:",
                *(f"  {reason.entry}: {reason.why}" for reason in self.reasons),
                f"{share} of the parameters stay in half precision.",
            ]
        losses = [f"{b:.5g} ({a:.5g} in float32)" for a, b in self.losses[:3]]
        lines.append(f"Loss {', '.join(losses)}; loss scale {power(self.scale)}.")
        # If there are many rows, show those with the least headroom.
        least = sorted(self.rows, key=lambda r: (not r.why, r.headroom))[:_MAX_ROWS]
        shown = [_cells(row) for row in self.rows if row in least]
        head = ("layer", "largest", "gradient", "headroom", "dtype")
        lines.append(align([head, *shown]))
        if len(shown) < len(self.rows):
            lines.append(f"... and {len(self.rows) - len(shown)} more")
        return "\n".join(lines)


def _cells(row: Row) -> tuple[str, ...]:
    headroom = "-" if math.isinf(row.headroom) else f"{row.headroom:+.1f}"
    dtype = "float32" if row.is_float32 else "half"
    name = row.layer or "(model)"
    return name, f"{row.forward:.3g}", f"{row.backward:.3g}", headroom, dtype


def make_report(
    setting: Setting,
    references: Sequence[Run],
    halves: Sequence[Run],
    reasons: Sequence[Reason],
    problem: str = "",
) -> Float32Search:
    """Build the report of a search."""
    chains = resolve(setting.model, [reason.entry for reason in reasons])
    where = [chain.entry for chain in chains]
    inside = [path for chain in chains for path, _ in chain.layers]

    def is_float32(path: str) -> bool:
        return any(is_inside(path, outer) for outer in inside)

    used = [reason for reason in reasons if reason.entry in where]
    scale = min((half.scale for half in halves), default=1.0)
    forward: dict[str, float] = {}
    backward: dict[str, float] = {}
    for reference in references:
        for call in reference.loss_call.descendants():
            path = call.path or ""
            forward[path] = max(call.largest_made(), forward.get(path, 0.0))
        for value in reference.backward:
            if value.side == "input":
                largest = value.largest * scale
                backward[value.path] = max(largest, backward.get(value.path, 0.0))
    rows = []
    by_source = {reason.source: reason for reason in used}
    for path, largest in forward.items():
        row = Row(path, largest, backward.get(path, 0.0), is_float32(path))
        reason = by_source.get(path)
        if reason:
            is_inner = not reason.by_size and TO not in reason.entry
            row = replace(row, why=reason.why, overflows_inside=is_inner)
        rows.append(row)
    sizes = {path: x.size for path, x in tree_flatten(setting.model.parameters())}
    half_size = sum(size for path, size in sizes.items() if not is_float32(path))
    return Float32Search(
        where,
        used,
        rows,
        problem,
        [(a.loss, b.loss) for a, b in zip(references, halves, strict=False)],
        scale,
        half_size / max(sum(sizes.values()), 1),
    )
