"""If ranks would train different things, ``init()`` raises on every rank."""

import pytest
from support.ring import run_ranks


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """Return the errors of three ranks, of which the last one differs."""
    folder = tmp_path_factory.mktemp("differ") / "reports"
    codes, found, output = run_ranks(3, folder, "distributed_differ.py")
    assert codes == [0, 0, 0], output
    return found


DIFFERENCES = {
    "seed": "the values of parameters",
    "layer": "the names, shapes or dtypes of parameters",
    "shape": "the names, shapes or dtypes of parameters",
    "scale": "the settings of the optimizer or the scaler",
    "interval": "the settings of the optimizer or the scaler",
    "norm": "the settings of the optimizer or the scaler",
    "masters": "the settings of the optimizer or the scaler",
    "optimizer": "the settings of the optimizer or the scaler",
    "decay": "the settings of the optimizer or the scaler",
}


@pytest.mark.parametrize("case", DIFFERENCES)
def test_every_rank_raises_if_one_of_them_differs(found, case):
    for report in found:
        assert f"ValueError: The ranks differ in {DIFFERENCES[case]}" in report[case]


@pytest.mark.parametrize("case", ["nothing", "broadcast", "shards"])
def test_ranks_that_agree_do_not_raise(found, case):
    assert [report[case] for report in found] == [None] * 3
