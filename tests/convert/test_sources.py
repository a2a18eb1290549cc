"""Checkpoints of other programs: steps in MLX, and steps in PyTorch again."""

import json
import sys
import types
from functools import partial
from pathlib import Path
from typing import NamedTuple

import mlx.nn as nn
import pytest
from golden.sources import gpt
from golden.sources.data import BEFORE, tokens
from support.regression import assert_near, mlx_steps, torch_net, torch_steps

from mlx_gradscale.core.trees import get_at

torch = pytest.importorskip("torch", reason="needs PyTorch")
GOLDEN = Path(__file__).parents[1] / "golden" / "sources"
LOSSES = json.loads((GOLDEN / "losses.json").read_text())


def one_group(parameters):
    return [[*parameters.values()]]


def vectors_first(parameters):
    vectors = [x for x in parameters.values() if x.ndim == 1]
    return [vectors, [x for x in parameters.values() if x.ndim > 1]]


class Source(NamedTuple):
    """A golden file: what it is, where its parts are, how its optimizer has them."""

    file: str
    model: tuple
    optimizer: tuple
    prefix: str = ""
    rename: object = str
    groups: object = one_group
    kind: type = torch.optim.AdamW


SOURCES = {
    "timm": Source(
        "timm.pth.tar", ("state_dict",), ("optimizer",), groups=vectors_first
    ),
    "torchvision": Source(
        "torchvision.pth", ("model",), ("optimizer",), kind=torch.optim.SGD
    ),
    "nanogpt": Source(
        "nanogpt.pt",
        ("model",),
        ("optimizer",),
        prefix="_orig_mod.",
        groups=lambda parameters: vectors_first(parameters)[::-1],
    ),
    "mmengine": Source(
        "mmengine.pth",
        ("state_dict",),
        ("optimizer",),
        prefix="net.",
        rename=lambda name: name.removeprefix("net."),
    ),
    "lightning": Source(
        "lightning_ema.ckpt",
        ("current_model_state",),
        ("optimizer_states", 0),
        prefix="model.",
    ),
}


def torch_losses(name, checkpoint, numbers):
    """Steps in PyTorch with what came back."""
    source = SOURCES[name]
    weights = get_at(source.model, checkpoint)
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
    optimizer.load_state_dict(get_at(source.optimizer, checkpoint))
    if name != "nanogpt":
        return torch_steps(net, optimizer, numbers)
    losses = []
    for number in numbers:
        loss = gpt.torch_loss(parameters, *map(torch.tensor, tokens(number)))
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
def test_checkpoint_of_another_program_resumes_in_mlx_and_converts_back(name, tmp_path):
    path = GOLDEN / SOURCES[name].file
    assert path.stat().st_size < 30_000
    check_source(name, path, LOSSES[name], tmp_path)


def check_source(name, path, want, tmp_path):
    """Continue in MLX from a file, and back, with the losses that PyTorch has."""
    back, more = tmp_path / SOURCES[name].file, {}
    if name == "nanogpt":
        loss_of = partial(nn.losses.cross_entropy, reduction="mean")
        more = {"net": gpt.GPT(), "data": tokens, "loss_of": loss_of}
    options = {"rename": SOURCES[name].rename}
    onward = mlx_steps(path, back, range(BEFORE, BEFORE + 5), options=options, **more)
    assert_near(onward, want[:5])
    found = torch.load(back, weights_only=False)
    assert_near(torch_losses(name, found, range(BEFORE + 5, BEFORE + 10)), want[5:])
    # And all that is no section came back: the same keys, the same classes.
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


def decayed(net):
    """Two groups, and the second begins: another order than the model's."""
    matrices = [p for p in net.parameters() if p.ndim > 1]
    others = [p for p in net.parameters() if p.ndim == 1]
    return torch.optim.AdamW(
        [{"params": others, "weight_decay": 0.0}, {"params": matrices[::-1]}], lr=1e-2
    )


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("is_flat", [True, False])
def test_optimizer_state_by_name_resumes_in_mlx_and_converts_back(is_flat, tmp_path):
    distributed = pytest.importorskip("torch.distributed.checkpoint.state_dict")
    options = distributed.StateDictOptions(flatten_optimizer_state_dict=is_flat)
    net = torch_net()
    optimizer = decayed(net)
    torch_steps(net, optimizer, range(10))
    state = distributed.get_optimizer_state_dict(net, optimizer, options=options)
    torch.save({"model": net.state_dict(), "optim": state}, tmp_path / "a.pt")
    want = torch_steps(net, optimizer, range(10, 20))

    losses = mlx_steps(tmp_path / "a.pt", tmp_path / "b.pt", range(10, 15))
    assert_near(losses, want[:5])
    back = torch.load(tmp_path / "b.pt", weights_only=True)
    assert back["optim"].keys() == state.keys()
    net = torch_net()
    optimizer = decayed(net)
    net.load_state_dict(back["model"])
    distributed.set_optimizer_state_dict(net, optimizer, back["optim"], options=options)
    assert_near(torch_steps(net, optimizer, range(15, 20)), want[5:])
