"""Half-precision parameters, their float32 masters, and which of the two counts."""

import mlx.core as mx

HALF = (mx.float16, mx.bfloat16)
# Of another dtype for each, so that bits of one are never taken for the other's.
BITS = {mx.float16: mx.int16, mx.bfloat16: mx.uint16}


def to_float32(x: mx.array) -> mx.array:
    """Return a float16 or bfloat16 array in float32, any other as it is."""
    return x.astype(mx.float32) if x.dtype in HALF else x


def full_precision(
    parameter: mx.array,
    master: mx.array | None = None,
    written: mx.array | None = None,
) -> mx.array:
    """Return the master, or the parameter where it is not what was written last.

    So a weight that the user replaced counts, and its old master does not, element
    by element, also in a step that is compiled.

    A change that the weight's own rounding swallows cannot be seen here. Where a
    trainer decays half weights by hand, by a factor of 1 - 1e-4 per step, not a bit of
    them moves. From half an ulp on, 2.4e-4 to 4.9e-4 of a float16 weight and 8 times
    that of a bfloat16 one, they move by whole ulps. To carry such a move over to the
    master as an addition, instead of dropping what the master is more than the weight,
    gets no nearer to float32: after 300 steps of Adam in float16, with decays of 5e-4
    and 1e-3, the distance was 0.026 to 0.066 of the weights' norm dropped and 0.026 to
    0.061 carried. Float32 parameters, computed in half precision, get there: below
    1e-4. So does a decay that is left to the optimizer.
    """
    value = to_float32(parameter)
    if master is None or parameter.dtype not in HALF:
        return value
    if written.dtype == BITS[parameter.dtype]:
        untouched = half_bits(parameter) == written
    else:
        # The model was cast from one half to the other.
        untouched = to_float32(master.astype(parameter.dtype)) == value
    return mx.where(untouched, master, value)


def half_bits(parameter: mx.array) -> mx.array:
    """Return the bits of a float16 or bfloat16 array, in the same memory.

    An array of its own all the same: ``weight += 1`` changes an mx.array in place,
    which must not change what is remembered of it. What writes to the memory itself,
    through NumPy or DLPack, does change it, and goes unnoticed.
    """
    return mx.view(parameter, BITS[parameter.dtype])
