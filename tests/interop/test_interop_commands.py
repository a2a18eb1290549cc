"""A host's own command through ``mlx_gradscale run``: no file of it is changed."""

import math
import sys

import mlx.core as mx
import pytest

pytest.importorskip("mlx_lm", reason="needs mlx-lm")
from mlx_lm.models import llama
from mlx_lm.tuner.trainer import default_loss
from support.lora_parts import CONFIG, make_data, make_model, make_rows

from mlx_gradscale.__main__ import main

pytestmark = pytest.mark.filterwarnings("ignore")
FLAGS = "--train --train-mode sft --train-type full --optimizer adamw --iters 12 "
FLAGS += "--batch-size 4 --learning-rate 3e-3 --max-seq-length 64 --val-batches 1"


@pytest.fixture(autouse=True)
def _host(monkeypatch):
    pytest.importorskip("mlx_lm_lora.train", reason="needs the extra interop")
    # It asks for a limit that only Apple's GPUs have.
    info = {"max_recommended_working_set_size": 0}
    monkeypatch.setattr(mx, "device_info", lambda: info)
    monkeypatch.setattr(mx, "set_wired_limit", lambda limit: None)
    # It is to be run as a program, not to be found imported.
    for name in [n for n in sys.modules if n.startswith("mlx_lm_lora")]:
        monkeypatch.delitem(sys.modules, name)


def trained_loss(folder, dtype, run):
    """The loss of the model that the command leaves, on other text."""
    folder.mkdir()
    model = make_model(folder / "model", dtype)
    data, out = make_data(folder / "data"), folder / "out"
    words = ["mlx_lm_lora.train", *FLAGS.split()]
    words += ["--model", model, "--data", data, "--adapter-path", out]
    run([str(word) for word in words])
    net = llama.Model(llama.ModelArgs.from_dict(CONFIG))
    net.load_weights(str(out / "adapters.safetensors"), strict=True)
    assert net.lm_head.weight.dtype == dtype
    batch = mx.array([row for row, _ in make_rows()[1]])
    lengths = mx.array([[0, batch.shape[1]]] * len(batch))
    return default_loss(net, batch, lengths)[0].item()


def test_mlx_lm_loras_command_follows_float32_where_float16_fails(
    tmp_path, monkeypatch, capsys
):
    def bare(words):
        import runpy

        monkeypatch.setattr(sys, "argv", words)
        runpy.run_module(words[0], run_name="__main__", alter_sys=True)

    def ours(words):
        assert main(["run", "-m", *words]) == 0

    wanted = trained_loss(tmp_path / "float32", mx.float32, bare)
    naive = trained_loss(tmp_path / "float16", mx.float16, bare)
    assert math.isnan(naive) or naive > 1.02 * wanted
    capsys.readouterr()
    found = trained_loss(tmp_path / "ours", mx.float16, ours)
    said = capsys.readouterr().err
    assert found == pytest.approx(wanted, rel=0.02)
    assert "0 of 12 gradients overflowed" in said
    assert "AdamW: 12 steps applied, 0 skipped" in said
