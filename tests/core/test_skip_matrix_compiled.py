"""The compiled half of the skip matrix, with 136 kernels to compile at first.

Each optimizer has one dtype per kind of step here: the eager half has them all.
"""

import mlx.core as mx
import pytest

from .test_skip_matrix import check_in_the_wrapper, check_with_a_scaler, every_optimizer

pytestmark = [pytest.mark.compiles, pytest.mark.many_kernels]
each_mode = pytest.mark.parametrize(
    "compiled", [False, True], ids=["autocompiled", "compiled"]
)


@every_optimizer
def test_with_a_scaler_a_compiled_skip_changes_no_bit_and_others_are_bare_steps(name):
    check_with_a_scaler(name, compiled=True)


@every_optimizer
@each_mode
def test_in_the_wrapper_a_compiled_skip_changes_no_bit_and_masters_are_bare_steps(
    name, compiled
):
    check_in_the_wrapper(name, mx.float16, compiled)
