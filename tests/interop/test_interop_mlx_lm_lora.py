"""mlx-lm-lora: its command through ``mlx_gradscale run``, and its GRPO trainer."""

import math
import runpy
import sys

import mlx.core as mx
import mlx.optimizers as optim
import numpy as np
import pytest

pytest.importorskip("mlx_lm", reason="needs mlx-lm")
from mlx_lm import load
from mlx_lm.models import llama
from mlx_lm.tuner.trainer import default_loss
from support.lora_parts import CONFIG, make_data, make_model, make_rows

from mlx_gradscale import everywhere
from mlx_gradscale.__main__ import main

pytestmark = pytest.mark.filterwarnings("ignore")
FLAGS = "--train --train-mode sft --train-type full --optimizer adamw --iters 12 "
FLAGS += "--batch-size 4 --learning-rate 3e-3 --max-seq-length 64 --val-batches 1"


@pytest.fixture(autouse=True)
def _without_a_gpu(monkeypatch):
    # It asks for a limit that only Apple's GPUs have.
    info = {"max_recommended_working_set_size": 0}
    monkeypatch.setattr(mx, "device_info", lambda: info)
    monkeypatch.setattr(mx, "set_wired_limit", lambda limit: None)


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


def test_mlx_lm_lora_command_follows_float32_where_float16_fails(
    tmp_path, monkeypatch, capsys
):
    pytest.importorskip("mlx_lm_lora.train", reason="needs the interop extra")
    # It is to be run as a program, not to be found imported.
    for name in [n for n in sys.modules if n.startswith("mlx_lm_lora")]:
        monkeypatch.delitem(sys.modules, name)

    def bare(words):
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


STEPS, LENGTH = 5, 8
PROMPTS = ["One and one is", "The first letter is", "Two and two is"]


def long_words(prompts, completions, answer, types=None):
    return [float(sum(c.isalpha() for c in text)) for text in completions]


def test_mlx_lm_lora_grpo_trains_without_overflow_inside_everywhere(tmp_path):
    grpo = pytest.importorskip(
        "mlx_lm_lora.trainer.grpo_trainer", reason="needs the interop extra"
    )
    np.random.seed(0)  # noqa: NPY002 - it shuffles with this one
    folder = make_model(tmp_path / "model").parent
    model, tokenizer = load(str(folder / "model"))
    rows = [(tokenizer.encode(text), [3], text, "3") for text in PROMPTS]
    arguments = grpo.GRPOTrainingArgs(
        batch_size=1,
        iters=STEPS,
        max_completion_length=LENGTH,
        beta=0.0,
        adapter_file=str(folder / "adapters.safetensors"),
    )
    with everywhere() as here:
        grpo.train_grpo(
            *(model, None, tokenizer, optim.AdamW(1e-4), rows),
            reward_funcs=[long_words],
            args=arguments,
        )
    scale, steps = here.report()
    assert " 0 of " in scale
    assert steps == f"AdamW: {STEPS} steps applied, 0 skipped"
