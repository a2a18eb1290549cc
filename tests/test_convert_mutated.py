"""Run folders with damaged records: one kind of error, or they load."""

import json
import random
import shutil

import mlx.core as mx
import pytest
from convert_helpers import Small, small, usual

from mlx_gradscale import inspect
from mlx_gradscale.convert import (
    RunError,
    description,
    from_torch,
    load_run,
    main,
    read_run,
    save_run,
    to_torch,
    write_run,
)

ODD = [
    None, True, False, 0, 1, -1, 2, 7, 2**31, 2**63, 2**64, 10**400, -(2**70), 0.5,
    -0.0, 1e-320, 1e308, "", "x", "fc.weight", "same", "conv", "Adam", "torch", "..",
    "/etc/passwd", "\ud800", "\0", [], [[]], [0], [None, None], ["fc.weight"], {},
    {"": 0}, {"a": {"b": 1}}, {"$tuple": [1, 2]}, {"$tuple": 3}, {"$section": "model"},
    {"$section": "nothing"}, {"$section": ["x"]}, {"$float": "nan"}, {"$float": "x"},
    {"$float": "inf"}, {"$set": [1, []]}, {"$dict": [[0, 1], [[], 2]]}, {"$dict": [1]},
    {"$dict": [[0, {"exp_avg": 1}]]}, {"$counter": [["a", []]]}, {"$ordered": 3},
    {"$bytes": "?"}, {"$bytes": 3}, {"$complex": ["1"]}, {"$complex": ["1", "2"]},
    {"$tensor": "x"}, {"$tensor": []}, {"$unknown": 1}, {"$array": {}}, {"$array": 1},
    {"$array": {"dtype": "float32", "shape": [2], "data": [1, 2]}},
    {"$array": {"dtype": "float32", "shape": [], "data": [1]}},
    {"$array": {"dtype": "array", "shape": [1], "data": [1]}},
    {"$array": {"dtype": 3, "shape": [1], "data": [1]}},
    {"$array": {"dtype": "uint8", "shape": [10**9], "data": [2**70, "x"]}},
    {"$array": {"dtype": "complex64", "shape": [1], "data": [1]}},
    {"$float64": {"shape": [3], "data": "AAAA"}}, {"$float64": {"shape": "x"}},
]  # fmt: skip


def adam():
    """Two groups that become a MultiOptimizer, a dropped tensor, a tied one."""
    model, _, scaler = small()
    moments = {
        i: {"step": mx.array(3.0), "exp_avg": x, "exp_avg_sq": x * x}
        for i, x in enumerate(model.values())
    }
    common = {"betas": (0.9, 0.99), "eps": 1e-8, "amsgrad": False, "maximize": False}
    groups = [
        {"lr": 0.1 * (i + 1), "weight_decay": 0, "params": [i], **common}
        for i in range(2)
    ]
    model["fc.weight2"] = model["fc.weight"]
    model["bn.num_batches_tracked"] = mx.array(3)
    optimizer = {"state": moments, "param_groups": groups}
    rest = {"epoch": 3, "scheduler": {"last_epoch": 3}, "more": (1, {2: b"x"})}
    return {"model": model, "opt": optimizer, "amp": [scaler], **rest}


def make_runs(folder):
    """Folders as from_torch and as save_run write them, and of a folder of files."""
    for name, checkpoint in (("sgd", usual()), ("adam", adam())):
        run = from_torch(checkpoint)
        write_run(folder / name, run)
        model = Small()
        loaded = load_run(folder / name, model)
        grads = {"fc": {"weight": mx.ones((2, 3)), "bias": mx.ones(2)}}
        loaded.optimizer.update(model, grads)
        saved = folder / f"{name}-saved"
        save_run(saved, model, loaded.optimizer, loaded.scaler, loaded.record)
    model, optimizer, scaler = small()
    index = "pytorch_model.bin.index.json"
    held = dict.fromkeys(model, "pytorch_model-1-of-1.bin")
    optimizer |= {"loss_scaler": scaler, "base_lr": 0.1}
    run = from_torch(
        {index: model, "optimizer.bin": optimizer, "trainer_state.json": {}}
    )
    run.record.is_folder = True
    run.record.shards = {index: {"metadata": {}, "files": held}}
    run.record.carried = {"config.json": mx.arange(40).astype(mx.uint8)}
    write_run(folder / "files", run)
    return ("sgd", "adam", "sgd-saved", "adam-saved", "files")


def places(value, path=()):
    """Every place in a JSON value."""
    yield path
    inner = value.items() if isinstance(value, dict) else ()
    inner = enumerate(value) if isinstance(value, list) else inner
    for key, item in inner:
        yield from places(item, (*path, key))


def mutate(record, rng):
    """One damage: a value replaced, taken out, doubled, or put somewhere else."""
    record = json.loads(json.dumps(record))
    every = [path for path in places(record) if path]
    *path, last = rng.choice(every)
    holder = record
    for key in path:
        holder = holder[key]
    kind = rng.randrange(6)
    if kind < 3:
        holder[last] = rng.choice(ODD)
    elif kind == 3:
        del holder[last]
    elif kind == 4:
        other = record
        for key in rng.choice(every):
            other = other[key]
        holder[last] = json.loads(json.dumps(other))
    elif isinstance(holder, list):
        holder.append(holder[last])
    else:
        holder[rng.choice(["x", "$section", "params", "fc.weight"])] = holder.pop(last)
    return record


def use(run, folder):
    """Everything that reads such a folder; the errors they may raise are sentences."""
    problems = []
    for way in (
        lambda: to_torch(read_run(run)),
        lambda: load_run(run, Small()),
        lambda: inspect.render(inspect.describe(run)),
    ):
        try:
            way()
        except ValueError as error:
            problems.append(error)
    assert all(map(str, problems))
    out = str(folder / "out.pt")
    for flags in (["--dry-run"], []):
        arguments = ["--mlx-path", str(run), "--torch-path", out, "--to", "torch"]
        assert main([*arguments, "--overwrite", *flags]) in (0, 1)
    return problems


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.filterwarnings("ignore:The run was saved with a learning rate schedule")
def test_damaged_records_load_or_are_run_errors(seed, tmp_path, capsys):
    names = make_runs(tmp_path)
    rng, used, refused = random.Random(seed), 0, []
    for number in range(100):
        name = names[number % len(names)]
        training = tmp_path / name / "training.json"
        kept = training.read_text()
        text = json.dumps(mutate(json.loads(kept), rng))
        training.write_text(text)
        try:
            read_run(tmp_path / name)
        except RunError as error:
            refused.append(str(error))
        used += not use(tmp_path / name, tmp_path)
        training.write_text(kept)
        if (tmp_path / "out.pt").is_dir():
            shutil.rmtree(tmp_path / "out.pt")
    said = capsys.readouterr().err
    assert "Traceback" not in said
    # Neither is everything refused, nor anything taken.
    assert all("training.json" in error for error in refused)
    assert len(refused) > 20
    assert used > 10
    assert {p.name for p in tmp_path.iterdir()} <= {*names, "out.pt"}


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors"])
@pytest.mark.parametrize("data", [b"", b"{}", b"\xff" * 100, b"[" * 10_000])
def test_damaged_arrays_are_run_errors(name, data, tmp_path):
    write_run(tmp_path / "run", from_torch(usual()))
    for damaged in (data, (tmp_path / "run" / name).read_bytes()[:-9] + data[:1]):
        (tmp_path / "run" / name).write_bytes(damaged)
        with pytest.raises(RunError, match=name):
            read_run(tmp_path / "run")


@pytest.mark.parametrize("value", [2**200, "x", None, [], -1, True, 1e39, 0])
@pytest.mark.parametrize("key", ["scale", "growth_interval", "_growth_tracker"])
def test_a_damaged_scaler_is_a_run_error(key, value, tmp_path):
    write_run(tmp_path / "run", from_torch(usual()))
    path = tmp_path / "run" / "scaler.json"
    state = json.loads(path.read_text())
    if (key, value) == ("_growth_tracker", 0):
        return
    path.write_text(json.dumps(state | {key: value}))
    with pytest.raises(RunError, match=r"scaler\.json is damaged"):
        read_run(tmp_path / "run")
    path.write_text("{}")
    with pytest.raises(RunError):
        load_run(tmp_path / "run", Small())


VALUES = [
    None, True, 0, -1, 2**63, 10**400, 0.5, float("nan"), float("inf"), "", "x", b"x",
    [], [[]], [0], (), (1, 2, 3), {}, {1: 2}, {"a": 1}, mx.array(1), mx.ones((2, 3)),
    mx.array([1.0, 2.0]), mx.array(True), mx.array(1j), mx.zeros((0,)), set(), 1j,
]  # fmt: skip


def damage(value, rng):
    """One value inside dicts and lists replaced, taken out, doubled or renamed."""
    every = [path for path in places(value) if path]
    *path, last = rng.choice(every)
    holder = value
    for key in path:
        holder = holder[key]
    kind = rng.randrange(4)
    if kind < 2:
        holder[last] = plain_copy(rng.choice(VALUES))
    elif kind == 2:
        del holder[last]
    elif isinstance(holder, dict):
        new = rng.choice(["state", "params", "lr", 3, "betas", "step"])
        holder[new] = holder.pop(last)
    else:
        holder.append(plain_copy(holder[last]))
    return value


def plain_copy(value):
    if isinstance(value, dict):
        return {key: plain_copy(item) for key, item in value.items()}
    return [plain_copy(x) for x in value] if isinstance(value, list) else value


@pytest.mark.parametrize("seed", range(2))
def test_damaged_checkpoints_are_converted_or_value_errors(seed, tmp_path):
    """Those that PyTorch would not write: through the functions and inspect."""
    rng, good = random.Random(seed), 0
    for number in range(300):
        start = plain_copy((usual, adam)[number % 2]())
        checkpoint = damage(damage(start, rng) if number % 3 else start, rng)
        problems = []
        for way in (from_torch, description._describe_torch):
            try:
                way(checkpoint)
            except ValueError as error:
                problems.append(error)
        assert all(map(str, problems))
        good += not problems
    assert good > 50
