"""Feed mutated checkpoint trees through convert, and count undocumented errors.

    python tools/fuzz_convert.py --rounds 2000 --seed 1

The fuzzer mutates a valid checkpoint: it replaces, renames, removes, moves and repeats
entries, and makes numbers huge or odd. It converts each tree in both directions, and
prints the traceback of every undocumented error.
"""

import argparse
import random
import sys
import tempfile
import traceback
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.optimizers import Optimizer

from mlx_gradscale.checkpoint.save import capture
from mlx_gradscale.convert.files import Source, write_source
from mlx_gradscale.convert.rows import Options
from mlx_gradscale.convert.run import fill, load, make_plan, unwrap
from mlx_gradscale.torch_checkpoint import Placeholder

EXPECTED = (ValueError, OSError)


class Net(nn.Module):
    """A model with two identical linear layers and a convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)
        self.c = nn.Conv2d(2, 4, 3)


def good_checkpoint() -> dict[str, Any]:
    """Return a valid PyTorch checkpoint of a ``Net`` run."""
    shapes = {"a.weight": (3, 3), "a.bias": (3,), "b.weight": (3, 3), "b.bias": (3,)}
    shapes |= {"c.weight": (4, 2, 3, 3), "c.bias": (4,)}
    model = {name: mx.ones(shape) for name, shape in shapes.items()}
    state = {
        i: {"step": mx.array(3.0), "exp_avg": x * 1, "exp_avg_sq": x * 1}
        for i, x in enumerate(model.values())
    }
    settings = {"lr": 0.1, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1,
                "amsgrad": False, "decoupled_weight_decay": True}  # fmt: skip
    groups = [settings | {"params": [0, 2, 4]}, settings | {"params": [1, 3, 5]}]
    groups[1]["weight_decay"] = 0.0
    scaler = {"scale": 2.0, "growth_factor": 2.0, "backoff_factor": 0.5,
              "growth_interval": 3, "_growth_tracker": 1}  # fmt: skip
    return {
        "model": model,
        "optimizer": {"state": state, "param_groups": groups},
        "scaler": scaler,
        "scheduler": {"last_epoch": 3},
        "epoch": 3,
    }


def odd_values(rng: random.Random) -> Any:
    """Return a random value that is unlikely to be valid."""
    return rng.choice([
        None, True, 0, -1, 1, 2**31, 2**61 - 1, 2**200, 10**400, 1e308, -0.0,
        float("nan"), float("inf"), "", "x", "step", "module." * 50, "a.b.c", b"x",
        [], {}, (), [[]], {"": 1}, {0: 0}, (1, 2), [0.9], {"params": []}, {"step": 3},
        mx.array(1.0), mx.array([1.0]), mx.zeros((0, 3)), mx.zeros((3, 3)),
        mx.array(1j), mx.zeros(3, mx.float16), mx.array(True),
        frozenset({1}), 1j,
        Placeholder("numpy", "float64"),
        Placeholder("os", "system").called(b"R", ("true",)),
    ])  # fmt: skip


def containers(tree: Any) -> list[Any]:
    """Return every dict and list in a tree."""
    found, left = [], [tree]
    while left:
        item = left.pop()
        if isinstance(item, (dict, list)):
            found.append(item)
            left += item.values() if isinstance(item, dict) else item
        elif isinstance(item, tuple):
            left += item
    return found


def mutate(tree: Any, rng: random.Random) -> Any:
    """Return a copy of a tree with one to six random mutations."""
    tree = {"root": copy_tree(tree)}
    for _ in range(rng.choice([1, 1, 1, 2, 3, 6])):
        places = [c for c in containers(tree) if c]
        if not places:
            break
        place = rng.choice(places)
        keys = list(place) if isinstance(place, dict) else list(range(len(place)))
        key = rng.choice(keys)
        action = rng.randrange(7)
        if action == 0:
            del place[key]
        elif action == 1 and isinstance(place, dict):
            place[rng.choice(["x", 0, 7, "state", "a.weight", key])] = place.pop(key)
        elif action == 2:
            place[key] = place[rng.choice(keys)]  # shared
        elif action == 3:
            place[key] = copy_tree(rng.choice(places))
        elif action == 4 and isinstance(place, list):
            place += place
        elif action == 5 and isinstance(place, dict):
            place[rng.choice(["extra", "y", 99])] = odd_values(rng)
        else:
            place[key] = odd_values(rng)
    return tree.get("root")


def copy_tree(value: Any, depth: int = 0) -> Any:
    """Copy the containers of a tree, up to 20 levels deep, but not its leaves."""
    if depth > 20:
        return value
    if isinstance(value, dict):
        return {key: copy_tree(x, depth + 1) for key, x in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(copy_tree(x, depth + 1) for x in value)
    return value


def convert_tree(tree: Any, like: Any, folder: Path) -> None:
    """Convert a tree to MLX in memory, and the run back onto another tree."""
    model = Net()
    run = load(make_plan(Source(tree), model, Options()), model)
    optimizer = run.optimizer or Optimizer()
    plan = make_plan(Source(like), model, Options())
    fill(plan, unwrap(capture(model, optimizer, run.scaler)), ())
    write_source(folder / "out.pt", plan.source)


def fuzz(rounds: int, seed: int, folder: Path) -> Counter[str]:
    """Convert mutated checkpoints, and return the count of each outcome."""
    rng, outcomes = random.Random(seed), Counter[str]()
    warnings.simplefilter("ignore")
    for number in range(rounds):
        good, bad = good_checkpoint(), mutate(good_checkpoint(), rng)
        try:
            # Every fourth tree is damaged only on the way back.
            convert_tree(good if number % 4 == 3 else bad, bad, folder)
            outcome = "converted"
        except EXPECTED as error:
            outcome = type(error).__name__
        except TypeError as error:  # save() cannot write the value
            outcome = "TypeError of save" if "can be saved" in str(error) else "bug"
            if outcome == "bug":
                traceback.print_exc()
        except Exception:
            outcome = "bug"
            traceback.print_exc()
        outcomes[outcome] += 1
    return outcomes


def main() -> int:
    """Run the fuzzer; return 1 if there was a bug."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        outcomes = fuzz(arguments.rounds, arguments.seed, Path(folder))
    print(", ".join(f"{name}: {count}" for name, count in sorted(outcomes.items())))
    return 1 if outcomes["bug"] else 0


if __name__ == "__main__":
    sys.exit(main())
