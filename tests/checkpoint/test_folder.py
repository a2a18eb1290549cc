"""The folder of a run: the newest checkpoints stay, damage is found."""

import contextlib
import functools
import json
import operator
import os
import zlib
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import pytest
from mlx.utils import tree_flatten
from support.checkpoint_runs import KINDS, Run, half, scaler
from support.checkpoint_writers import names, save_steps, small, step_in
from support.helpers import bits

from mlx_gradscale import LossScaleOptimizer, restore_checkpoint, save_checkpoint
from mlx_gradscale.checkpoint import latest_checkpoint, read_checkpoint

FILES = ["checksums.json", "model.safetensors", "training.json", "training.safetensors"]
ALL_FILES = pytest.mark.parametrize("name", FILES)


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


def test_path_that_is_a_single_checkpoint_or_a_file_is_not_saved_to(tmp_path):
    save_steps(tmp_path / "run", 0)
    with pytest.raises(ValueError, match="is a single checkpoint"):
        save_steps(latest_checkpoint(tmp_path / "run"), 1)
    assert names(tmp_path / "run" / "save-000001") == FILES
    (tmp_path / "file").write_text("mine")
    with pytest.raises(FileExistsError, match="file"):
        save_steps(tmp_path / "file", 0)
    with pytest.raises(FileNotFoundError, match="There is no checkpoint"):
        step_in(tmp_path / "file")
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize(
    ("theirs", "left"),
    [
        (["save-000001/config.json"], ["save-000001", "save-000003"]),
        (["save-000001/fused/model.safetensors"], ["save-000001", "save-000003"]),
        (["save-000009/checksums.json"], ["save-000009", "save-000011"]),
        (["save-000002", "save-2"], ["save-000002", "save-000004", "save-2"]),
    ],
)
def test_save_never_removes_what_no_save_has_written(theirs, left, tmp_path):
    save_steps(tmp_path, -1)
    for name in theirs:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("mine")
    save_steps(tmp_path, 0, 1)
    assert names(tmp_path) == left
    assert {(tmp_path / name).read_text() for name in theirs} == {"mine"}
    assert step_in(tmp_path) == 1
    if "save-000001" in left:
        assert step_in(tmp_path / "save-000001") == -1


def test_folder_of_the_user_does_not_hide_that_there_is_no_checkpoint(tmp_path):
    (tmp_path / "save-000009").mkdir()
    with pytest.raises(ValueError, match=r"Cannot read .*save-000009"):
        step_in(tmp_path)


def test_files_that_a_file_browser_adds_do_not_keep_a_checkpoint(tmp_path):
    save_steps(tmp_path, 0)
    (latest_checkpoint(tmp_path) / ".DS_Store").write_bytes(b"")
    save_steps(tmp_path, 1)
    assert names(tmp_path) == ["save-000002"]


def test_links_to_files_and_checkpoints_are_read_but_never_removed(tmp_path):
    run, outside = tmp_path / "run", tmp_path / "outside"
    save_steps(outside, 1)
    linked = run / "save-000001"
    linked.mkdir(parents=True)
    for name in FILES:  # as in the cache of a hub
        (linked / name).symlink_to(outside / "save-000001" / name)
    assert step_in(run) == 1
    save_steps(run, 2, 3)
    (run / "save-000004").symlink_to(outside / "save-000001")
    assert step_in(run) == 1
    (run / "save-000005").symlink_to("nowhere")
    assert step_in(run) == 1
    save_steps(run, 4)
    assert names(run) == ["save-000004", "save-000005", "save-000006"]
    (tmp_path / "alias").symlink_to(run)
    assert step_in(tmp_path / "alias") == 4
    assert step_in(outside) == 1


def test_checkpoint_can_be_read_without_a_model(tmp_path):
    run = half(optim.AdamW(1e-3))
    save_checkpoint(tmp_path, *run.parts, step=3)
    found = read_checkpoint(tmp_path)
    assert bits(found.weights) == bits(dict(tree_flatten(run.model.parameters())))
    assert found.extra == {"step": 3}
    assert found.scaler["scale"] == run.optimizer.scaler.get_scale()
    bias = run.model.layers[0].bias.astype(mx.float32)
    assert bits(found.optimizer["masters.layers.0.bias"]) == bits(bias)
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


@ALL_FILES
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


@ALL_FILES
def test_every_flipped_bit_is_an_error(name, tmp_path):
    save_steps(tmp_path, 1)
    file = latest_checkpoint(tmp_path) / name
    data = file.read_bytes()
    for position in range(0, len(data), max(1, len(data) // 150)):
        flipped = bytearray(data)
        flipped[position] ^= 1 << position % 8
        file.write_bytes(flipped)
        with pytest.raises(ValueError, match="Cannot read"):
            step_in(tmp_path)
    file.write_bytes(data)
    assert step_in(tmp_path) == 1


class Wide(nn.Sequential):
    """A quantized layer with adapters, for batches of 8 columns."""

    def __init__(self):
        lora = pytest.importorskip("mlx_lm.tuner.lora", reason="no mlx-lm")
        mx.random.seed(4)
        super().__init__(nn.Linear(64, 64), nn.BatchNorm(64), nn.Linear(64, 1))
        nn.quantize(self, class_predicate=lambda path, _: path == "layers.0")
        self.freeze()
        self.layers[0] = lora.LoRALinear.from_base(self.layers[0], r=4)
        self.set_dtype(mx.float16)

    def __call__(self, x):
        return super().__call__(mx.tile(x, (1, 8)))


def adapted():
    optimizer = LossScaleOptimizer(optim.AdamW(1e-2), scaler())
    return Run(optimizer, dtype=mx.float16, model=Wide())


@pytest.mark.filterwarnings("ignore:.*computes in float32")
def test_lora_checkpoint_holds_adapters_and_needs_the_same_base_model(tmp_path):
    run = adapted()
    run.train(0, 3)
    save_checkpoint(tmp_path / "run", *run.parts)
    adapters = {"layers.0.lora_a", "layers.0.lora_b"}
    statistics = {"layers.1.running_mean", "layers.1.running_var"}
    assert read_checkpoint(tmp_path / "run").weights.keys() == adapters | statistics
    save_checkpoint(tmp_path / "all", *run.parts, frozen=True)
    expected = run.train(3, 6)
    for folder in ("run", "all"):
        other = adapted()
        restore_checkpoint(tmp_path / folder, *other.parts)
        assert other.train(3, 6) == expected

    other = adapted()
    other.model.layers[2].weight += 1
    before = other.fingerprint()
    with pytest.raises(ValueError, match=r"frozen parameter layers\.2\.weight is not"):
        restore_checkpoint(tmp_path / "run", *other.parts)
    assert other.fingerprint() == before
    restore_checkpoint(tmp_path / "all", *other.parts)
    assert other.train(3, 6) == expected


LONG = "\x1b[2J" + "x" * 10**6
# The text itself, or the keys of a value and its replacement.
HOSTILE = {
    "a list": b"[1]",
    "another version": b'{"format": "mlx_gradscale", "version": 2}',
    "no content": b'{"format": "mlx_gradscale", "version": 1}',
    "a deep nest": b"[" * 10**5,
    "a long text": b" " * 2**24 + b"{}",
    "no settings": ("settings", None),
    "long names": ("frozen", LONG, "float32 (2,) 00000000"),
    "long class": ("settings", 0, "class", LONG),
    "frozen of no dtype": ("frozen", "layers.0.bias", LONG),
    "keys of another shape": ("random", {"array": "optimizer.step"}),
    "keys of another dtype": ("random", {"array": "optimizer.layers.0.weight.m"}),
    "extra is a number": ("extra", 7),
    "extra of no array": ("extra", {"step": {"array": "none"}}),
    "state is a list": ("optimizer", [1]),
    "number for an array": ("optimizer", "layers.0.weight.m", 1),
    "scale is text": ("scaler", {"scale": LONG}),
    "number is text": ("optimizer", "text", "text"),
    "number is a nest": ("optimizer", "nest", [[1]]),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_checkpoint_text_is_a_short_error_and_changes_nothing(kind, tmp_path):
    run = KINDS["GradScaler" if "scale" in kind else "AdamW"]()
    run.optimizer.init(run.model.trainable_parameters())
    save_checkpoint(tmp_path, *run.parts, step=1)
    text, checksums = (
        latest_checkpoint(tmp_path) / name for name in ("training.json", FILES[0])
    )
    content = HOSTILE[kind]
    if isinstance(content, tuple):
        *keys, last, value = content
        saved = json.loads(text.read_text())
        functools.reduce(operator.getitem, keys, saved)[last] = value
        content = json.dumps(saved).encode()
    text.write_bytes(content)
    found = json.loads(checksums.read_text()) | {text.name: zlib.crc32(content)}
    checksums.write_text(json.dumps(found))
    before = run.fingerprint()
    with pytest.raises(ValueError, match=r"Cannot re(ad|store)") as caught:
        restore_checkpoint(tmp_path, *run.parts)
    assert len(str(caught.value)) < 900
    assert "\x1b" not in str(caught.value)
    assert run.fingerprint() == before
    with contextlib.suppress(ValueError):
        read_checkpoint(tmp_path)  # which does not look at all of it
