"""Trainers of others inside of ``everywhere()``: near float32 where float16 fails.

They come with the ``interop`` extra. Each trains all weights of the same small Llama
with its own loop, optimizer and defaults; the loss is that of the model it leaves.
"""

import contextlib
import importlib
import math
import sys
from types import SimpleNamespace

import mlx.core as mx
import mlx.optimizers as optim
import numpy as np
import pytest

pytest.importorskip("mlx_lm", reason="needs mlx-lm")
from mlx_lm.models import llama
from mlx_lm.tuner.trainer import default_loss
from support.lora_parts import CONFIG, make_rows, make_texts
from support.lora_parts import make_model as make_folder

from mlx_gradscale import everywhere

pytestmark = pytest.mark.filterwarnings("ignore")
STEPS, RATE = 12, 3e-3


def host(name):
    try:
        return importlib.import_module(name)
    except ImportError:
        pytest.skip("the interop extra is not installed")


def mlx_vlm(model, rows, folder, monkeypatch):
    trainer = host("mlx_vlm.trainer")
    inside = sys.modules["mlx_vlm.trainer.vlm.sft.trainer"]

    def batches(dataset, batch_size, max_seq_length, train=False):
        # Of images; the loop, its clipping and its optimizer calls are the host's.
        while True:
            for i in range(0, len(dataset) - batch_size + 1, batch_size):
                yield mx.array([row for row, _ in dataset[i : i + batch_size]])

    def loss_fn(model, batch, **_):
        loss, tokens = default_loss(model, batch, lengths(batch))
        return loss, {"weight": tokens, "num_tokens": tokens}

    monkeypatch.setattr(inside, "iterate_batches", batches)
    arguments = trainer.TrainingArgs(
        batch_size=8, iters=STEPS, adapter_file=str(folder / "adapters.safetensors")
    )
    assert arguments.grad_clip == 1.0
    inside.train(model, optim.Adam(RATE), rows, args=arguments, loss_fn=loss_fn)


def tokenizer_and_texts(folder):
    transformers = pytest.importorskip("transformers")
    made = make_folder(folder / "model")
    texts = [{"text": text} for text in make_texts()[8:]]
    tokenizer = transformers.AutoTokenizer.from_pretrained(made)
    return {"tokenizer": tokenizer, "train_dataset": texts}


def mlx_tune(model, rows, folder, monkeypatch):
    tuner = host("mlx_tune")
    tuner.SFTTrainer(
        model=SimpleNamespace(model=model),
        **tokenizer_and_texts(folder),
        learning_rate=RATE,
        per_device_train_batch_size=8,
        max_steps=STEPS,
        output_dir=str(folder),
        warmup_steps=0,
    ).train(use_native=True)


def unsloth_zoo(model, rows, folder, monkeypatch):
    # Its own way to say that there is no GPU of NVIDIA's.
    monkeypatch.setenv("UNSLOTH_ZOO_DISABLE_GPU_INIT", "1")
    trainer = host("unsloth_zoo.mlx.trainer")
    arguments = trainer.MLXTrainingConfig(
        per_device_train_batch_size=8,
        gradient_accumulation_steps=1,
        max_steps=STEPS,
        learning_rate=RATE,
        warmup_steps=0,
        max_seq_length=64,
        output_dir=str(folder / "out"),
    )
    data = tokenizer_and_texts(folder)
    trainer.MLXTrainer(model=model, args=arguments, **data).train()


def lengths(batch):
    return mx.array([[0, batch.shape[1]]] * batch.shape[0])


def final_loss(train, dtype, folder, monkeypatch, context):
    mx.random.seed(0)
    np.random.seed(0)  # noqa: NPY002 - the hosts shuffle with this one
    model = llama.Model(llama.ModelArgs.from_dict(CONFIG))
    model.set_dtype(dtype)
    rows, held_out = make_rows()
    folder.mkdir()
    with context, monkeypatch.context() as patch:
        train(model, rows, folder, patch)
    assert model.lm_head.weight.dtype == dtype
    batch = mx.array([row for row, _ in held_out])
    model.eval()
    return default_loss(model, batch, lengths(batch))[0].item()


@pytest.mark.parametrize("train", [mlx_vlm, mlx_tune, unsloth_zoo])
def test_third_party_trainer_in_everywhere_follows_float32_where_float16_fails(
    train, tmp_path, monkeypatch
):
    nothing = contextlib.nullcontext()

    def loss(dtype, name, context=nothing):
        return final_loss(train, dtype, tmp_path / name, monkeypatch, context)

    wanted = loss(mx.float32, "float32")
    naive = loss(mx.float16, "float16")
    assert math.isnan(naive) or naive > 1.02 * wanted
    reports = []

    @contextlib.contextmanager
    def reported():
        with everywhere() as here:
            yield
        reports.extend(here.report())

    found = loss(mx.float16, "everywhere", reported())
    print(f"{train.__name__}: float32 {wanted}, float16 {naive}, {found}, {reports}")
    assert found == pytest.approx(wanted, rel=0.02)
    assert reports[1].endswith(f"{STEPS} steps applied, 0 skipped")
