"""``mlx_gradscale lora``: mlx-lm's command on a model folder that is made here."""

import contextlib
import hashlib
import inspect
import json
import math
import re
import sys
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace

import mlx.core as mx
import pytest

pytest.importorskip("mlx_lm", reason="mlx-lm is not installed")
import mlx_lm.lora
import mlx_lm.tuner.trainer as trainer
from mlx_lm.models.llama import TransformerBlock as Block
from support.helpers import bits
from support.lora_parts import make_data, make_model
from support.ring import run_ranks

from mlx_gradscale.__main__ import main as mlx_gradscale
from mlx_gradscale.diagnostics import ScaleHistory
from mlx_gradscale.float32 import Float32Search
from mlx_gradscale.float32.layers import computes_in_float32
from mlx_gradscale.trainers import lora_training
from mlx_gradscale.trainers.lora import main

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:.*swig.*")

FLAGS = (
    *("--train", "--iters", 12, "--batch-size", 2, "--num-layers", 2),
    *("--steps-per-report", 3, "--steps-per-eval", 6, "--save-every", 6),
    *("--max-seq-length", 64, "--val-batches", 1, "--learning-rate", 1e-2),
)
FULL = ("--fine-tune-type", "full", "--optimizer", "adamw")
# LoRA's scale is 20: what suits all weights is too much for adapters.
SLOWER = ("--learning-rate", "1e-3")
# The loop of mlx-lm 0.32.2.
LOOP = "7e3082c746372475"


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lora")
    make_model(folder / "model")
    make_model(folder / "quantized", quantize=True)
    make_model(folder / "bfloat16", dtype=mx.bfloat16)
    make_data(folder / "data")
    return folder


def arguments(place, adapters, *others, model="model"):
    paths = "--model", place / model, "--data", place / "data"
    return list(map(str, (*FLAGS, *paths, "--adapter-path", adapters, *others)))


class Run:
    """A run of the command: its exit code, output and files."""

    def __init__(self, folder, code, output):
        self.folder, self.code, self.out, self.err = folder, code, *output

    @cached_property
    def records(self):
        return ScaleHistory.load(f"{self.folder}.csv").records

    @property
    def steps(self):
        return [(r.step, r.loss, r.scale, r.applied) for r in self.records]

    @property
    def scales(self):
        return [(r.scale, r.applied) for r in self.records]

    @property
    def losses(self):
        return [r.loss for r in self.records if r.loss is not None]

    @cached_property
    def weights(self):
        return mx.load(str(self.folder / "adapters.safetensors"))

    @property
    def dtypes(self):
        return {x.dtype for x in self.weights.values()}


@pytest.fixture
def lora(place, tmp_path, capsys):
    """Run the command with flags, or with a text for a YAML file, and a history."""

    def run(name, *flags, config="", model="model", command=main):
        folder = tmp_path / name
        if config:
            (tmp_path / "config.yaml").write_text(config)
            flags = (*flags, "-c", tmp_path / "config.yaml")
        flags = ("--history", f"{folder}.csv", *flags)
        capsys.readouterr()
        code = command(arguments(place, folder, *flags, model=model))
        return Run(folder, code, capsys.readouterr())

    return run


def collect_reports(monkeypatch):
    """Return a list that gets what mlx-lm reports to wandb, without times."""
    found = []

    def add(info):
        names = "iteration", "train_loss", "val_loss", "learning_rate", "trained_tokens"
        found.append({name: info[name] for name in names if name in info})

    report = SimpleNamespace(on_train_loss_report=add, on_val_loss_report=add)
    monkeypatch.setattr(mlx_lm.lora, "get_reporting_callbacks", lambda *a, **k: report)
    return found


@pytest.fixture
def mlx_lm_losses(place, tmp_path, monkeypatch):
    """Run ``mlx_lm.lora`` itself, in a folder "plain", and return its losses."""

    def run(*flags, model="model"):
        given = arguments(place, tmp_path / "plain", *flags, model=model)
        with monkeypatch.context() as patch:
            found = collect_reports(patch)
            patch.setattr(sys, "argv", ["mlx_lm.lora", *given])
            mlx_lm.lora.main()
        return [report["train_loss"] for report in found if "train_loss" in report]

    return run


def test_full_float16_fine_tuning_learns_where_mlx_lm_gives_nan(
    lora, mlx_lm_losses, tmp_path
):
    assert all(map(math.isnan, mlx_lm_losses(*FULL)))
    run = lora("ours", *FULL)
    assert run.code == 0
    assert [step for step, *_ in run.steps] == list(range(1, 13))
    # The loss is that of mlx-lm's reports.
    reported = [step for step, loss, *_ in run.steps if loss is not None]
    assert reported == [3, 6, 9, 12]
    assert run.losses[-1] < run.losses[0] - 0.3
    assert re.search(r"Iter 12: .*scale 2\^\d+, skipped 0", run.out)
    assert "Training float16 weights with LossScaleOptimizer(AdamW, Grad" in run.out
    assert (tmp_path / "ours.png").stat().st_size > 1000
    # mlx-lm's own files, and beside them the checkpoint.
    names = {path.name for path in (tmp_path / "plain").iterdir()}
    assert {path.name for path in run.folder.iterdir()} == names | {"checkpoint"}
    assert run.dtypes == {mx.float16}
    # Everything of mlx-lm's is as it was.
    assert mlx_lm.lora.train is trainer.train
    assert not hasattr(trainer, "range")


def test_full_fine_tuning_in_bfloat16_keeps_updates_that_mlx_lm_rounds_away(
    lora, mlx_lm_losses, place, tmp_path
):
    before = mx.load(str(place / "bfloat16/model.safetensors"))
    flags = (*FULL, "--learning-rate", "1e-5", "--iters", "20")

    def moved(weights):
        assert {x.dtype for x in weights.values()} == {mx.bfloat16}
        changed = sum(mx.sum(x != before[path]).item() for path, x in weights.items())
        return changed / sum(x.size for x in weights.values())

    mlx_lm_losses(*flags, model="bfloat16")
    plain = mx.load(str(tmp_path / "plain/adapters.safetensors"))
    ours = lora(
        "ours", *flags, model="bfloat16", command=lambda x: mlx_gradscale(["lora", *x])
    )
    # Twenty updates of 1e-5 add up to 2e-4, and a bfloat16 weight of 0.1 has steps of
    # 5e-4. A single update changes only the smallest weights.
    assert moved(plain) < 0.25
    assert moved(ours.weights) > 0.6


def test_bfloat16_run_prints_what_it_would_lose_at_its_highest_rate(lora, monkeypatch):
    config = "lr_schedule: {name: cosine_decay, warmup: 2, arguments: [1e-5, 20]}"
    flags = (*FULL, "--dtype", "bfloat16", "--iters", "6")

    def run(name, *more):
        ended = lora(name, *flags, *more, config=config)
        assert ended.code == 0
        return re.findall("Plain .*", ended.out), bits(ended.weights)

    [printed], weights = run("a")
    assert re.fullmatch(
        r"Plain bfloat16 would lose 8\d% of an update at 1e-5\.", printed
    )
    assert run("a", "--resume", "--iters", "7")[0] == []
    assert run("b", "--dtype", "float32")[0] == []
    # Asking uses up neither the batch nor a random number.
    monkeypatch.setattr(lora_training.Training, "_print_lost_updates", lambda *_: None)
    assert run("c") == ([], weights)


def test_float16_lora_follows_mlx_lm_in_float32(lora, mlx_lm_losses, monkeypatch):
    flags, load = (*SLOWER, "--batch-size", "4"), mlx_lm.lora.load

    def load_float32(*args, **kwargs):
        model, tokenizer = load(*args, **kwargs)
        model.set_dtype(mx.float32)
        return model, tokenizer

    with monkeypatch.context() as patch:
        patch.setattr(mlx_lm.lora, "load", load_float32)
        wanted = mlx_lm_losses(*flags)
    run = lora("ours", *flags, "--dtype", "float16", "--test")
    assert run.code == 0
    assert run.losses == pytest.approx(wanted, rel=0.02)
    config = json.loads((run.folder / "adapter_config.json").read_text())
    assert config["fine_tune_type"] == "lora"
    assert run.dtypes == {mx.float16}


def test_qlora_training_reduces_the_loss(lora):
    # Small: with quantized weights a token takes 5 ms on the CPU.
    run = lora("a", *SLOWER, "--batch-size", "1", model="quantized")
    assert run.losses[-1] < run.losses[0] - 0.1
    assert all(applied for *_, applied in run.steps)
    assert all("lora_" in name for name in run.weights)


CONFIG = """
grad_accumulation_steps: 2
max_grad_norm: 1.0
lora_parameters: {rank: 4, dropout: 0.2, scale: 2.0}
lr_schedule: {name: cosine_decay, arguments: [1e-2, 20]}
"""


class KilledError(Exception):
    """The end of a run that is killed."""


@pytest.mark.parametrize("kind", ["full", "lora", "dora"])
def test_killed_lora_run_resumes_bit_identically(kind, lora, tmp_path, monkeypatch):
    """With gradient checkpointing, or else with dropout, accumulation and a schedule.

    An epoch has 18 batches: from the sixth iteration into the second epoch.
    """
    flags, config = (*FULL, "--grad-checkpoint"), ""
    if kind != "full":
        flags, config = ("--fine-tune-type", kind, "--save-every", 5), CONFIG
    flags = (*flags, "--iters", "20", "--loss-scale", "dynamic")

    def run(name, *more):
        with monkeypatch.context() as patch:
            reports = collect_reports(patch)
            ended = lora(name, *flags, *more, config=config)
        out = re.sub(r"\x1b\[[\d;]*m", "", ended.out)
        printed = re.findall(r"^ +(\d+) +(\d\.\d+ .).* (\d\.\dk)", out, re.MULTILINE)
        return ended, reports, [row[::2] for row in printed], out

    whole, reports, printed, _ = run("whole")
    record = ScaleHistory.record

    def killed(self, source, step, **values):
        record(self, source, step=step, **values)
        if step == 8:
            raise KilledError

    with monkeypatch.context() as patch, contextlib.suppress(KilledError):
        patch.setattr(ScaleHistory, "record", killed)
        run("killed")
    assert ScaleHistory.load(tmp_path / "killed.csv").records[-1].step == 8
    resumed, reports_again, printed_again, out = run("killed", "--resume")
    assert resumed.steps == whole.steps
    # From iteration 7 on, with the same validation and numbers.
    assert len(reports_again) == 8
    assert reports_again == reports[-8:]
    assert len(printed) == 7
    assert printed_again == printed[2:]
    assert "100% ·    20/20" in out
    names = {path.name for path in whole.folder.iterdir()}
    assert {path.name for path in resumed.folder.iterdir()} == names
    assert len(names) > 5
    for name in (name for name in names if name.endswith(".safetensors")):
        one, other = (mx.load(str(x.folder / name)) for x in (whole, resumed))
        assert bits(one) == bits(other)


@pytest.mark.parametrize("kind", ["full", "lora"])
def test_grad_checkpoint_flag_changes_no_loss_or_weight_with_dropout(kind, lora):
    call = Block.__call__
    flags, config = (FULL, "") if kind == "full" else ((), CONFIG)
    runs = [
        lora(name, *flags, *more, "--iters", "4", config=config)
        for name, more in (("plain", ()), ("recomputed", ("--grad-checkpoint",)))
    ]
    assert runs[0].steps == runs[1].steps
    assert bits(runs[0].weights) == bits(runs[1].weights)
    assert Block.__call__ is call  # mlx-lm replaces it for the whole process


def test_lora_run_resumes_only_with_compatible_flags(lora):
    def run(name, iters, *more):
        often = "--save-every", "2", "--steps-per-report", "1"
        return lora(name, *SLOWER, *often, "--iters", iters, *more)

    for name in ("same", "slower", "refused"):
        assert run(name, 2).code == 0
    # A run that is done can be given more iterations.
    assert "All iterations are done." in run("same", 2, "--resume").out
    same = run("same", 4, "--resume").steps
    slower = run("slower", 4, "--resume", "--learning-rate", "1e-5").steps
    assert [step for step, *_ in same] == [1, 2, 3, 4]
    # The third loss is that of the weights before the first step at the new rate.
    assert same[:3] == slower[:3]
    assert slower[3][1] > same[3][1]
    for flags, sentence in (
        (("--batch-size", "4"), "but this one has batch_size=4"),
        (("--loss-scale", "off"), "but this one has loss_scale=1.0"),
    ):
        refused = run("refused", 4, "--resume", *flags)
        assert refused.code == 1
        assert sentence in refused.err


def test_lora_on_two_ranks_trains_the_same_as_on_one(lora, place, tmp_path):
    flags = (*FULL, "--max-grad-norm", 0.5, "--iters", 4, "--save-every", 2)
    given = arguments(place, tmp_path / "a", *flags)
    codes, two, output = run_ranks(2, tmp_path / "2", "lora_ranks.py", *given)
    assert codes == [0, 0], output
    assert two[0] == two[1]
    assert two[0]["size"] == 2
    # The same rows in one process: the norm of copies is not that of shards.
    norm = lora("alone", *flags).records[-1].grad_norm
    assert two[0]["norm"] == pytest.approx(norm, rel=0.05)
    # Resumed at 4, as without an interruption.
    resumed, whole = (
        run_ranks(2, tmp_path / name, "lora_ranks.py", *given, "--iters", "6", *more)
        for name, more in (
            ("resumed", ["--resume"]),
            ("whole", ["--adapter-path", str(tmp_path / "uninterrupted")]),
        )
    )
    assert resumed[0] == whole[0] == [0, 0], resumed[2] + whole[2]
    assert resumed[1] == whole[1]
    assert resumed[1][0]["weights"] == resumed[1][1]["weights"] != two[0]["weights"]


def test_unknown_lora_flag_is_a_usage_error(capsys):
    with pytest.raises(SystemExit) as exit_:
        main(["--los-scale", "8"])
    assert exit_.value.code == 2
    assert "unrecognized arguments: --los-scale 8" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ("--loss-scale much", "loss_scale must be dynamic, off or a positive"),
        ("--loss-scale 0", "scale must be between"),
        ("--max-grad-norm -1", "max_grad_norm must be a positive number, got -1"),
        ("--history run.txt", "path must end in .csv"),
        ("--float32-layers none.json", "none.json"),
        ("--resume", "There is no checkpoint in"),
        ("dtype: float8", "dtype must be one of float16, bfloat16, float32"),
        ("state_bits: none", "state_bits must be 32, 16 or 8, got"),
        ("loss_scale: [1, 2]", "off or a positive number, got [1, 2]"),
    ],
)
def test_wrong_value_of_a_lora_flag_is_a_one_line_error(flags, sentence, lora):
    is_flag = flags.startswith("--")
    run = lora("a", *flags.split()) if is_flag else lora("a", config=flags)
    assert run.code == 1
    assert sentence in run.err


def test_error_raised_by_mlx_lm_keeps_its_traceback(lora):
    with pytest.raises(ValueError, match="only has 2 layers"):
        lora("a", "--num-layers", "9")


@pytest.mark.parametrize(
    ("flags", "scale", "printed"),
    [
        ("--loss-scale off", 1.0, "float16 weights with LossScaleOptimizer(AdamW, "),
        ("--loss-scale 8", 8.0, "float16 weights with LossScaleOptimizer(AdamW, "),
        ("loss_scale: off\ndtype: bfloat16", 1.0, "bfloat16 weights with LossScale"),
        ("loss_scale: 64\nstate_bits: 16", 64.0, "float16 weights with LossScale"),
        ("--dtype bfloat16", 1.0, "bfloat16 weights with MasterWeightOptimizer(AdamW)"),
        ("--state-bits 8 --loss-scale 8", 8.0, "float16 weights with LossScale"),
    ],
)
def test_run_has_the_scale_dtype_and_state_bits_of_its_flags(
    flags, scale, printed, lora
):
    full = (*FULL, "--iters", "2")
    is_flag = flags.startswith("--")
    run = (
        lora("a", *full, *flags.split()) if is_flag else lora("a", *full, config=flags)
    )
    assert run.scales == [(scale, True)] * 2
    assert run.dtypes == {getattr(mx, printed.split()[0])}
    assert f"Training {printed}" in run.out
    assert re.findall(r"state_bits=(\d+)\)\n", run.out) == re.findall(
        r"state.bits:? (\d+)", flags
    )


def test_float32_layers_flag_applies_to_the_trained_model(lora, tmp_path, monkeypatch):
    file, seen = tmp_path / "layers.json", []
    Float32Search(["model.layers.1.mlp"]).save(file)
    evaluate = mlx_lm.lora.evaluate

    def look(*args, model, **kwargs):
        projection = model.layers[0].self_attn.q_proj
        mlp = computes_in_float32(model.layers[1].mlp)
        seen.append((mlp, type(projection).__name__))
        return evaluate(*args, model=model, **kwargs)

    monkeypatch.setattr(mlx_lm.lora, "evaluate", look)
    flags = ("--iters", "1", "--float32-layers", file, "--test")
    assert lora("a", *flags).code == 0
    assert lora("a", *flags, command=lambda x: main(x[1:])).code == 0
    assert seen == [(True, "LoRALinear")] * 2


def test_incompatible_mlx_lm_is_an_error_that_says_what_to_install(lora, monkeypatch):
    with monkeypatch.context() as patch:
        patch.delattr(mlx_lm.lora, "build_parser")
        run = lora("a")
    assert run.code == 1
    assert run.err.startswith("error: mlx-lm is missing or incompatible (")
    assert "tested with: pip install mlx-lm==0.32.2" in run.err
    assert "'build_parser'" in run.err
    monkeypatch.setattr(mlx_lm.lora, "run", lambda args: None)
    run = lora("a")
    assert run.code == 1
    assert "is incompatible" in run.err


def multiply_loss(monkeypatch, factor):
    def multiplied(model, *batch):
        loss, tokens = trainer.default_loss(model, *batch)
        return loss * factor, tokens

    monkeypatch.setattr(lora_training, "default_loss", multiplied)


def test_finding_the_first_scale_skips_no_lora_step(lora, monkeypatch):
    multiply_loss(monkeypatch, 1e4)
    run = lora("a", *FULL, "--iters", "2")
    assert [(scale < 65536, ok) for scale, ok in run.scales] == [(True, True)] * 2


@pytest.mark.parametrize("flags", [FULL, ()], ids=["full", "lora"])
def test_lora_run_that_cannot_train_says_what_to_run(flags, lora, monkeypatch):
    multiply_loss(monkeypatch, float("inf"))
    run = lora("a", *flags, "--iters", "3")
    assert run.code == 0
    first, last = run.err.splitlines()
    assert first.startswith("warning: The loss on this batch is ")
    assert last.startswith("warning: 3 of 3 steps were skipped because of non-finite")
    for line in (first, last):
        assert "call mlx_gradscale.diagnostics.explain_overflow()" in line


def test_mlx_lm_trains_with_the_loop_that_this_command_was_written_for():
    source = inspect.getsource(trainer.train)
    assert hashlib.sha256(source.encode()).hexdigest()[:16] == LOOP, (
        "mlx-lm's train() has changed. Read it beside trainers/lora_training.py, which "
        "relies on three things: the loop is range(1, args.iters + 1), zipped with "
        "iterate_batches(); it asks for a number when the iteration before is done; "
        "and TrainUI reports the trained tokens. If they hold and test_lora.py passes, "
        "set LOOP to the new value here."
    )


def test_lora_command_example_resumes(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "examples"))
    import lora_command

    rows = lora_command.main(["--iters", "4"])
    assert [row.split(",")[0] for row in rows] == ["step", "1", "2", "3", "4"]
