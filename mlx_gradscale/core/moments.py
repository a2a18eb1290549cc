"""Moments in bfloat16: the state of an optimizer in half the bytes.

With ``state_bits=16``, the state arrays that have their parameter's own shape are
stored in bfloat16. A step reads them as float32, computes in float32, and rounds them.

Rounding to the nearest value would freeze them: with beta2 = 0.999, Adam's second
moment decays by 0.1 percent per step, but half an ulp of bfloat16 is 0.2 to 0.4
percent. So a step first multiplies the moments by a factor between 127/128 and
129/128, one for all of them::

    dither = 1 + (frac(A * step) + frac(B * step) - 1) / 128

Over many steps, the fractions are evenly spread, so a value is rounded up and down in
proportion to its distance from the two neighbors. With one fraction, this would hold
only where an ulp is 1/128 or 1/256 of the value; with the sum of two, it nearly holds
everywhere. After 5,000 steps without gradients, in which Adam's second moment shrinks
to 1/150, its square root is off by 2.7 percent (rms).

A single factor needs no random bits, so the update stays one kernel. It depends only on
the optimizer's step count, which a skipped step does not advance, so skipped steps and
resumed runs are bit-identical.
"""

from typing import Any

import mlx.core as mx
from mlx.optimizers import Optimizer

from .masters import HALF
from .notices import warn_user
from .optimizers import is_builtin, single_optimizers
from .trees import dtype_name

# By state_bits.
DTYPES = {32: mx.float32, 16: mx.bfloat16}
_CAST = (mx.float32, *HALF)
# The golden ratio and the square root of 2, modulo 1, times 2**32. Multiples of a
# quadratic irrational are spread more evenly than random numbers.
_A, _B = 2654435769, 1779033703


def check_state_bits(state_bits: Any, optimizer: Optimizer) -> None:
    """Raise if an optimizer cannot store its state in this many bits."""
    if state_bits not in tuple(DTYPES):
        raise ValueError(f"state_bits must be 32 or 16, got {state_bits!r}.")
    for part in single_optimizers(optimizer):
        if state_bits != 32 and not is_builtin(part):
            raise ValueError(
                f"state_bits={state_bits} requires an optimizer from mlx.optimizers. "
                f"{type(part).__name__} manages its own state. Use state_bits=32."
            )


def dither(optimizer: Optimizer) -> mx.array:
    """Return the factor for the moments of the step that was just taken."""
    step: mx.array = next(single_optimizers(optimizer)).state["step"].astype(mx.uint32)
    # The products wrap around at 2**32, which leaves the fractions.
    a, b = ((step * mx.array(n, mx.uint32)).astype(mx.float32) for n in (_A, _B))
    return 1 + ((a + b) * 2.0**-32 - 1) / 128


def is_small(x: mx.array, moments: mx.Dtype) -> bool:
    """Return whether an array in the state of an optimizer is stored in bfloat16."""
    return x.dtype == moments == mx.bfloat16


def cast_moments(loaded: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
    """Return a loaded state with moments in the dtypes of ``own``; warn about casts."""
    cast = {}
    for path, x in loaded.items():
        if not (path.startswith("optimizer.") and isinstance(x, mx.array)):
            continue
        dtype = own[path].dtype if path in own else x.dtype
        if dtype != x.dtype and dtype in DTYPES.values() and x.dtype in _CAST:
            cast[path] = x.astype(dtype)
    if cast:
        path = next(iter(cast))
        there, here = dtype_name(loaded[path]), dtype_name(cast[path])
        warn_user(
            f"The saved moments are {there} and are cast to {here}, so results may "
            "differ from the saved run's. To resume a run exactly, create the "
            "optimizer with the same state_bits=."
        )
    return loaded | cast
