"""Models of Transformers into mlx-lm's, whose sanitize tells names and layouts."""

import numpy as np
import pytest
from support.hf_trainer import llama, mlx_lm_steps
from support.regression import convert

from mlx_gradscale import restore_checkpoint, save_checkpoint
from mlx_gradscale.convert import build_optimizer
from mlx_gradscale.convert.command import _mlx_lm_model as mlx_lm_model

torch = pytest.importorskip("torch", reason="needs PyTorch")
transformers = pytest.importorskip("transformers", reason="needs transformers")
pytest.importorskip("mlx_lm", reason="needs mlx-lm")
pytestmark = pytest.mark.filterwarnings("ignore")


def gpt2():
    # n_embd twice: a square weight, whose shape does not tell that it is turned.
    sizes = {"n_embd": 16, "n_head": 2, "n_layer": 2, "n_positions": 8}
    dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(**sizes, **dropout, vocab_size=32, n_ctx=8)
    )


def data(number):
    rng = np.random.default_rng(number)
    return rng.integers(0, 32, (2, 8))


def torch_steps(model, optimizer, numbers):
    losses = []
    for number in numbers:
        x = torch.tensor(data(number))
        logits = model(x).logits[:, :-1].reshape(-1, 32)
        loss = torch.nn.functional.cross_entropy(logits, x[:, 1:].reshape(-1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("kind", [gpt2, llama])
@pytest.mark.parametrize("saved", ["file", "folder"])
def test_transformers_run_resumes_in_mlx_lm_and_converts_back(kind, saved, tmp_path):
    torch.manual_seed(0)
    model = kind()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    torch_steps(model, optimizer, range(3))
    there = tmp_path / "there"
    model.save_pretrained(there)
    (there / "config.json").write_text(model.config.to_json_string(use_diff=False))
    if saved == "file":
        checkpoint = {"model": model.state_dict(), "opt": optimizer.state_dict()}
        source, back = tmp_path / "a.pt", tmp_path / "b.pt"
        torch.save(checkpoint, source)
    else:
        source, back = there, tmp_path / "back"
        torch.save(optimizer.state_dict(), there / "optimizer.pt")
    want = torch_steps(model, optimizer, range(3, 9))

    flags = ["--model", there]
    if saved == "folder":
        # safetensors keep no order, and mlx-lm's blocks have another one.
        names = [name for name, _ in model.named_parameters()]
        (tmp_path / "names").write_text("\n".join(names))
        flags += ["--names", tmp_path / "names"]
    convert(source, tmp_path / "run", *flags)
    mlx = mlx_lm_model(there)
    optimizer = build_optimizer(tmp_path / "run")
    restore_checkpoint(tmp_path / "run", mlx, optimizer)
    losses = mlx_lm_steps(mlx, optimizer, map(data, range(3, 6)))
    np.testing.assert_allclose(losses, want[:3], rtol=1e-4)
    save_checkpoint(tmp_path / "run", mlx, optimizer)

    convert(back, tmp_path / "run")
    if saved == "file":
        found = torch.load(back, weights_only=True)
        again = kind()
        again.load_state_dict(found["model"])
        state = found["opt"]
    else:
        again = type(model).from_pretrained(back)
        state = torch.load(back / "optimizer.pt", weights_only=True)
    optimizer = torch.optim.AdamW(again.parameters(), 1e-3)
    optimizer.load_state_dict(state)
    losses = torch_steps(again, optimizer, range(6, 9))
    np.testing.assert_allclose(losses, want[3:], rtol=1e-4)
