"""The folder of a checkpoint: whole or not there, kept, in the background, hostile."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
import pytest
from convert_helpers import usual
from helpers import bits
from mlx_gradscale.checkpoint.checksum import checksum
from support.checkpoint_runs import KINDS

from mlx_gradscale import (
    GradScaler,
    LossScaleOptimizer,
    restore_checkpoint,
    save_checkpoint,
    torch_checkpoint,
)
from mlx_gradscale.convert import load_run, main, read_run, save_run
from mlx_gradscale.inspect import describe


@pytest.fixture(autouse=True)
def _not_compiled():
    mx.disable_compile()
    yield
    mx.enable_compile()


def small(value=0.0):
    model = nn.Linear(2, 2)
    model.weight = mx.full((2, 2), value)
    return model, optim.SGD(0.1)


def step_in(folder):
    return restore_checkpoint(folder, *small())["step"]


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_keep_the_last_ones(tmp_path):
    run = tmp_path / "run"
    for step in range(5):
        save_checkpoint(run, *small(), keep=3, step=step)
    assert names(tmp_path) == ["run", "run.earlier-1", "run.earlier-2"]
    folders = [run, tmp_path / "run.earlier-1", tmp_path / "run.earlier-2"]
    assert [step_in(folder) for folder in folders] == [4, 3, 2]
    save_checkpoint(run, *small(), keep=2, step=5)
    assert names(tmp_path) == ["run", "run.earlier-1"]
    assert [step_in(folder) for folder in folders[:2]] == [5, 4]
    save_checkpoint(run, *small(), step=6)
    assert names(tmp_path) == ["run"]


def test_what_is_not_ours_stays(tmp_path):
    run = tmp_path / "run"
    save_checkpoint(run, *small(), step=0)
    (run / "notes.txt").write_text("mine")
    save_checkpoint(run, *small(), keep=2, step=1)
    assert (run / "notes.txt").read_text() == "mine"
    other = tmp_path / "run.earlier-1" / "x"
    (tmp_path / "run.earlier-1" / "training.json").write_text("{}")
    other.write_text("mine")
    with pytest.raises(FileExistsError, match=r"earlier-1 is there and is no check"):
        save_checkpoint(run, *small(), keep=2, step=2)
    save_checkpoint(run, *small(), step=2)
    assert other.read_text() == "mine"
    assert step_in(run) == 2


def test_a_model_that_is_no_checkpoint_is_not_replaced(tmp_path):
    mx.save_safetensors(str(tmp_path / "model.safetensors"), {"w": mx.ones(2)})
    with pytest.raises(FileExistsError, match=r"holds model\.safetensors that no"):
        save_checkpoint(tmp_path, *small())
    assert names(tmp_path) == ["model.safetensors"]


KILLED = """
import os, signal, sys
from pathlib import Path
import mlx.core as mx
sys.path.insert(0, sys.argv[3])
from test_checkpoint_folder import save_checkpoint, small

calls = []

def deadly(function):
    def call(*args, **kwargs):
        calls.append(function)
        if len(calls) == int(sys.argv[2]):
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*args, **kwargs)
    return call

Path.rename, os.link = deadly(Path.rename), deadly(os.link)
save_checkpoint(sys.argv[1], *small(), keep=3, step=9)
"""


@pytest.mark.parametrize("at", [1, 2, 4, 5])
def test_a_kill_finds_a_whole_checkpoint_and_the_ones_before(at, tmp_path):
    run = tmp_path / "run"
    for step in (0, 1, 2):
        save_checkpoint(run, *small(), keep=3, step=step)
    command = [
        sys.executable,
        "-c",
        KILLED,
        str(run),
        str(at),
        str(Path(__file__).parent),
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert step_in(run) == 2
    kept = [path for path in tmp_path.iterdir() if "earlier" in path.name]
    kept = [step_in(path) for path in kept if not path.name.startswith(".")]
    assert 1 in kept
    save_checkpoint(run, *small(), keep=3, step=10)
    assert step_in(run) == 10
    assert step_in(tmp_path / "run.earlier-1") == 2


def test_in_the_background_it_is_the_run_of_the_call(tmp_path):
    model, optimizer = small(1.0)
    position = [1]
    save_checkpoint(
        tmp_path / "run", model, optimizer, background=True, position=position
    )
    model.weight += 1  # in place, as MLX has it
    model.bias = mx.zeros(2) + 7
    position.append(2)
    other = small(5.0)
    assert restore_checkpoint(tmp_path / "run", *other) == {"position": [1]}
    assert other[0].weight.tolist() == [[1, 1], [1, 1]]
    assert 7 not in other[0].bias.tolist()


def test_an_error_in_the_background_is_raised_at_the_next_call_once(tmp_path):
    run = tmp_path / "run"
    save_checkpoint(run, *small(), step=0)
    (tmp_path / "run.earlier-1").mkdir()
    for next_call in (
        lambda: save_checkpoint(run, *small(), step=2),
        lambda: restore_checkpoint(run, *small()),
    ):
        save_checkpoint(run, *small(), keep=2, background=True, step=1)
        with pytest.raises(FileExistsError, match="is no checkpoint"):
            next_call()
        assert step_in(run) == 0


def test_an_error_that_nobody_asks_for_is_printed_at_the_end(tmp_path):
    code = (
        "import sys; from test_checkpoint_folder import save_checkpoint, small;"
        "save_checkpoint(sys.argv[1], *small());"
        "save_checkpoint(sys.argv[1], *small(), keep=2, background=True)"
    )
    (tmp_path / "run.earlier-1").mkdir()
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "run")],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
    )
    assert "The last save in the background failed:" in done.stderr
    assert "FileExistsError" in done.stderr


def test_nothing_is_copied_for_the_background(tmp_path):
    # What is held is the model's own memory: 2**22 bytes once, not twice.
    model = nn.Linear(1024, 1024, bias=False)
    optimizer = optim.SGD(0.1)
    mx.eval(model.parameters(), optimizer.state)
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    save_checkpoint(tmp_path / "run", model, optimizer, background=True)
    held = mx.get_peak_memory() - before
    restore_checkpoint(tmp_path / "run", model, optimizer)
    assert held < 2**20


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
        loss, grads = value_and_grad(
            mx.random.normal((4, width), key=mx.random.key(i)).astype(mx.float16)
        )
        optimizer.update(model, grads)
        losses.append(loss.item())
    return losses


@pytest.mark.filterwarnings("ignore:.*computes in float32")
def test_of_a_lora_model_only_the_adapters(tmp_path):
    model, optimizer = lora()
    adapt(model, optimizer, range(3))
    save_checkpoint(tmp_path / "run", model, optimizer)
    weights = read_run(tmp_path / "run").weights
    adapters = {"layers.0.lora_a", "layers.0.lora_b"}
    statistics = {"layers.1.running_mean", "layers.1.running_var"}
    assert weights.keys() == adapters | statistics
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
    with pytest.raises(ValueError, match=r"layers\.2\.weight is frozen and was not"):
        restore_checkpoint(tmp_path / "run", *other)
    assert bits([other[0].parameters(), other[1].state]) == before
    restore_checkpoint(tmp_path / "all", *other)
    assert adapt(*other, range(3, 6)) == expected


def test_a_checksum_sees_every_bit_and_order():
    x = mx.arange(5000, dtype=mx.float32)
    seen = {
        checksum(x),
        checksum(x[::-1]),
        checksum(x.astype(mx.int32)),
        checksum(x[1:]),
    }
    for position in (0, 2500, 4999):
        for bit in (0, 31):
            words = np.array(x.view(mx.uint32))
            words[position] ^= np.uint32(1 << bit)
            seen.add(checksum(mx.array(words).view(mx.float32)))
    seen |= {checksum(mx.zeros(n, t)) for n in (1, 2, 3) for t in (mx.uint8, mx.uint16)}
    assert len(seen) == 4 + 6 + 3  # zeros of one byte or two are zeros
    for dtype in (mx.bool_, mx.bfloat16, mx.uint64, mx.complex64):
        assert len(checksum(mx.ones((2, 3), dtype))) == 16
    assert checksum(mx.array(1.0)) == checksum(mx.array([1.0]))
    assert checksum(mx.zeros((0, 3))) == "0" * 16


def test_pieces_of_a_long_array_count_by_their_place(monkeypatch):
    from mlx_gradscale.checkpoint import checksum as module

    x = mx.random.normal((1000,))
    whole = checksum(x)
    monkeypatch.setattr(module, "_PIECE", 64)
    assert checksum(x) == whole


class Fc(nn.Module):
    """The model of the usual checkpoint."""

    def __init__(self, dtype=mx.float32):
        super().__init__()
        self.fc = nn.Linear(*reversed(usual()["model"]["fc.weight"].shape))
        self.set_dtype(dtype)

    def __call__(self, x):
        return self.fc(x)


@pytest.mark.filterwarnings("ignore:.*computes in float32")
def test_such_a_run_goes_to_pytorch(tmp_path, capsys):
    torch_checkpoint.save(tmp_path / "pattern.pt", usual())
    optimizer = LossScaleOptimizer(optim.SGD(0.1, momentum=0.9), GradScaler(512.0))
    model = Fc(mx.float16)
    adapt(model, optimizer, [0], width=model.fc.weight.shape[1])
    save_checkpoint(tmp_path / "run", model, optimizer, step=1)
    paths = [
        "--mlx-path",
        str(tmp_path / "run"),
        "--torch-path",
        str(tmp_path / "a.pt"),
    ]
    assert main(paths) == 1
    assert "--like" in capsys.readouterr().err
    assert main([*paths, "--like", str(tmp_path / "pattern.pt")]) == 0
    back = torch_checkpoint.load(tmp_path / "a.pt")
    masters = optimizer.state["masters"]
    assert bits(back["model"]) == bits({n: masters[n] for n in back["model"]})
    assert back["scaler"]["scale"] == 512.0
    moment = optimizer.state["optimizer"]["fc"]["weight"]["v"]
    assert bits(back["optimizer"]["state"][0]["momentum_buffer"]) == bits(moment)
    assert describe(tmp_path / "run")["kind"] == "MLX run"


def test_an_optimizer_that_pytorch_has_not_is_refused_there(tmp_path, capsys):
    torch_checkpoint.save(tmp_path / "pattern.pt", usual())

    class Own(optim.SGD):
        pass

    model = Fc()
    optimizer = Own(0.1, momentum=0.9)
    optimizer.init(model.trainable_parameters())
    save_checkpoint(tmp_path / "run", model, optimizer)
    paths = [
        "--mlx-path",
        str(tmp_path / "run"),
        "--torch-path",
        str(tmp_path / "a.pt"),
    ]
    assert main([*paths, "--like", str(tmp_path / "pattern.pt")]) == 1
    assert "used Own" in capsys.readouterr().err


def test_a_run_from_pytorch_keeps_its_way_back(tmp_path):
    torch_checkpoint.save(tmp_path / "start.pt", usual())
    paths = ["--torch-path", str(tmp_path / "start.pt"), "--mlx-path"]
    assert main([*paths, str(tmp_path / "run")]) == 0
    model = Fc()
    resumed = load_run(tmp_path / "run", model)
    with pytest.raises(ValueError, match="load_run"):
        restore_checkpoint(tmp_path / "run", model, resumed.optimizer, resumed.scaler)
    save_checkpoint(tmp_path / "run", model, resumed.optimizer, resumed.scaler, step=5)
    assert (
        main(
            ["--torch-path", str(tmp_path / "b.pt"), *paths[2:], str(tmp_path / "run")]
        )
        == 0
    )
    back = torch_checkpoint.load(tmp_path / "b.pt")
    assert bits(back["model"]) == bits(usual()["model"])
    extra = restore_checkpoint(
        tmp_path / "run", model, resumed.optimizer, resumed.scaler
    )
    assert extra == {"step": 5}
    save_run(tmp_path / "run", model, resumed.optimizer, resumed.scaler)
    assert "resume" not in (tmp_path / "run" / "training.json").read_text()


def damaged(change):
    def apply(folder):
        path = folder / "training.json"
        record = json.loads(path.read_text())
        change(record["resume"])
        path.write_text(json.dumps(record))

    return apply


def cut(name):
    def apply(folder):
        data = (folder / name).read_bytes()
        (folder / name).write_bytes(data[: len(data) - 8])

    return apply


LONG = "\x1b[2J" + "x" * 10**6


def set_in(*path, value):
    def change(resume):
        *way, last = path
        for key in way:
            resume = resume[key]
        resume[last] = value

    return damaged(change)


def _nested(depth):
    value = 1
    for _ in range(depth):
        value = [value]
    return value


HOSTILE = {
    "no settings": damaged(lambda resume: resume.pop("settings")),
    "no weights' dtypes": set_in("dtypes", value={}),
    "resume is a list": lambda folder: (folder / "training.json").write_text(
        json.dumps({"format": "mlx_gradscale", "version": 1, "resume": [1]})
    ),
    "long names": set_in("frozen", LONG, value=["float32", [2], "0"]),
    "long class": set_in("settings", 0, "class", value=LONG),
    "long dtype": set_in("dtypes", "layers.0.bias", value=LONG),
    "frozen is no list": set_in("frozen", "layers.0.bias", value=5),
    "frozen of a foreign shape": set_in(
        "frozen", "layers.0.bias", value=["float32", [10**12], "0"]
    ),
    "no keys": set_in("random", value=[]),
    "large keys": set_in("random", value=[[2**40, 1]]),
    "text as keys": set_in("random", value=[["a", "b"]]),
    "extra is a number": set_in("extra", value=7),
    "exact is no array": set_in("exact", "layers.0.bias", value=1),
    "exact of another shape": set_in(
        "exact",
        "layers.0.bias",
        value={"$array": {"dtype": "float32", "shape": [1], "data": [1]}},
    ),
    "number is text": set_in("numbers", "step", value="text"),
    "number is a nest": set_in("numbers", "step", value=[[1]]),
    "strides that leave the array": set_in(
        "strides", "model", "layers.0.weight", value=[10**6, 1]
    ),
    "negative strides": set_in("strides", "model", "layers.0.weight", value=[-8, 1]),
    "strides that meet": set_in("strides", "model", "layers.0.weight", value=[0, 0]),
    "too many strides": set_in("strides", "model", "layers.0.weight", value=[1] * 9),
    "strides of a moment": set_in(
        "strides", "optimizer", "layers.0.weight.m", value=[1, 2**62]
    ),
    "a deep nest": lambda folder: (folder / "training.json").write_text(
        '{"format": "mlx_gradscale", "version": 1, "resume": ' + "[" * 10**5
    ),
    "a nest that can be parsed": set_in("extra", value=_nested(400)),
    "a short model": cut("model.safetensors"),
    "a short optimizer": cut("optimizer.safetensors"),
}


def test_a_nest_in_what_is_there_is_a_sentence_too(tmp_path):
    run = KINDS["AdamW"]()
    save_checkpoint(tmp_path / "run", *run.parts)
    training = tmp_path / "run" / "training.json"
    record = json.loads(training.read_text()) | {"theirs": _nested(400)}
    training.write_text(json.dumps(record))
    with pytest.raises(ValueError, match="nested more than"):
        save_checkpoint(tmp_path / "run", *run.parts)


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_damaged_or_hostile_folder_changes_nothing(kind, tmp_path):
    run = KINDS["AdamW"]()
    run.optimizer.init(run.model.trainable_parameters())
    save_checkpoint(tmp_path / "run", *run.parts)
    HOSTILE[kind](tmp_path / "run")
    before = run.fingerprint()
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - each says its own
        restore_checkpoint(tmp_path / "run", *run.parts)
    assert len(str(caught.value)) < 700
    assert "\x1b" not in str(caught.value)
    assert run.fingerprint() == before
