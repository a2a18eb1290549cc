"""``mlx_gradscale run``: a script without a change, and the summary at its end."""

import contextlib
import subprocess
import sys
from pathlib import Path

import pytest

from mlx_gradscale.__main__ import main
from mlx_gradscale.float32 import Float32Search

SCALER_STATE = str(Path(__file__).parents[1] / "golden/saved/0.1.0/scaler.json")
SCRIPT = """
import sys
import mlx.core as mx
import mlx.optimizers as optim
from mlx.nn import Linear, value_and_grad

model = Linear(4, 1)
model.set_dtype(mx.float16)
optimizer = optim.SGD(float(sys.argv[1]))
x = mx.ones((2, 4), mx.float16)
loss_and_grad = value_and_grad(model, lambda x: model(x).astype(mx.float32).mean())
for _ in range(3):
    loss, grads = loss_and_grad(x)
    optimizer.update(model, grads)
print(__name__, sys.argv[1:], model.weight.dtype, grads["weight"].dtype)
"""


def run(tmp_path, script, *flags, arguments=()):
    (tmp_path / "train.py").write_text(script)
    return main(["run", *flags, str(tmp_path / "train.py"), *arguments])


OTHER_MODEL = """
other = Linear(4, 1)
other.set_dtype(mx.float16)
value_and_grad(other, lambda x: other(x).astype(mx.float32).mean())(x)
optim.AdamW(0.1).update(other, {"weight": mx.ones((1, 4))})
"""


def test_unchanged_script_trains_in_float16(tmp_path, capsys):
    before = sys.argv, sys.path
    flags = ("--init-scale", "8")
    assert run(tmp_path, SCRIPT + OTHER_MODEL, *flags, arguments=("0.1", "--x")) == 0
    found = capsys.readouterr()
    dtypes = "mlx.core.float16 mlx.core.float32"
    assert found.out == f"__main__ ['0.1', '--x'] {dtypes}\n"
    # One line for each scaler and each optimizer.
    assert found.err.splitlines() == [
        "loss scale 8, 0 of 3 gradients overflowed",
        "SGD: 3 steps applied, 0 skipped",
        "loss scale 8, 0 of 1 gradients overflowed",
        "AdamW: 1 step applied, 0 skipped",
    ]
    assert (sys.argv, sys.path) == before


@pytest.mark.parametrize(
    ("end", "error", "n_warnings"),
    [("", None, 1), ("sys.exit(7)", SystemExit, 1), ("1 / 0", ZeroDivisionError, 0)],
)
def test_summary_is_printed_however_a_script_ends_and_warnings_unless_it_fails(
    end, error, n_warnings, tmp_path, capsys
):
    script = SCRIPT.replace("optimizer.update(model, grads)", "pass") + end
    raises = pytest.raises(error) if error else contextlib.nullcontext()
    with raises as raised:
        assert run(tmp_path, script, arguments=("0.1",)) == 0
    assert error is not SystemExit or raised.value.code == 7
    said = capsys.readouterr().err
    assert "0 of 3 gradients overflowed\n" in said
    assert said.count("warning: Only the losses of this") == n_warnings
    assert said.count("warning") == n_warnings


def test_optimizer_that_never_steps_is_not_in_the_summary(tmp_path, capsys):
    assert run(tmp_path, "import mlx.optimizers as o; optimizer = o.SGD(0.1)") == 0
    assert capsys.readouterr().err.startswith("No gradients were scaled")


def test_float32_script_computes_in_float16_with_compute_dtype(tmp_path, capsys):
    script = SCRIPT.replace("model.set_dtype(mx.float16)", "").replace(
        "lambda x: model(x)", "lambda x: print(model.weight.dtype) or model(x)"
    )
    assert run(tmp_path, script, "--compute-dtype", "float16", arguments=("0.1",)) == 0
    lines = capsys.readouterr().out.replace("mlx.core.", "").splitlines()
    assert set(lines[:-1]) == {"float16"}
    assert lines[-1].endswith("float32 float32")


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_warning_of_a_scaler_is_a_line_that_names_the_flag(dtype, tmp_path, capsys):
    script = SCRIPT.replace("mx.ones((2, 4), mx.float16)", "mx.ones((2, 4))")
    script = script.replace("mx.float16", f"mx.{dtype}")
    assert run(tmp_path, script, arguments=("0.1",)) == 0
    first, *rest = capsys.readouterr().err.splitlines()
    assert first.startswith(f"warning: Linear has {dtype} parameters, but the first")
    assert "warning" not in "".join(rest)
    assert f"pass --compute-dtype {dtype}. " in first
    assert run(tmp_path, script, "--compute-dtype", dtype, arguments=("0.1",)) == 0
    assert "warning" not in capsys.readouterr().err


OVERFLOWING = """
import mlx.core as mx, mlx.nn as nn, mlx.optimizers as optim

mx.random.seed(0)
model = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(3)))
model.set_dtype(mx.float16)
for layer, gain in zip(model.layers, (1.0, 3e4, 1e-4)):
    layer.weight = mx.eye(8, dtype=mx.float16) * gain
optimizer, state = optim.SGD(1e-6), [model.state]

def loss_fn(x):
    return model(x).astype(mx.float32).mean()

loss_and_grad = nn.value_and_grad(model, loss_fn)

def step(x):
    loss, grads = loss_and_grad(x)
    optimizer.update(model, grads)
    return loss

step = mx.compile(step, inputs=state, outputs=state)
for _ in range(3):
    mx.eval(step(mx.full((2, 8), 3.0, mx.float16)), state)
"""


def test_float32_layers_flag_fixes_a_script_that_overflows(tmp_path, capsys):
    with pytest.raises(SystemExit):
        run(tmp_path, OVERFLOWING + "raise SystemExit")
    first, scale, steps, last = capsys.readouterr().err.splitlines()
    remedy = "compute them in float32, pass --float32-layers auto."
    assert first.startswith("warning: The loss or the gradients of the first batch are")
    assert first.endswith(remedy)
    assert scale.endswith("3 of 3 gradients overflowed")
    assert steps == "SGD: 0 steps applied, 3 skipped"
    assert last.startswith("warning: The model was not trained: SGD skipped 3 of 3")
    assert last.endswith(remedy)
    file = str(tmp_path / "layers.json")
    Float32Search(["layers.1 to layers.2"]).save(file)
    for where, n_lines in ((file, 0), ("auto", 3)):
        assert run(tmp_path, OVERFLOWING, "--float32-layers", where) == 0
        *found, _, steps = capsys.readouterr().err.splitlines()
        assert steps == "SGD: 3 steps applied, 0 skipped"
        # Printed once, before the script has trained.
        assert len(found) == n_lines
        assert not found or found[1].startswith("  layers.1 to layers.2: Values reach")
        assert not found or found[2].startswith("Only 33.33% of the parameters could")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["nothere.py"], "the file nothere.py does not exist"),
        (["--init-scale", "0", __file__], "scale must be"),
        (["--max-grad-norm", "-1", __file__], "max_grad_norm must be a positive"),
        (["--moments", "float16", __file__], "invalid choice: 'float16'"),
        (["--float32-layers", "none.json", __file__], "none.json"),
        (["--float32-layers", SCALER_STATE, __file__], "does not contain a list"),
    ],
)
def test_wrong_arguments_are_an_error_before_the_script_runs(
    arguments, sentence, capsys
):
    with pytest.raises(SystemExit, match="2"):
        main(["run", *arguments])
    assert sentence in capsys.readouterr().err


def test_module_runs_as_main_and_its_exit_code_is_returned(tmp_path):
    (tmp_path / "trainer.py").write_text("import sys\nsys.exit(int(sys.argv[1]))\n")
    command = [sys.executable, "-m", "mlx_gradscale", "run", "-m", "trainer", "5"]
    assert subprocess.run(command, cwd=tmp_path, timeout=120).returncode == 5
