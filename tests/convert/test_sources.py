"""Checkpoints as other programs wrote them: there, on, back, and on again."""

import json
import sys
import types
from pathlib import Path
from typing import NamedTuple

import mlx.core as mx
import mlx.nn as nn
import pytest
from golden_sources import gpt
from golden_sources.data import BEFORE, tokens
from interop_helpers import Net, batch, convert, torch_net
from sources_page import check_row, rows, seen, steps

from mlx_gradscale.convert import load_run, save_run
from mlx_gradscale.convert.skeleton import get

torch = pytest.importorskip("torch", reason="needs PyTorch")
GOLDEN = Path(__file__).parent / "golden_sources"
LOSSES = json.loads((GOLDEN / "losses.json").read_text())


def one_group(parameters):
    return [[*parameters.values()]]


def vectors_first(parameters):
    vectors = [x for x in parameters.values() if x.ndim == 1]
    return [vectors, [x for x in parameters.values() if x.ndim > 1]]


class Source(NamedTuple):
    """A golden file: what it is, where its parts are, how its optimizer has them."""

    title: str
    file: str
    model: tuple
    optimizer: tuple
    prefix: str = ""
    flags: tuple = ()
    groups: object = one_group
    kind: type = torch.optim.AdamW


SOURCES = {
    "timm": Source(
        "timm 1.0.30 `CheckpointSaver`, EMA, AMP",
        "timm.pth.tar",
        ("state_dict",),
        ("optimizer",),
        groups=vectors_first,
    ),
    "torchvision": Source(
        "torchvision's `references/classification`, EMA, AMP",
        "torchvision.pth",
        ("model",),
        ("optimizer",),
        kind=torch.optim.SGD,
    ),
    "nanogpt": Source(
        "nanoGPT, compiled",
        "nanogpt.pt",
        ("model",),
        ("optimizer",),
        prefix="_orig_mod.",
        groups=lambda parameters: vectors_first(parameters)[::-1],
    ),
    "mmengine": Source(
        "mmengine 0.10.7 `Runner`, AMP",
        "mmengine.pth",
        ("state_dict",),
        ("optimizer",),
        prefix="net.",
        flags=("--rename", r"^net\.="),
    ),
    "lightning": Source(
        "Lightning 2.6.6, `EMAWeightAveraging`, hyper-parameters with a path",
        "lightning_ema.ckpt",
        ("current_model_state",),
        ("optimizer_states", 0),
        prefix="model.",
    ),
}


def mlx_losses(name, folder, numbers):
    """Steps in MLX with a converted run, which is saved again."""
    is_gpt = name == "nanogpt"
    net = gpt.GPT() if is_gpt else Net()

    def loss_fn(x, y):
        if is_gpt:
            return nn.losses.cross_entropy(net(x), y, reduction="mean")
        return ((net(x) - y) ** 2).mean()

    run, losses = load_run(folder, net), []
    for number in numbers:
        data = tokens(number) if is_gpt else batch(number)
        loss, grads = nn.value_and_grad(net, loss_fn)(*map(mx.array, data))
        run.optimizer.update(net, grads)
        losses.append(loss.item())
    save_run(folder, net, run.optimizer, run.scaler, run.record)
    return losses


def torch_losses(name, checkpoint, numbers):
    """Steps in PyTorch with what came back."""
    source = SOURCES[name]
    weights = get(checkpoint, source.model)
    weights = {k.removeprefix(source.prefix): v for k, v in weights.items()}
    net = torch_net()
    if name == "nanogpt":
        head = weights.pop("lm_head.weight")
        assert head.data_ptr() == weights["transformer.wte.weight"].data_ptr()
        parameters = {k: torch.nn.Parameter(v) for k, v in weights.items()}
    else:
        net.load_state_dict(weights)
        parameters = dict(net.named_parameters())
    groups = [{"params": group} for group in source.groups(parameters)]
    optimizer = source.kind(groups, lr=1.0)
    optimizer.load_state_dict(get(checkpoint, source.optimizer))
    losses = []
    for number in numbers:
        if name == "nanogpt":
            loss = gpt.torch_loss(parameters, *map(torch.tensor, tokens(number)))
        else:
            x, y = map(torch.tensor, batch(number))
            loss = (net(x) - y).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.fixture
def _mmengine(monkeypatch):
    """The one class of mmengine's that its file names, for PyTorch to find."""
    names = "mmengine", "mmengine.logging", "mmengine.logging.history_buffer"
    made = {name: types.ModuleType(name) for name in names}
    made[names[-1]].HistoryBuffer = type(
        "HistoryBuffer",
        (),
        {"__module__": names[-1], **dict.fromkeys(("min", "max", "mean", "current"))},
    )
    for name, module in made.items():
        monkeypatch.setitem(sys.modules, name, module)


@pytest.mark.usefixtures("_mmengine")
@pytest.mark.parametrize("name", SOURCES)
def test_a_file_of_another_program_goes_on_in_mlx_and_back(name, tmp_path):
    path = GOLDEN / SOURCES[name].file
    assert path.stat().st_size < 30_000
    check_source(name, path, LOSSES[name], tmp_path)


def check_source(name, path, want, tmp_path):
    """Go on in MLX from a file, and back, with the losses that PyTorch has."""
    source = SOURCES[name]
    back = tmp_path / source.file
    model = "golden_sources.gpt:GPT" if name == "nanogpt" else "interop_helpers:Net"
    convert(path, tmp_path / "run", "--model", model, *source.flags)
    onward = mlx_losses(name, tmp_path / "run", range(BEFORE, BEFORE + 5))
    convert(back, tmp_path / "run")

    found = torch.load(back, weights_only=False)
    again = torch_losses(name, found, range(BEFORE + 5, BEFORE + 10))
    check_row(
        source.title,
        inspect=seen(path),
        to_mlx=source.flags,
        onward=steps(onward, want[:5]),
        back=steps(again, want[5:]),
    )
    # And all that is no part came back: the same keys, the same classes.
    before = torch.load(path, weights_only=False)
    assert shape_of(found) == shape_of(before)


def shape_of(value):
    """The keys and types of all that a checkpoint holds."""
    if isinstance(value, dict):
        return type(value), {key: shape_of(x) for key, x in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value), [shape_of(x) for x in value]
    if hasattr(value, "__dict__") and not isinstance(value, (type, torch.Tensor)):
        return type(value), shape_of(vars(value))
    return type(value)


def test_the_scalers_of_the_files_are_found(tmp_path):
    for name in ("timm", "torchvision", "mmengine"):
        convert(GOLDEN / SOURCES[name].file, tmp_path / name, *SOURCES[name].flags)
        scaler = json.loads((tmp_path / name / "scaler.json").read_text())
        assert (scaler["scale"], scaler["_growth_tracker"]) == (65536.0, BEFORE)


def test_no_row_of_the_page_is_without_a_test():
    tests = [*Path(__file__).parent.glob("*.py")]
    tests += Path(__file__).parent.glob("interop/*.py")
    text = "".join(path.read_text() for path in tests)
    assert len(rows()) > len(SOURCES)
    for title in rows():
        assert f'"{title}"' in text, title
