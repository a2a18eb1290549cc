"""The optimizers of mlx-optimizers, guarded, beside themselves alone."""

import mlx.core as mx
import mlx.optimizers as optim
import pytest
from support.optimizer_helpers import check_beside_bare
from support.packed_moments import check_resume

theirs = pytest.importorskip("mlx_optimizers", reason="needs the interop extra")


def kron():
    # Its schedule draws from a generator of the class, and its update from MLX's.
    theirs.Kron.rng.seed(0)
    mx.random.seed(0)
    return theirs.Kron(1e-2)


MAKERS = {
    "ADOPT": lambda: theirs.ADOPT(1e-2, weight_decay=0.1, decouple=True),
    "DiffGrad": lambda: theirs.DiffGrad(1e-2),
    "Kron": kron,
    "Lamb": lambda: theirs.Lamb(1e-2),
    "MADGRAD": lambda: theirs.MADGRAD(1e-2),
    "MARS": lambda: theirs.MARS(1e-2),
    "Muon": lambda: theirs.Muon(1e-2, alternate_optimizer=optim.AdamW(1e-2)),
    "QHAdam": lambda: theirs.QHAdam(1e-2, nus=(0.7, 1.0)),
    "Shampoo": lambda: theirs.Shampoo(1e-2, momentum=0.9, update_freq=2),
}


def test_every_optimizer_of_mlx_optimizers_is_tested():
    there = {
        name
        for name, x in vars(theirs).items()
        if isinstance(x, type) and issubclass(x, optim.Optimizer)
    }
    assert there == set(MAKERS)


# Their steps add keys to the state or change Python values in it.
REFUSED_IN_COMPILE = ("ADOPT", "MADGRAD", "QHAdam", "Shampoo")


@pytest.mark.parametrize("bad", [(), (0, 3)], ids=["applied", "skipped"])
@pytest.mark.parametrize("name", MAKERS)
def test_eager_step_of_a_third_party_optimizer_is_exact(name, bad):
    check_beside_bare(MAKERS[name], compiled=False, bad=bad)


# Kron's schedule is Python's random, which a trace of mx.compile draws only once.
@pytest.mark.parametrize("name", [x for x in MAKERS if x != "Kron"])
def test_compiled_step_of_a_third_party_optimizer_is_correct_or_refused(name):
    if name not in REFUSED_IN_COMPILE:
        check_beside_bare(MAKERS[name], compiled=True, bad=(0, 3))
        return
    with pytest.raises(TypeError, match=r"cannot be skipped inside mx\.compile"):
        check_beside_bare(MAKERS[name], compiled=True, bad=())


def test_unsloth_8_bit_adamw_resumes_bit_identically(tmp_path, monkeypatch):
    monkeypatch.setenv("UNSLOTH_ZOO_DISABLE_GPU_INIT", "1")
    packed = pytest.importorskip(
        "unsloth_zoo.mlx.optimizers_quantized", reason="needs unsloth-zoo"
    )
    check_resume(lambda: packed.QuantizedMomentAdamW(1e-2), tmp_path)
