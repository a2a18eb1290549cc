"""The compiled half of the skip matrix, which has 170 kernels to compile at first."""

import pytest

from .test_skip_matrix import (
    check_in_the_wrapper,
    check_with_a_scaler,
    every_dtype,
    every_optimizer,
)

pytestmark = pytest.mark.many_kernels
each_mode = pytest.mark.parametrize(
    "compiled", [False, True], ids=["autocompiled", "compiled"]
)


@every_optimizer
@each_mode
def test_with_a_scaler_a_compiled_skip_changes_no_bit_and_others_are_bare_steps(
    name, compiled
):
    check_with_a_scaler(name, compiled)


@every_optimizer
@every_dtype
@each_mode
def test_in_the_wrapper_a_compiled_skip_changes_no_bit_and_masters_are_bare_steps(
    name, dtype, compiled
):
    check_in_the_wrapper(name, dtype, compiled)
