"""The result of a search for float32 layers, which can be printed and saved."""

import json
import math
import os
from dataclasses import dataclass, field

from ..files.atomic import atomic_write
from ..files.text import align, percent
from .where import FORMAT, TO

_MAX_ROWS = 40
# GradScaler's default scale, at which a run starts unless it is calibrated.
FIRST_SCALE = 65536.0

_WHOLE_MODEL = (
    "The whole model would have to compute in float32, at the cost of a float32 model. "
    "The overflow is probably in the model's own code, between its layers, or in the "
    "loss function. A better fix is to cast the overflowing expression to float32 "
    "(x.astype(mx.float32)) and its result back, to reduce (sum, mean) in float32, to "
    "move the expression into its own layer, or to use bfloat16."
)


@dataclass(frozen=True)
class Row:
    """The largest value of one layer over all batches, measured in float32.

    Attributes:
        layer (str): The path of the layer; "" is the whole model.
        largest (float): The largest magnitude of its inputs and outputs.
        is_float32 (bool): Whether this is a float32 layer, or inside one.
        maximum (float): The largest finite number of the dtype: 65504 for float16.
        overflows_inside (bool): Whether the layer was selected although its inputs and
            outputs fit. Usually, an intermediate result overflows or comes close.
    """

    layer: str
    largest: float
    is_float32: bool
    maximum: float = 65504.0
    overflows_inside: bool = False

    @property
    def headroom(self) -> float:
        """``log2(maximum / largest)``, the number of doublings before an overflow."""
        return math.log2(self.maximum / self.largest) if self.largest else math.inf


@dataclass(frozen=True)
class Float32Search:
    """The result of :func:`find_float32_layers`; print it for a summary.

    Attributes:
        where (list): The layers to pass to ``float32_layers``. You can also pass this
            object itself.
        reasons (dict): The reason for each entry of ``where``.
        rows (list): A :class:`Row` for every called layer, in order of computation.
        problem (str): Why no layers help; "" if ``where`` was verified to work.
        losses (list): For each batch, the loss in float32 and the loss with ``where``.
        float16_parameters (float): The share of parameters outside the float32 layers.
        scale (float): The loss scale at which ``where`` was verified.
        calibration (str): The line of code that finds a loss scale before training.
    """

    where: list[str]
    reasons: dict[str, str] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)
    problem: str = ""
    losses: list[tuple[float, float]] = field(default_factory=list)
    float16_parameters: float = 1.0
    scale: float = FIRST_SCALE
    calibration: str = ""

    @property
    def line(self) -> str:
        """The code that fixes the overflow, and its cost; "" if none is needed."""
        why: dict[str, str] = {}
        if self.where:
            where = self.where[0] if len(self.where) == 1 else self.where
            why[f"    mlx_gradscale.float32_layers(model, {where!r})"] = self.cost
        if self.scale != FIRST_SCALE:
            what = "overflow" if self.scale < FIRST_SCALE else "underflow"
            why[f"    {self.calibration}"] = (
                f"The gradients {what} at a loss scale of 65536, where a run starts. "
                "calibrate() finds a better scale on one batch."
            )
        if self.problem or not why:
            return ""
        is_worth_it = not self.where or self.float16_parameters >= 0.5
        add = "Add" if is_worth_it else "To compute in half precision anyway, add"
        add += " these lines before the first step, and compile it again:"
        return "\n".join([*why.values(), add, "    import mlx_gradscale", *why])

    @property
    def summary(self) -> list[str]:
        """The layers in ``where`` and the reason for each, as lines of text."""
        if not self.where:
            return ["Every layer can compute in half precision."]
        lines = ["These layers must compute in float32:"]
        for entry, why in self.reasons.items():
            model = "" if entry.partition(TO)[0] else "(model)"
            lines.append(f"  {model}{entry}: {why}")
        return lines

    @property
    def cost(self) -> str:
        """How much of the model stays in half precision, and what to do if little."""
        if any(not entry.partition(TO)[0] for entry in self.where):
            return _WHOLE_MODEL
        share = f"{percent(self.float16_parameters)} of the parameters"
        if self.float16_parameters >= 0.5:
            return f"{share} still compute in half precision."
        is_float16 = not self.rows or self.rows[0].maximum == Row.maximum
        wide = "bfloat16, which has the same range as float32, or in " * is_float16
        return (
            f"Only {share} could compute in half precision, which saves little. It is "
            f"better to train in {wide}float32."
        )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the layers to a ``.json`` file for ``float32_layers``."""
        if self.problem:
            raise ValueError(f"There are no layers to save. {self.problem}")
        if not os.fspath(path).endswith(".json"):
            raise ValueError(f"path must end in .json, got {os.fspath(path)!r}.")
        content = json.dumps({**FORMAT, "layers": self.where}, indent=2)
        with atomic_write(path) as file:
            file.write(f"{content}\n".encode())

    def __str__(self) -> str:
        if self.problem:
            return f"Computing layers in float32 does not help. {self.problem}"
        lines = self.summary
        losses = [f"{b:.5g} ({a:.5g} in float32)" for a, b in self.losses[:3]]
        lines += [f"Loss {', '.join(losses)}.", *filter(None, [self.line])]
        least = sorted(self.rows, key=lambda row: row.headroom)[:_MAX_ROWS]
        rows: list[tuple[str, ...]] = [("layer", "largest", "headroom", "dtype")]
        for row in least:
            headroom = f"{row.headroom:+.1f}" if row.largest else "-"
            dtype = "float32" if row.is_float32 else "half"
            rows.append((row.layer or "(model)", f"{row.largest:.3g}", headroom, dtype))
        lines.append(align(rows))
        if len(least) < len(self.rows):
            lines.append(f"... and {len(self.rows) - len(least)} more")
        return "\n".join(lines)
