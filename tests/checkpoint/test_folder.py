"""The folder of a run: the newest checkpoints stay, damage is found."""

import contextlib
import json
import os
import zlib
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import pytest
from support.checkpoint_runs import KINDS
from support.checkpoint_writers import small
from support.helpers import bits

from mlx_gradscale import (
    GradScaler,
    LossScaleOptimizer,
    restore_checkpoint,
    save_checkpoint,
)
from mlx_gradscale.checkpoint import latest_checkpoint, read_checkpoint

FILES = [
    "checksums.json",
    "model.safetensors",
    "training.json",
    "training.safetensors",
]


def step_in(folder):
    return restore_checkpoint(folder, *small())["step"]


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def save_steps(run, *steps, keep=1):
    for step in steps:
        save_checkpoint(run, *small(step), keep=keep, step=step)


def test_only_the_newest_checkpoints_are_kept(tmp_path):
    run = tmp_path / "deep" / "run"
    save_steps(run, 0, 1, 2, 3, 4, keep=3)
    assert names(run) == ["save-000003", "save-000004", "save-000005"]
    assert [step_in(run / name) for name in names(run)] == [2, 3, 4]
    assert step_in(run) == 4
    assert latest_checkpoint(run) == run / "save-000005"
    save_steps(run, 5)
    assert names(run) == ["save-000006"]
    assert names(run / "save-000006") == FILES


def test_checkpoint_numbers_beyond_six_digits_sort_numerically(tmp_path):
    save_steps(tmp_path, 0)
    (tmp_path / "save-000001").rename(tmp_path / "save-999999")
    save_steps(tmp_path, 1, 2, keep=2)
    assert names(tmp_path) == ["save-1000000", "save-1000001"]
    assert step_in(tmp_path) == 2


def test_single_checkpoint_is_not_mistaken_for_the_folder_of_a_run(tmp_path):
    save_steps(tmp_path, 0)
    newest = latest_checkpoint(tmp_path)
    with pytest.raises(ValueError, match="is a single checkpoint"):
        save_steps(newest, 1)
    assert names(newest) == FILES
    assert step_in(tmp_path) == 0


def save_with(name):
    """Return a function that adds a file to a checkpoint, and lists its files."""

    def add(run):
        save_steps(run, -1)
        save = latest_checkpoint(run)
        (save / name).parent.mkdir(exist_ok=True)
        (save / name).write_bytes(b"mine")
        return [path for path in save.rglob("*") if path.is_file()]

    return add


def foreign_folder(run):
    folder = run / "save-000009"
    folder.mkdir(parents=True)
    (folder / "checksums.json").write_text('{"notes.txt": 1}')
    return [folder / "checksums.json"]


def other_names(run):
    run.mkdir()
    for name in ("training.json", "model.safetensors", "save-2", "save-000002"):
        (run / name).write_text("mine")
    files = [*run.iterdir()]
    (run / "save-000004").symlink_to("nowhere")
    return files


THEIRS = [foreign_folder, other_names]
THEIRS += [save_with("config.json"), save_with("fused/model.safetensors")]


@pytest.mark.parametrize("add", THEIRS)
def test_save_never_removes_what_no_save_has_written(add, tmp_path):
    run = tmp_path / "run"
    theirs = {path: path.read_bytes() for path in add(run)}
    before = names(run)
    save_steps(run, 0, 1, 2)
    assert {path: path.read_bytes() for path in theirs} == theirs
    assert step_in(run) == 2
    (new,) = {*names(run)} - {*before}
    assert new > max(["", *(name for name in before if "save-0" in name)])


def test_folder_of_the_user_does_not_hide_that_there_is_no_checkpoint(tmp_path):
    foreign_folder(tmp_path)
    with pytest.raises(ValueError, match=r"Cannot read .*save-000009"):
        step_in(tmp_path)


def test_files_that_a_file_browser_adds_do_not_keep_a_checkpoint(tmp_path):
    save_steps(tmp_path, 0)
    (latest_checkpoint(tmp_path) / ".DS_Store").write_bytes(b"")
    save_steps(tmp_path, 1)
    assert names(tmp_path) == ["save-000002"]


def test_checkpoint_can_be_read_without_a_model(tmp_path):
    model = nn.Linear(2, 2)
    model.set_dtype(mx.float16)
    optimizer = LossScaleOptimizer(optim.AdamW(1e-3), GradScaler(64.0))
    save_checkpoint(tmp_path, model, optimizer, step=3)
    found = read_checkpoint(tmp_path)
    assert bits(found.weights) == bits(model.parameters())
    assert found.extra == {"step": 3}
    assert found.scaler["scale"] == 64.0
    assert bits(found.optimizer["masters.bias"]) == bits(model.bias.astype(mx.float32))
    classes = [row["class"] for row in found.description["settings"]]
    assert classes == ["LossScaleOptimizer", "AdamW"]


def replace_by_pipe(file):
    file.unlink()
    os.mkfifo(file)


DAMAGES = {
    "cut": (lambda file: file.write_bytes(file.read_bytes()[:-9]), ""),
    "removed": (Path.unlink, "No such file"),
    "pipe": (replace_by_pipe, "is not a regular file"),
}


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("kind", DAMAGES)
def test_damaged_checkpoint_is_an_error_and_never_stops_the_next_save(
    name, kind, tmp_path
):
    save_steps(tmp_path, 0, 1, keep=2)
    damage, reason = DAMAGES[kind]
    damage(latest_checkpoint(tmp_path) / name)
    model, optimizer = small(7.0)
    match = f"Cannot read .*{reason}.* older checkpoint, .*pass its path"
    with pytest.raises(ValueError, match=match):
        restore_checkpoint(tmp_path, model, optimizer)
    assert model.weight.tolist() == [[7, 7], [7, 7]]
    assert step_in(tmp_path / "save-000001") == 0
    save_steps(tmp_path, 2)
    assert names(tmp_path / "save-000003") == FILES
    assert step_in(tmp_path) == 2


@pytest.mark.parametrize("name", FILES)
def test_every_flipped_bit_is_an_error(name, tmp_path):
    save_steps(tmp_path, 1)
    file = latest_checkpoint(tmp_path) / name
    data = file.read_bytes()
    step = max(1, len(data) // 150)
    for position in range(0, len(data), step):
        flipped = bytearray(data)
        flipped[position] ^= 1 << position % 8
        file.write_bytes(flipped)
        with pytest.raises(ValueError, match="Cannot read"):
            step_in(tmp_path)
    file.write_bytes(data)
    assert step_in(tmp_path) == 1


def test_links_to_files_and_checkpoints_are_read_but_never_removed(tmp_path):
    run, outside = tmp_path / "run", tmp_path / "outside"
    save_steps(outside, 1)
    run.mkdir()
    linked = run / "save-000001"
    linked.mkdir()
    for name in FILES:  # as in the cache of a hub
        (linked / name).symlink_to(outside / "save-000001" / name)
    assert step_in(run) == 1
    save_steps(run, 2, 3)
    (run / "save-000004").symlink_to(outside / "save-000001")
    assert step_in(run) == 1
    save_steps(run, 4)
    assert names(run) == ["save-000004", "save-000005"]
    (tmp_path / "alias").symlink_to(run)
    assert step_in(tmp_path / "alias") == 4
    assert step_in(outside) == 1


def test_checkpoint_path_that_is_a_file_is_refused(tmp_path):
    (tmp_path / "run").write_text("mine")
    with pytest.raises(FileExistsError, match="run"):
        save_steps(tmp_path / "run", 0)
    with pytest.raises(FileNotFoundError, match="There is no checkpoint"):
        step_in(tmp_path / "run")
    assert (tmp_path / "run").read_text() == "mine"


def lora():
    lora = pytest.importorskip("mlx_lm.tuner.lora", reason="mlx-lm is not installed")
    mx.random.seed(4)
    model = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm(64), nn.Linear(64, 1))
    model.set_dtype(mx.float16)
    nn.quantize(model, class_predicate=lambda path, _: path == "layers.0")
    model.freeze()
    model.layers[0] = lora.LoRALinear.from_base(model.layers[0], r=4)
    model.layers[0].lora_a = model.layers[0].lora_a.astype(mx.float16)
    model.layers[0].lora_b = model.layers[0].lora_b.astype(mx.float16)
    return model, LossScaleOptimizer(optim.AdamW(1e-2), GradScaler(init_scale=64.0))


def adapt(model, optimizer, steps, width=64):
    def loss_fn(x):
        return mx.mean(mx.square(model(x).astype(mx.float32) - 1))

    value_and_grad = optimizer.value_and_grad(model, loss_fn)
    losses = []
    for i in steps:
        x = mx.random.normal((4, width), key=mx.random.key(i)).astype(mx.float16)
        loss, grads = value_and_grad(x)
        optimizer.update(model, grads)
        losses.append(loss.item())
    return losses


@pytest.mark.filterwarnings("ignore:.*computes in float32")
def test_lora_checkpoint_holds_adapters_and_needs_the_same_base_model(tmp_path):
    model, optimizer = lora()
    adapt(model, optimizer, range(3))
    save_checkpoint(tmp_path / "run", model, optimizer)
    adapters = {"layers.0.lora_a", "layers.0.lora_b"}
    statistics = {"layers.1.running_mean", "layers.1.running_var"}
    assert read_checkpoint(tmp_path / "run").weights.keys() == adapters | statistics
    save_checkpoint(tmp_path / "all", model, optimizer, frozen=True)
    expected = adapt(model, optimizer, range(3, 6))
    for folder in ("run", "all"):
        other = lora()
        restore_checkpoint(tmp_path / folder, *other)
        assert adapt(*other, range(3, 6)) == expected
        assert bits(other[0].parameters()) == bits(model.parameters())

    other = lora()
    other[0].layers[2].weight = other[0].layers[2].weight + 1
    before = bits([other[0].parameters(), other[1].state])
    with pytest.raises(ValueError, match=r"frozen parameter layers\.2\.weight is not"):
        restore_checkpoint(tmp_path / "run", *other)
    assert bits([other[0].parameters(), other[1].state]) == before
    restore_checkpoint(tmp_path / "all", *other)
    assert adapt(*other, range(3, 6)) == expected


def rewrite(folder, change):
    """Edit training.json, with a checksum that matches: not damage but malice."""
    path, checksums = folder / "training.json", folder / "checksums.json"
    content = json.loads(path.read_text())
    new = change(content)
    path.write_bytes(json.dumps(content).encode() if new is None else new)
    found = json.loads(checksums.read_text())
    found["training.json"] = zlib.crc32(path.read_bytes())
    checksums.write_text(json.dumps(found))


def put(*path):
    *parents, last, value = path

    def change(run):
        for key in parents:
            run = run[key]
        run[last] = value

    return change


LONG = "\x1b[2J" + "x" * 10**6
HOSTILE = {
    "no settings": put("settings", None),
    "a list": lambda run: b"[1]",
    "another version": lambda run: b'{"format": "mlx_gradscale", "version": 2}',
    "no content": lambda run: b'{"format": "mlx_gradscale", "version": 1}',
    "a deep nest": lambda run: b"[" * 10**5,
    "a long text": lambda run: b" " * 2**24 + b"{}",
    "long names": put("frozen", LONG, "float32 (2,) 00000000"),
    "long class": put("settings", 0, "class", LONG),
    "frozen of no dtype": put("frozen", "layers.0.bias", LONG),
    "keys of another dtype": put("random", {"array": "optimizer.step"}),
    "keys of another shape": put("random", {"array": "optimizer.layers.0.weight.m"}),
    "extra is a number": put("extra", 7),
    "extra of no array": put("extra", {"step": {"array": "none"}}),
    "state is a list": put("optimizer", [1]),
    "number for an array": put("optimizer", "layers.0.weight.m", 1),
    "scale is text": put("scaler", {"scale": LONG}),
    "number is text": put("optimizer", "text", "text"),
    "number is a nest": put("optimizer", "nest", [[1]]),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_checkpoint_text_is_a_short_error_and_changes_nothing(kind, tmp_path):
    run = KINDS["GradScaler" if "scale" in kind else "AdamW"]()
    run.optimizer.init(run.model.trainable_parameters())
    save_checkpoint(tmp_path, *run.parts, step=1)
    rewrite(latest_checkpoint(tmp_path), HOSTILE[kind])
    before = run.fingerprint()
    with pytest.raises(ValueError, match=r"Cannot re(ad|store)") as caught:
        restore_checkpoint(tmp_path, *run.parts)
    assert len(str(caught.value)) < 900
    assert "\x1b" not in str(caught.value)
    assert run.fingerprint() == before
    with contextlib.suppress(ValueError):
        read_checkpoint(tmp_path)  # which does not look at all of it
