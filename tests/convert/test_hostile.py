"""Checkpoints made to do harm: one error, in bounded time and memory."""

from pathlib import Path

import mlx.core as mx
import pytest
from support.convert_runs import Holder, Small, fails, paths, sgd, small, usual

from mlx_gradscale import torch_checkpoint as pt
from mlx_gradscale.convert import (
    ConvertError,
    Options,
    load_torch,
    main,
)
from mlx_gradscale.convert.optimizers import to_mlx
from mlx_gradscale.convert.save import gather, write_run
from mlx_gradscale.convert.template import make_template
from mlx_gradscale.convert.template_file import TEMPLATE

ROOT = Path(__file__).parents[2]


def small_integers(repeats):
    """Integers in all places that a set tries for the last, which takes it 5 ms."""
    at, found = 0, {}
    for _ in range(29_000):
        found |= dict.fromkeys(range(at, min(at + 10, 2**19)))
        at = (5 * at + 1) % 2**19
    return [*found, *[215_299_489] * repeats]


def equal_hashes(scale):
    """Optimizers whose paths in the checkpoint have the same hash."""
    keys = [i * (2**61 - 1) for i in range(700 * scale)]
    return {k: {j: {"param_groups": []} for j in keys[:50]} for k in keys}


def bombs(scale=1):
    """Functions that make checkpoints on which a careless loop would spend hours."""
    model, many_names = dict(small()[0]), [f"p{i}" for i in range(20_000 * scale)]
    half = len(many_names) // 2
    tiny = {"state": {}, "param_groups": []}

    def colliding(count):
        return [i * (2**61 - 1) for i in range(count)]

    def many(*groups):
        optimizer = {"state": {}, "param_groups": list(groups)}
        return {"model": {n: mx.zeros(1) for n in many_names}, "optimizer": optimizer}

    def indexed(indices):
        groups = [sgd(indices)]
        return {"model": model, "optimizer": tiny | {"param_groups": groups}}

    def shared():
        found = {"x": "text"}
        for _ in range(100):  # 2**100 paths to one leaf
            found = {"a": found, "b": found}
        return found

    def flat():
        names = (f"param_groups.p{i}.odd" for i in range(2000 * scale))
        return {name: list(range(500 // scale)) for name in names}

    long = "ema_" * 100_000 * scale
    return {
        "colliding indices": lambda: indexed(colliding(50_000 * scale)),
        "small integers that collide": lambda: indexed(small_integers(20_000 * scale)),
        "colliding keys of the state": lambda: {
            "model": model,
            "optimizer": {"state": dict.fromkeys(colliding(300)),
                          "param_groups": [sgd([0, 1])]},
        },
        "paths of equal hash": lambda: {"model": model, "rest": equal_hashes(scale)},
        "models times optimizers": lambda: {
            "models": [dict(model) for _ in range(5000 * scale)],
            "optimizers": [dict(tiny) for _ in range(5000 * scale)],
        },
        "every order fits": lambda: many(
            sgd(list(range(half))), sgd(list(range(half, 2 * half)), lr=0.5)
        ),
        "every subset fits": lambda: many(sgd(list(range(half)))),
        "a thousand groups": lambda: many(*(sgd([i]) for i in range(1000 * scale))),
        "flat groups of long lists": lambda: {"model": model, "optimizer": flat()},
        "long names": lambda: {
            "model": {long: mx.zeros(2), **model}, long: dict(model),
        },
        "names that no model has": lambda: {
            "model": model
            | {f"{n}.num_batches_tracked": mx.zeros(1) for n in many_names[:half]}
            | {f"lost_{n}": mx.zeros(1) for n in many_names[:half]},
        },
        "containers that are shared": lambda: {"model": model, "rest": shared()},
        "many moments in no section": lambda: {
            "model": model, "optimizer": small()[1],
            "loose": [{"exp_avg": i} for i in range(50_000 * scale)],
        },
    }  # fmt: skip


def attempt(checkpoint):
    """Convert a checkpoint, and return the error."""
    try:
        tensors = checkpoint.get("model", small()[0])
        model = Holder({n: x for n, x in tensors.items() if not n.startswith("lost")})
        template, _ = make_template(checkpoint, model, Options())
        tensors = template.tensors()
        to_mlx(template.groups, tensors)
        run = gather(Holder(template.plan.to_mlx(tensors)))
        write_run("out.pt", template, run, dry_run=True)
    except ConvertError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (("optimizer", "state", 0), 3),
        (("optimizer", "state", 9), {}),
        (("optimizer", "state", 0, "momentum_buffer"), "x"),
        (("optimizer", "state", 0, "step"), float("nan")),
        (("optimizer", "state", 0, "step"), 1e300),
        (("optimizer", "param_groups", 0, "lr"), "fast"),
        (("optimizer", "param_groups", 0, "lr"), 10**400),
        (("optimizer", "param_groups", 0, "params"), [0, 0]),
        (("optimizer", "param_groups", 0, "params"), [0, "a"]),
        (("optimizer", "param_groups", 0, "params"), [0, -1]),
        (("optimizer", "param_groups", 0, 7), 7),
        (("optimizer", "param_groups", 0, "param_names"), 7),
        (("scaler", "scale"), float("nan")),
        (("scaler", "growth_interval"), 2**200),
    ],
)
def test_damaged_value_in_a_checkpoint_is_named_in_the_error(place, value, tmp_path):
    checkpoint = usual()
    container = checkpoint
    for key in place[:-1]:
        container = container[key]
    container[place[-1]] = value
    pt.save(tmp_path / "a.pt", checkpoint)
    with pytest.raises(ValueError, match=r"damaged|must be|scale|growth"):
        load_torch(tmp_path / "a.pt", Small())


def test_damaged_template_is_an_error_and_writes_nothing(tmp_path, capsys):
    assert main(paths(tmp_path, usual())) == 0
    held = pt.load(tmp_path / "run" / TEMPLATE)
    where = ["--torch-path", f"{tmp_path}/b.pt", "--mlx-path", f"{tmp_path}/run"]
    for key, value in (
        ("entries", {"fc.weight": ("evil", ("fc.weight",))}),
        ("entries", {"fc.weight": ("conv", ())}),
        ("entries", {"evil": ("same", ("fc.weight",))}),
        ("entries", None),
        ("tied", {"a": "evil"}),
        ("keys", {"model": "nothing"}),
        ("keys", {"optimizer": 7}),
        ("names", []),
        ("names", ["fc.weight", "fc.evil"]),
        ("optimizer", "Sophia"),
        ("files", {"a.txt": None}),
        ("files", {}),
        ("checkpoint", None),
    ):
        pt.save(tmp_path / "run" / TEMPLATE, held | {key: value})
        assert "template" in fails(capsys, *where)
        assert not (tmp_path / "b.pt").exists()
