"""``mlx_gradscale lora``: mlx-lm's command on a model folder that is made here."""

import contextlib
import hashlib
import inspect
import json
import math
import re
import sys
import types
from pathlib import Path

import mlx.core as mx
import pytest

pytest.importorskip("mlx_lm", reason="mlx-lm is not installed")
import mlx_lm.lora
import mlx_lm.tuner.trainer as trainer
from mlx_lm.models.llama import TransformerBlock as Block
from support.helpers import bits
from support.lora_parts import make_data, make_model
from support.ring import run_ranks

from mlx_gradscale.__main__ import main as command
from mlx_gradscale.diagnostics import ScaleHistory
from mlx_gradscale.float32 import Float32Search
from mlx_gradscale.float32.layers import computes_in_float32
from mlx_gradscale.trainers import lora_training
from mlx_gradscale.trainers.lora import main

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:.*swig.*")


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lora")
    make_model(folder / "model")
    make_model(folder / "quantized", quantize=True)
    make_model(folder / "bfloat16", dtype=mx.bfloat16)
    make_data(folder / "data")
    return folder


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


def arguments(place, adapters, *others, model="model"):
    paths = "--model", place / model, "--data", place / "data"
    return list(map(str, (*FLAGS, *paths, "--adapter-path", adapters, *others)))


def weights_in(folder):
    return mx.load(str(folder / "adapters.safetensors"))


def steps(path):
    records = ScaleHistory.load(path).records
    return [(r.step, r.loss, r.scale, r.applied) for r in records]


def losses(path):
    return [r.loss for r in ScaleHistory.load(path).records if r.loss is not None]


def collect_reports(monkeypatch):
    """Return a list that gets what mlx-lm reports to wandb, without times."""
    found = []

    def add(info):
        names = "iteration", "train_loss", "val_loss", "learning_rate", "trained_tokens"
        found.append({name: info[name] for name in names if name in info})

    report = types.SimpleNamespace(on_train_loss_report=add, on_val_loss_report=add)
    monkeypatch.setattr(mlx_lm.lora, "get_reporting_callbacks", lambda *a, **k: report)
    return found


def mlx_lm_losses(monkeypatch, arguments):
    """Run ``mlx_lm.lora`` itself, and return the losses that it reports."""
    found = collect_reports(monkeypatch)
    monkeypatch.setattr(sys, "argv", ["mlx_lm.lora", *arguments])
    mlx_lm.lora.main()
    return [report["train_loss"] for report in found if "train_loss" in report]


def test_full_float16_fine_tuning_learns_where_mlx_lm_gives_nan(
    place, tmp_path, monkeypatch, capsys
):
    plain = mlx_lm_losses(monkeypatch, arguments(place, tmp_path / "plain", *FULL))
    assert all(map(math.isnan, plain))
    history = tmp_path / "run.csv"
    ours = arguments(place, tmp_path / "ours", *FULL, "--history", history)
    capsys.readouterr()
    assert main(ours) == 0
    out = capsys.readouterr().out
    found = steps(history)
    assert [step for step, *_ in found] == list(range(1, 13))
    # The loss is that of mlx-lm's reports.
    assert [step for step, loss, *_ in found if loss is not None] == [3, 6, 9, 12]
    assert losses(history)[-1] < losses(history)[0] - 0.3
    assert re.search(r"Iter 12: .*scale 2\^\d+, skipped 0", out)
    line = (
        r"Training float16 weights with LossScaleOptimizer\(AdamW, GradScaler\(scale="
    )
    assert re.search(line, out)
    assert history.with_suffix(".png").stat().st_size > 1000
    # mlx-lm's own files, and beside them the checkpoint.
    names = {path.name for path in (tmp_path / "plain").iterdir()}
    assert {p.name for p in (tmp_path / "ours").iterdir()} == names | {"checkpoint"}
    saved = weights_in(tmp_path / "ours")
    assert {x.dtype for x in saved.values()} == {mx.float16}
    # Everything of mlx-lm's is as it was.
    assert mlx_lm.lora.train is trainer.train


def test_full_fine_tuning_in_bfloat16_keeps_updates_that_mlx_lm_rounds_away(
    place, tmp_path, monkeypatch
):
    before = mx.load(str(place / "bfloat16/model.safetensors"))
    flags = (*FULL, "--learning-rate", "1e-5", "--iters", "20")

    def moved(name):
        found = weights_in(tmp_path / name)
        assert {x.dtype for x in found.values()} == {mx.bfloat16}
        changed = sum(mx.sum(x != before[path]).item() for path, x in found.items())
        return changed / sum(x.size for x in found.values())

    given = [
        arguments(place, tmp_path / name, *flags, model="bfloat16") for name in "ab"
    ]
    mlx_lm_losses(monkeypatch, given[0])
    assert command(["lora", *given[1]]) == 0
    # Twenty updates of 1e-5 add up to 2e-4, and a bfloat16 weight of 0.1 has steps of
    # 5e-4. A single update changes only the smallest weights.
    assert moved("a") < 0.25
    assert moved("b") > 0.6


def test_bfloat16_run_prints_what_it_would_lose_at_its_highest_rate(
    place, tmp_path, monkeypatch, capsys
):
    rates = "{name: cosine_decay, warmup: 2, arguments: [1e-5, 20]}"
    given = (*FULL, "--dtype", "bfloat16", *yaml(tmp_path, f"lr_schedule: {rates}"))

    def run(name, *more):
        given_here = arguments(place, tmp_path / name, *given, "--iters", "6", *more)
        assert main(given_here) == 0
        weights = weights_in(tmp_path / name)
        return re.findall("Plain .*", capsys.readouterr().out), bits(weights)

    printed, weights = run("a")
    assert re.fullmatch(
        r"Plain bfloat16 would lose 8\d% of an update at 1e-5\.", *printed
    )
    assert run("a", "--resume", "--iters", "7")[0] == []
    assert run("b", "--dtype", "float32")[0] == []
    # Asking uses up neither the batch nor a random number.
    monkeypatch.setattr(lora_training.Training, "_print_lost_updates", lambda *_: None)
    assert run("c") == ([], weights)


def test_float16_lora_follows_mlx_lm_in_float32(place, tmp_path, monkeypatch):
    flags = (*SLOWER, "--batch-size", "4")
    load = mlx_lm.lora.load

    def load_float32(*args, **kwargs):
        model, tokenizer = load(*args, **kwargs)
        model.set_dtype(mx.float32)
        return model, tokenizer

    with monkeypatch.context() as patch:
        patch.setattr(mlx_lm.lora, "load", load_float32)
        reference = arguments(place, tmp_path / "plain", *flags)
        wanted = mlx_lm_losses(patch, reference)
    history = tmp_path / "run.csv"
    given = arguments(place, tmp_path / "ours", *flags, "--history", history)
    assert main([*given, "--dtype", "float16", "--test"]) == 0
    assert losses(history) == pytest.approx(wanted, rel=0.02)
    config = json.loads((tmp_path / "ours/adapter_config.json").read_text())
    assert config["fine_tune_type"] == "lora"
    saved = weights_in(tmp_path / "ours")
    assert {x.dtype for x in saved.values()} == {mx.float16}


def test_qlora_training_reduces_the_loss(place, tmp_path):
    history = tmp_path / "run.csv"
    # Small: with quantized weights a token takes 5 ms on the CPU.
    flags = (*SLOWER, "--history", history, "--batch-size", "1")
    given = arguments(place, tmp_path / "a", *flags, model="quantized")
    assert main(given) == 0
    assert losses(history)[-1] < losses(history)[0] - 0.1
    assert all(applied for *_, applied in steps(history))
    saved = weights_in(tmp_path / "a")
    assert all("lora_" in name for name in saved)


def yaml(folder, text):
    """Return the flags for a YAML file with this text."""
    (folder / "config.yaml").write_text(text)
    return ["-c", folder / "config.yaml"]


CONFIG = """
grad_accumulation_steps: 2
max_grad_norm: 1.0
lora_parameters: {rank: 4, dropout: 0.2, scale: 2.0}
lr_schedule: {name: cosine_decay, arguments: [1e-2, 20]}
"""


@pytest.mark.parametrize("kind", ["full", "lora", "dora"])
def test_killed_lora_run_resumes_bit_identically(
    kind, place, tmp_path, monkeypatch, capsys
):
    """With gradient checkpointing, or else with dropout, accumulation and a schedule.

    An epoch has 18 batches: from the sixth iteration into the second epoch.
    """
    others = (*FULL, "--grad-checkpoint")
    if kind != "full":
        others = ("--fine-tune-type", kind, "--save-every", 5, *yaml(tmp_path, CONFIG))
    others = (*others, "--iters", "20", "--loss-scale", "dynamic")

    def run(name, *more):
        given = arguments(place, tmp_path / name, *others, *more)
        capsys.readouterr()
        with monkeypatch.context() as patch:
            reports = collect_reports(patch)
            with contextlib.suppress(KilledError):
                main([*given, "--history", str(tmp_path / f"{name}.csv")])
        out = re.sub(r"\x1b\[[\d;]*m", "", capsys.readouterr().out)
        printed = re.findall(r"^ +(\d+) +(\d\.\d+ .).* (\d\.\dk)", out, re.MULTILINE)
        return reports, printed, out

    whole, printed, _ = run("whole")
    record = ScaleHistory.record

    def killed(self, source, step, **values):
        record(self, source, step=step, **values)
        if step == 8:
            raise KilledError

    with monkeypatch.context() as patch:
        patch.setattr(ScaleHistory, "record", killed)
        run("killed")
    assert steps(tmp_path / "killed.csv") == steps(tmp_path / "whole.csv")[:8]
    resumed, printed_again, out = run("killed", "--resume")
    assert steps(tmp_path / "killed.csv") == steps(tmp_path / "whole.csv")
    # From iteration 7 on, with the same validation and numbers.
    assert len(resumed) == 8
    assert resumed == whole[-8:]
    assert len(printed) == 7
    assert [row[::2] for row in printed_again] == [row[::2] for row in printed[2:]]
    assert "100% ·    20/20" in out
    names = {path.name for path in (tmp_path / "whole").iterdir()}
    assert {path.name for path in (tmp_path / "killed").iterdir()} == names
    assert len(names) > 5
    for name in (name for name in names if name.endswith(".safetensors")):
        one, other = (mx.load(str(tmp_path / x / name)) for x in ("whole", "killed"))
        assert all(mx.array_equal(one[path], other[path]) for path in one)


@pytest.mark.parametrize("kind", ["full", "lora"])
def test_grad_checkpoint_flag_changes_no_loss_or_weight_with_dropout(
    kind, place, tmp_path
):
    call = Block.__call__
    more = (*FULL,) if kind == "full" else yaml(tmp_path, CONFIG)
    found = []
    for flags in ((), ("--grad-checkpoint",)):
        folder = tmp_path / f"{kind}{len(flags)}"
        given = (*more, *flags, "--iters", "4", "--history", f"{folder}.csv")
        assert main(arguments(place, folder, *given)) == 0
        weights = weights_in(folder)
        found.append((steps(f"{folder}.csv"), bits(weights)))
    assert found[0] == found[1]
    assert Block.__call__ is call  # mlx-lm replaces it for the whole process


class KilledError(Exception):
    """The end of a run that is killed."""


def test_lora_run_resumes_only_with_compatible_flags(place, tmp_path, capsys):
    def run(name, *more):
        given = arguments(place, tmp_path / name, *SLOWER, "--save-every", "2", *more)
        given += ["--steps-per-report", "1"]
        code = main([*given, "--history", str(tmp_path / f"{name}.csv")])
        return code, capsys.readouterr()

    for name in ("same", "slower", "refused"):
        assert run(name, "--iters", "2")[0] == 0
    # A run that is done can be given more iterations.
    _, said = run("same", "--iters", "2", "--resume")
    assert "All iterations are done." in said.out
    run("same", "--iters", "4", "--resume")
    run("slower", "--iters", "4", "--resume", "--learning-rate", "1e-5")
    same, slower = (steps(tmp_path / f"{n}.csv") for n in ("same", "slower"))
    assert [step for step, *_ in same] == [1, 2, 3, 4]
    # The third loss is that of the weights before the first step at the new rate.
    assert same[:3] == slower[:3]
    assert slower[3][1] > same[3][1]
    for flags, sentence in (
        (("--batch-size", "4"), "but this one has batch_size=4"),
        (("--loss-scale", "off"), "but this one has loss_scale=1.0"),
    ):
        code, said = run("refused", "--iters", "4", "--resume", *flags)
        assert code == 1
        assert sentence in said.err


def test_lora_on_two_ranks_trains_the_same_as_on_one(place, tmp_path):
    given = arguments(place, tmp_path / "a", *FULL, "--max-grad-norm", "0.5")
    given += ["--iters", "4", "--save-every", "2"]
    codes, two, output = run_ranks(2, tmp_path / "2", "lora_ranks.py", *given)
    assert codes == [0, 0], output
    assert two[0] == two[1]
    assert two[0]["size"] == 2
    # The same rows in one process: the norm of copies is not that of shards.
    history = tmp_path / "one.csv"
    alone = [*given, "--adapter-path", str(tmp_path / "b"), "--history", str(history)]
    assert main(alone) == 0
    norm = ScaleHistory.load(history).records[-1].grad_norm
    assert two[0]["norm"] == pytest.approx(norm, rel=0.05)
    # Resumed at 4, as without an interruption.
    resumed, whole = (
        run_ranks(2, tmp_path / name, "lora_ranks.py", *given, "--iters", "6", *more)
        for name, more in (
            ("resumed", ["--resume"]),
            ("whole", ["--adapter-path", str(tmp_path / "whole")]),
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
        (["--loss-scale", "much"], "loss_scale must be dynamic, off or a positive"),
        (["--loss-scale", "0"], "scale must be between"),
        (["--max-grad-norm", "-1"], "max_grad_norm must be a positive number, got -1"),
        (["--history", "run.txt"], "path must end in .csv"),
        (["--float32-layers", "none.json"], "none.json"),
        (["--resume"], "There is no checkpoint in"),
        (["-c", "dtype: float8"], "dtype must be one of float16, bfloat16, float32"),
        (["-c", "state_bits: none"], "state_bits must be 32, 16 or 8, got"),
        (["-c", "loss_scale: [1, 2]"], "off or a positive number, got [1, 2]"),
    ],
)
def test_wrong_value_of_a_lora_flag_is_a_one_line_error(
    flags, sentence, place, tmp_path, capsys
):
    if flags[0] == "-c":
        flags = yaml(tmp_path, flags[1])
    assert main(arguments(place, tmp_path / "a", *flags)) == 1
    assert sentence in capsys.readouterr().err


def test_error_raised_by_mlx_lm_keeps_its_traceback(place, tmp_path):
    with pytest.raises(ValueError, match="only has 2 layers"):
        main(arguments(place, tmp_path / "a", "--num-layers", "9"))


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
    flags, scale, printed, place, tmp_path, capsys
):
    history, is_yaml = tmp_path / "run.csv", not flags.startswith("--")
    found = yaml(tmp_path, flags) if is_yaml else flags.split()
    found = (*FULL, "--iters", "2", *found, "--history", history)
    assert main(arguments(place, tmp_path / "a", *found)) == 0
    assert [(s, ok) for *_, s, ok in steps(history)] == [(scale, True)] * 2
    dtypes = {x.dtype for x in weights_in(tmp_path / "a").values()}
    assert dtypes == {getattr(mx, printed.split()[0])}
    out = capsys.readouterr().out
    assert f"Training {printed}" in out
    bits_in_flags = re.findall(r"state.bits:? (\d+)", flags)
    assert re.findall(r"state_bits=(\d+)\)\n", out) == bits_in_flags


def test_float32_layers_flag_applies_to_the_trained_model(place, tmp_path, monkeypatch):
    file, seen = tmp_path / "layers.json", []
    Float32Search(["model.layers.1.mlp"]).save(file)
    evaluate = mlx_lm.lora.evaluate

    def look(*args, model, **kwargs):
        projection = model.layers[0].self_attn.q_proj
        mlp = computes_in_float32(model.layers[1].mlp)
        seen.append((mlp, type(projection).__name__))
        return evaluate(*args, model=model, **kwargs)

    monkeypatch.setattr(mlx_lm.lora, "evaluate", look)
    flags = ("--iters", "1", "--float32-layers", file)
    assert main(arguments(place, tmp_path / "a", *flags, "--test")) == 0
    only_test = [x for x in arguments(place, tmp_path / "a", *flags) if x != "--train"]
    assert main([*only_test, "--test"]) == 0
    assert seen == [(True, "LoRALinear")] * 2


def test_incompatible_mlx_lm_is_an_error_that_says_what_to_install(
    place, tmp_path, monkeypatch, capsys
):
    given = arguments(place, tmp_path / "a")
    with monkeypatch.context() as patch:
        patch.delattr(mlx_lm.lora, "build_parser")
        assert main(given) == 1
    said = capsys.readouterr().err
    assert said.startswith("error: mlx-lm is missing or incompatible (")
    assert "tested with: pip install mlx-lm==0.32.2" in said
    assert "'build_parser'" in said
    with monkeypatch.context() as patch:
        patch.setattr(mlx_lm.lora, "run", lambda args: None)
        assert main(given) == 1
    assert "is incompatible" in capsys.readouterr().err


def multiply_loss(monkeypatch, factor):
    def multiplied(model, *batch):
        loss, tokens = trainer.default_loss(model, *batch)
        return loss * factor, tokens

    monkeypatch.setattr(lora_training, "default_loss", multiplied)


def test_finding_the_first_scale_skips_no_lora_step(place, tmp_path, monkeypatch):
    multiply_loss(monkeypatch, 1e4)
    history = tmp_path / "run.csv"
    flags = ("--iters", "2", "--history", history)
    assert main(arguments(place, tmp_path / "a", *FULL, *flags)) == 0
    assert [(s < 65536, ok) for *_, s, ok in steps(history)] == [(True, True)] * 2


@pytest.mark.parametrize("flags", [FULL, ()], ids=["full", "lora"])
def test_lora_run_that_cannot_train_says_what_to_run(
    flags, place, tmp_path, monkeypatch, capsys
):
    multiply_loss(monkeypatch, float("inf"))
    assert main(arguments(place, tmp_path / "a", *flags, "--iters", "3")) == 0
    first, last = capsys.readouterr().err.splitlines()
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
