"""The result of a search for float32 layers, which can be printed and saved."""

import json
import math
import os
from dataclasses import dataclass, field

from ..files.disk import atomic_write
from ..files.text import align, percent
from .where import FORMAT, TO

_MAX_ROWS = 40
# GradScaler's default scale, at which a run starts unless it is calibrated.
FIRST_SCALE = 65536.0
_SAVES_LITTLE = (
    "This saves little. If an expression in the model or the loss overflows, cast it "
    "to float32 (x.astype(mx.float32)) or move it into its own layer. Otherwise, it is "
    "better to train in bfloat16 or float32."
)


@dataclass(frozen=True)
class Row:
    """The largest value of one layer over all batches, measured in float32.

    Attributes:
        layer (str): The path of the layer; "" is the whole model.
        largest (float): The largest magnitude of its inputs and outputs.
        is_float32 (bool): Whether this is a float32 layer, or inside one.
        maximum (float): The largest finite number of the dtype: 65504 for float16.
    """

    layer: str
    largest: float
    is_float32: bool
    maximum: float = 65504.0

    @property
    def headroom(self) -> float:
        """``log2(maximum / largest)``, the number of doublings before an overflow."""
        if self.largest in (0.0, math.inf):
            return -math.inf if self.largest else math.inf
        return math.log2(self.maximum / self.largest)


@dataclass(frozen=True)
class Float32Search:
    """The result of :func:`find_float32_layers`; print it for a summary.

    Attributes:
        where (list): The layers to pass to ``float32_layers``. You can also pass this
            object itself.
        reasons (dict): The reason for each entry of ``where``.
        rows (list): A :class:`Row` for every called layer, in order of return.
        problem (str): Why no layers help; "" if ``where`` was verified to work.
        losses (list): For each batch, the loss in float32 and the loss with ``where``.
        float16_parameters (float): The share of parameters outside the float32 layers.
        scale (float): The loss scale at which ``where`` was verified.
    """

    where: list[str]
    reasons: dict[str, str] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)
    problem: str = ""
    losses: list[tuple[float, float]] = field(default_factory=list)
    float16_parameters: float = 1.0
    scale: float = FIRST_SCALE

    @property
    def line(self) -> str:
        """The code that fixes the overflow, and its cost; "" if none is needed."""
        lines = []
        if self.where:
            share = percent(self.float16_parameters)
            lines += [
                f"{share} of the parameters still compute in half precision.",
                "Add these lines before the first step, and compile it again:",
                "    import mlx_gradscale",
                f"    mlx_gradscale.float32_layers(model, {self.where!r})",
            ]
            if self.float16_parameters < 0.5:
                lines.insert(1, _SAVES_LITTLE)
        if self.scale != FIRST_SCALE and not self.problem:
            what = "overflow" if self.scale < FIRST_SCALE else "underflow"
            lines.append(
                f"The gradients {what} at a loss scale of 65536, where a run starts. "
                "mlx_gradscale.diagnostics.calibrate() finds a better scale."
            )
        return "\n".join(lines)

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
        lines = ["Every layer can compute in half precision."]
        if self.where:
            lines = ["These layers must compute in float32:"]
        for entry, why in self.reasons.items():
            model = "" if entry.partition(TO)[0] else "(model)"
            lines.append(f"  {model}{entry}: {why}")
        losses = [f"{b:.5g} ({a:.5g} in float32)" for a, b in self.losses[:3]]
        lines += [f"Loss {', '.join(losses)}.", *filter(None, [self.line])]
        rows: list[tuple[str, ...]] = [("layer", "largest", "headroom", "dtype")]
        for row in sorted(self.rows, key=lambda row: row.headroom)[:_MAX_ROWS]:
            dtype = "float32" if row.is_float32 else "half"
            numbers = f"{row.largest:.3g}", f"{row.headroom:+.1f}"
            rows.append((row.layer or "(model)", *numbers, dtype))
        if len(self.rows) > _MAX_ROWS:
            rows.append(("...", "", "", ""))
        return "\n".join([*lines, align(rows)])
