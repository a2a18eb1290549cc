"""A part of the compatibility matrix, and that its page says what was found."""

import pytest
from compatibility import PAGE, check, everything, page, part


@pytest.mark.parametrize("how", part(), ids=", ".join)
def test_a_bad_step_changes_no_bit_and_good_ones_are_the_bare_optimizers(how):
    assert check(how) is None


def test_the_page_is_what_the_matrix_writes_where_all_holds():
    assert PAGE.read_text() == page(dict.fromkeys(everything()))


def test_the_page_names_what_does_not_hold():
    first, *others = everything()
    text = page({first: "step 2 changed something"} | dict.fromkeys(others))
    assert f"{len(others)} of {len(others) + 1} hold" in text
    assert "| 47 of 48 |" in text
    assert text.endswith(f"- {', '.join(first)}: step 2 changed something\n")
