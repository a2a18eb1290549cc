"""Folders of Transformers' Trainer, Accelerate, PEFT and others."""

import json
import os

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten
from support.convert_runs import Small, forward, identical, small, small_adam, take_step

from mlx_gradscale import restore_checkpoint, save_checkpoint
from mlx_gradscale import torch_checkpoint as pt
from mlx_gradscale.checkpoint import read_checkpoint
from mlx_gradscale.convert import (
    ConvertError,
    build_optimizer,
    load_torch,
    save_torch,
)
from mlx_gradscale.torch_checkpoint import Placeholder

NAMES = ("fc.weight", "fc.bias")


def trainer_folder(path):
    """As Transformers' Trainer writes it, with its own objects."""
    path.mkdir()
    weights, optimizer, _ = small_adam()
    mx.save_safetensors(str(path / "model.safetensors"), weights, {"format": "pt"})
    pt.save(path / "optimizer.pt", optimizer)
    state = {"base_lrs": [0.1], "last_epoch": 3, "_step_count": 4}
    pt.save(path / "scheduler.pt", state)
    args = Placeholder("transformers", "TrainingArguments").called(b"R", ())
    pt.save(path / "training_args.bin", args)
    (path / "rng_state.pth").write_bytes(b"random")
    (path / "config.json").write_text("{}")
    state = {"global_step": 3, "epoch": 0.5, "log_history": []}
    (path / "trainer_state.json").write_text(json.dumps(state, sort_keys=True))
    return path


def steps_in_mlx(source, target, steps):
    """Convert a folder there and back; return the run and the notes."""
    model = Small()
    run = load_torch(source, model, names=NAMES)
    for _ in range(steps):
        take_step(model, run.optimizer)
    parts = model, run.optimizer
    return run, save_torch(target, *parts, like=source, names=NAMES)


def trainer_state(folder, **changes):
    path = folder / "trainer_state.json"
    state = json.loads(path.read_text()) | changes
    path.write_text(json.dumps(state))
    return state


def test_trainer_folder_round_trip_advances_its_step_counters(tmp_path, recwarn):
    source, target = trainer_folder(tmp_path / "checkpoint-3"), tmp_path / "back"
    notes = steps_in_mlx(source, target, 3)[1]
    assert notes[0] == "Moved from step 3 to step 6: scheduler.pt, trainer_state.json."
    assert "rng_state.pth" in notes[1]
    assert "scheduler.pt" not in notes[1]
    assert {*os.listdir(target)} == {*os.listdir(source)}
    state, scheduler = trainer_state(target), pt.load(target / "scheduler.pt")
    assert (state["global_step"], state["epoch"]) == (6, 1.0)
    assert (scheduler["last_epoch"], scheduler["_step_count"]) == (6, 7)
    assert pt.load(target / "optimizer.pt")["state"][0]["step"].item() == 6
    assert trainer_state(source)["global_step"] == 3
    # Counters that differ from the optimizer's are not changed.
    trainer_state(source, global_step=100)
    notes = steps_in_mlx(source, target, 1)[1]
    assert "scheduler.pt" in notes[0]
    assert trainer_state(target)["global_step"] == 100


def test_trainer_run_with_sgd_starts_at_its_global_step(tmp_path, recwarn):
    source = trainer_folder(tmp_path / "in")
    pt.save(source / "optimizer.pt", small()[1])
    run, _ = steps_in_mlx(source, tmp_path / "out", 1)
    assert run.optimizer.step.item() == 4
    assert not any("saves no step count" in note for note in run.notes)
    assert trainer_state(tmp_path / "out")["global_step"] == 4
    for count in (-1, 2**60, "3", None, True):
        trainer_state(source, global_step=count)
        run = load_torch(source, Small(), names=NAMES)
        assert run.optimizer.step.item() == 0
        (note,) = [note for note in run.notes if "SGD saves no step count" in note]
        assert "for a MultiOptimizer, of each of its .optimizers" in note


def test_convert_command_round_trips_a_folder(tmp_path, capsys):
    source = trainer_folder(tmp_path / "in")
    (tmp_path / "names").write_text("\n".join(NAMES))
    forward(source, tmp_path / "run", "--names", str(tmp_path / "names"))
    forward(tmp_path / "out", tmp_path / "run")
    assert {*os.listdir(tmp_path / "out")} == {*os.listdir(source)}
    for name in os.listdir(source):
        a, b = (tmp_path / folder / name for folder in ("in", "out"))
        if name.endswith((".pt", ".safetensors")):
            load = pt.load if name.endswith(".pt") else mx.load
            identical(load(str(a)), load(str(b)))
        elif name.endswith(".json"):
            assert json.loads(a.read_text()) == json.loads(b.read_text())
        else:
            assert a.read_bytes() == b.read_bytes()


def test_two_models_of_an_accelerate_folder_convert_one_at_a_time(tmp_path):
    source = tmp_path / "in"
    source.mkdir()
    for i, end in enumerate(("", "_1")):
        model, optimizer, _ = small(i)
        pt.save(source / f"pytorch_model{end}.bin", model)
        pt.save(source / f"optimizer{end}.bin", optimizer)
    (source / "random_states_0.pkl").write_bytes(b"not read")
    with pytest.raises(ConvertError, match=r"2 models.*pytorch_model_1\.bin"):
        load_torch(source, Small())
    for end in ("", "_1"):
        keys = {"model": f"pytorch_model{end}.bin", "optimizer": f"optimizer{end}.bin"}
        model, target = Small(), tmp_path / f"out{end}"
        run = load_torch(source, model, keys=keys)
        model.fc.bias = model.fc.bias + 1
        save_torch(target, model, run.optimizer, like=source, keys=keys)
        source = target
    for end in ("", "_1"):
        weights = pt.load(target / f"pytorch_model{end}.bin")
        assert weights["fc.bias"].tolist() == [2.0, 3.0]
    assert (target / "random_states_0.pkl").read_bytes() == b"not read"


@pytest.mark.parametrize("end", ["safetensors", "bin"])
def test_sharded_model_comes_back_as_one_file(end, tmp_path):
    source = tmp_path / "in"
    source.mkdir()
    weights = dict(small()[0])
    for i, (name, x) in enumerate(weights.items()):
        path = source / f"model-0000{i + 1}-of-00002.{end}"
        if end == "bin":
            pt.save(path, {name: x})
        else:
            mx.save_safetensors(str(path), {name: x}, {"format": "pt"})
    (source / f"model.{end}.index.json").write_text("{}")
    model = Small()
    load_torch(source, model)
    save_torch(tmp_path / "out", model, like=source)
    assert [p.name for p in (tmp_path / "out").iterdir()] == [f"model.{end}"]
    again = Small()
    load_torch(tmp_path / "out", again)
    assert mx.array_equal(again.fc.weight, weights["fc.weight"])
    next(source.glob("model-00001*")).unlink()
    with pytest.raises(ConvertError, match="Add missing shards"):
        load_torch(source, model)


def lora_model(freeze=True):
    """A model of mlx-lm's kind with LoRA layers and a frozen base."""
    tuner = pytest.importorskip("mlx_lm.tuner.utils")
    llama = pytest.importorskip("mlx_lm.models.llama")
    arguments = llama.ModelArgs(
        model_type="llama", hidden_size=8, num_hidden_layers=2, intermediate_size=16,
        num_attention_heads=2, rms_norm_eps=1e-5, vocab_size=11,
    )  # fmt: skip
    mx.random.seed(0)  # the same base model in every call
    model = llama.Model(arguments)
    model.freeze()
    config = {"rank": 4, "scale": 2.0, "dropout": 0.0,
              "keys": ["self_attn.q_proj", "self_attn.v_proj"]}  # fmt: skip
    tuner.linear_to_lora_layers(model, 2, config)
    return model if freeze else model.unfreeze()


def unfrozen_lora_model():
    return lora_model(freeze=False)


def peft_folder(path):
    """As the Trainer writes a PEFT model: adapters alone, and their optimizer."""
    path.mkdir()
    names, weights = [], {}
    for layer in range(2):
        for part in ("q_proj", "v_proj"):
            for letter, shape in (("A", (4, 8)), ("B", (8, 4))):
                name = f"base_model.model.model.layers.{layer}.self_attn.{part}"
                names.append(f"{name}.lora_{letter}.default.weight")
                rng = np.random.default_rng(len(names))
                value = rng.normal(size=shape).astype(np.float32)
                weights[f"{name}.lora_{letter}.weight"] = mx.array(value)
    file = str(path / "adapter_model.safetensors")
    mx.save_safetensors(file, weights, {"format": "pt"})
    (path / "adapter_config.json").write_text('{"r": 4, "lora_alpha": 8}')
    state = {
        i: {"step": mx.array(3.0), "exp_avg": x * 2, "exp_avg_sq": x * x}
        for i, x in enumerate(weights.values())
    }
    group = small_adam()[2] | {"params": list(range(8))}
    pt.save(path / "optimizer.pt", {"state": state, "param_groups": [group]})
    return names, weights


def test_peft_lora_run_resumes_in_mlx_and_converts_back(tmp_path, capsys):
    source, run, target = (tmp_path / name for name in ("in", "run", "out"))
    names, weights = peft_folder(source)
    (tmp_path / "names").write_text("\n".join(names))
    with pytest.raises(ConvertError, match=r"safetensors.*--names"):
        load_torch(source, lora_model())
    flags = ["--names", str(tmp_path / "names"), "--model", f"{__name__}:lora_model"]
    forward(source, run, *flags)
    model, optimizer = lora_model(), build_optimizer(run)
    assert restore_checkpoint(run, model, optimizer) == {"step": 3}
    part, key = model.layers[1].self_attn.v_proj, names[-1].replace("default.", "")
    assert mx.array_equal(part.lora_b, weights[key].T)
    state = optimizer.state["model"]["layers"][1]["self_attn"]["v_proj"]
    assert mx.array_equal(state["lora_b"]["m"], weights[key].T * 2)
    forward(target, run)
    back = mx.load(str(target / "adapter_model.safetensors"))
    identical({name: back[name] for name in weights}, weights)

    loss = nn.value_and_grad(model, lambda x: (model(x) ** 2).mean())
    optimizer.update(model, loss(mx.array([[1, 2, 3]]))[1])
    save_checkpoint(run, model, optimizer)
    forward(target, run, "--to", "torch", "--overwrite")
    back = mx.load(str(target / "adapter_model.safetensors"))
    assert back.keys() == weights.keys()
    assert mx.array_equal(back[key], part.lora_b.T)
    moments = pt.load(target / "optimizer.pt")["state"]
    assert moments[7]["step"].item() == 4
    assert moments[7]["exp_avg"].shape == (8, 4)
    assert (target / "adapter_config.json").exists()


def test_only_the_adapters_of_a_lora_model_are_saved_also_if_its_base_is_not_frozen(
    tmp_path,
):
    peft_folder(tmp_path / "in")
    (tmp_path / "in/optimizer.pt").unlink()
    flags = ["--model", f"{__name__}:unfrozen_lora_model"]
    forward(tmp_path / "in", tmp_path / "run", *flags)
    model = lora_model()
    lora = sorted(n for n, _ in tree_flatten(model.trainable_parameters()))
    assert sorted(read_checkpoint(tmp_path / "run").weights) == lora
    with pytest.raises(ConvertError, match="linear_to_lora_layers"):
        load_torch(tmp_path / "in", type(model)(model.args))


@pytest.mark.parametrize(
    ("name", "word"),
    [
        ("zero_pp_rank_0_mp_rank_00_optim_states.pt", "zero_to_fp32"),
        ("epoch_1.pt", "contains no file with a name.* the path of a single file"),
        (".metadata", "format_utils dcp_to_torch"),
    ],
)
def test_unsupported_folder_error_names_its_kind(name, word, tmp_path):
    (tmp_path / name).write_bytes(b"x")
    with pytest.raises(ValueError, match=word):
        load_torch(tmp_path, Small())


def test_folder_with_foreign_files_is_not_replaced(tmp_path, capsys):
    source, target = trainer_folder(tmp_path / "in"), tmp_path / "out"
    for steps in range(2):
        steps_in_mlx(source, target, steps)
        assert sorted(p.name for p in tmp_path.iterdir()) == ["in", "out"]
    assert pt.load(target / "optimizer.pt")["state"][0]["step"].item() == 4
    with pytest.raises(FileExistsError, match="--overwrite"):
        save_torch(target, Small(), like=source, names=NAMES, overwrite=False)
    for name in ("other.pt", ".gitattributes"):
        (target / name).write_bytes(b"mine")
        with pytest.raises(FileExistsError, match=name):
            steps_in_mlx(source, target, 0)
        assert (target / name).read_bytes() == b"mine"
        (target / name).unlink()


def test_links_out_of_a_folder_and_pipes_are_not_followed(tmp_path):
    source = trainer_folder(tmp_path / "in")
    (tmp_path / "secret").write_text("mine")
    (source / "linked.txt").symlink_to(tmp_path / "secret")
    os.mkfifo(source / "pipe.txt")
    run = load_torch(source, Small(), names=NAMES)
    assert any("linked.txt, pipe.txt" in note for note in run.notes)
    for name in ("optimizer.pt", "trainer_state.json"):
        (source / name).rename(tmp_path / "elsewhere")
        (source / name).symlink_to(tmp_path / "elsewhere")
        with pytest.raises(ConvertError, match=f"{name} is a symbolic link"):
            load_torch(source, Small(), names=NAMES)
        (tmp_path / "elsewhere").rename(source / f"real {name}")
        (source / name).unlink()
        (source / name).symlink_to(f"real {name}")
    load_torch(source, Small(), names=NAMES)
    os.mkfifo(source / "scaler.pt")
    with pytest.raises((ValueError, OSError), match="not a regular file"):
        load_torch(source, Small(), names=NAMES)
