"""A restored run continues bit-identically; a mismatch changes nothing."""

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import pytest
from mlx.utils import tree_flatten, tree_unflatten
from support.checkpoint_runs import (
    KINDS,
    SCHEDULE,
    Run,
    bfloat16,
    half,
    scaler,
    unfrozen,
)
from support.helpers import OPTIMIZERS, bits
from support.optimizer_helpers import moments_of
from support.packed_moments import PackedAdamW, check_resume

from mlx_gradscale import (
    LossScaleOptimizer,
    MasterWeightOptimizer,
    restore_checkpoint,
    save_checkpoint,
)
from mlx_gradscale.core.state import STORAGES

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*computes in float32"),  # after a BatchNorm
    pytest.mark.filterwarnings("ignore:.*have no master weights"),
]


def started(kind, steps=6):
    run = KINDS[kind]()
    run.train(0, steps)
    return run


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=[pytest.mark.compiles] * kind.startswith("compiled"))
        for kind in KINDS
    ],
)
def test_run_restored_in_place_or_into_new_objects_resumes_bit_identically(
    kind, tmp_path
):
    run = started(kind)
    before = run.fingerprint()
    save_checkpoint(tmp_path / "run", *run.parts, step=6)
    assert run.fingerprint() == before  # saving changes nothing
    expected = run.train(6, 12)
    traces = run.traced.count
    assert restore_checkpoint(tmp_path / "run", *run.parts) == {"step": 6}
    assert run.train(6, 12) == expected
    if "compiled" in kind:
        assert run.traced.count == traces <= 2  # MLX's own state is made in the first
    mx.random.seed(1)
    for steps in (0, 2):
        other = started(kind, steps)
        restore_checkpoint(tmp_path / "run", *other.parts)
        assert other.train(6, 12) == expected


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("wrapped", [False, True])
def test_every_mlx_optimizer_resumes_bit_identically(name, wrapped, tmp_path):
    dtype = mx.float16 if wrapped else mx.float32

    def start():
        optimizer = OPTIMIZERS[name]()
        optimizer = LossScaleOptimizer(optimizer, scaler()) if wrapped else optimizer
        # Not one output: MLX on a CPU rounds products with a (1, n) weight differently
        # from run to run, because the strides of that axis depend on timing.
        model = nn.Sequential(nn.Linear(8, 6), nn.Linear(6, 2))
        model.set_dtype(dtype)
        return Run(optimizer, dtype=dtype, model=model)

    run = start()
    run.train(0, 1)
    save_checkpoint(tmp_path / "run", *run.parts)
    expected = run.train(1, 2)
    other = start()
    restore_checkpoint(tmp_path / "run", *other.parts)
    assert other.train(1, 2) == expected


def test_uninitialized_optimizer_can_be_saved_and_restored(tmp_path):
    run = Run(optim.AdamW(1e-2))
    save_checkpoint(tmp_path / "run", *run.parts)
    assert not run.optimizer._initialized
    expected = run.train(0, 3)
    other = Run(optim.AdamW(1e-2))
    restore_checkpoint(tmp_path / "run", *other.parts)
    assert other.train(0, 3) == expected
    with pytest.raises(ValueError, match=r"layers\.0\.bias\.m is missing in"):
        restore_checkpoint(tmp_path / "run", *other.parts)


def test_value_changed_since_the_last_step_is_restored(tmp_path):
    run = half(optim.AdamW(1e-2))
    run.train(0, 6)
    run.optimizer.learning_rate = 0.5
    run.model.layers[0].weight = run.model.layers[0].weight * 0.5
    # As a state of another program might have it: far from the weight.
    state = dict(tree_flatten(run.optimizer.state))
    state["masters.layers.0.bias"] = state["masters.layers.0.bias"] + 1
    run.optimizer.state = tree_unflatten(list(state.items()))
    save_checkpoint(tmp_path / "run", *run.parts)
    expected = run.train(6, 9)
    other = half(optim.AdamW(1e-2))
    restore_checkpoint(tmp_path / "run", *other.parts)
    assert other.train(6, 9) == expected


def state_of(run):
    parts = getattr(run.optimizer, "optimizers", [run.optimizer])
    ids = [id(part.state) for part in parts], [part._initialized for part in parts]
    return run.fingerprint(), ids


def few(bits, unfreeze=False):
    run = half(optim.SGD(0.1), state_bits=bits)
    if unfreeze:
        run.model.layers[1].unfreeze()
    return run


def other_model(**modules):
    run = KINDS["AdamW"]()
    for name, module in modules.items():
        setattr(run.model, name, module)
    return run


OTHERS = {
    "module": lambda: other_model(other=nn.Linear(2, 2)),
    "shape": lambda: other_model(norm=nn.BatchNorm(8)),
    "unfrozen": lambda: Run(optim.AdamW(1e-2), model=unfrozen()),
    "float16": lambda: Run(optim.AdamW(1e-2), dtype=mx.float16),
    "Adam": lambda: Run(optim.Adam(1e-2)),
    "betas": lambda: Run(optim.AdamW(1e-2, betas=[0.8, 0.9])),
    "wrapped": lambda: Run(half(optim.AdamW(1e-2)).optimizer),
    "other wrapper": lambda: bfloat16(dtype=mx.float16),
    "clips at 2": lambda: half(optim.AdamW(SCHEDULE), max_grad_norm=2.0),
} | {f"SGD, {n} bits": lambda n=n: few(n) for n in (32, 16, 8)}
OTHERS |= {f"unfrozen, {n} bits": lambda n=n: few(n, True) for n in (32, 16, 8)}
# The saved run, the run that is restored, and the error.
WRONG = [
    ("AdamW", "module", r"other\.bias is missing in the checkpoint"),
    ("AdamW", "shape", r"norm\.bias is float32 with shape \(16,\) .* shape \(8,\)"),
    ("AdamW", "unfrozen", r"layers\.1\.bias\.m is missing in the checkpoint.*freeze"),
    ("AdamW", "float16", "float32 with shape .* float16 with shape"),
    ("AdamW", "Adam", "saved with AdamW, but the optimizer is Adam"),
    ("AdamW", "betas", r"betas=\[0.9, 0.999\], but this one has betas=\[0.8, 0.9\]"),
    ("AdamW", "GradScaler", "Do not pass a scaler"),
    ("GradScaler", "AdamW", "Pass the scaler too"),
    ("AdamW", "wrapped", "with AdamW, but .* is LossScaleOptimizer, AdamW"),
    ("LossScaleOptimizer", "other wrapper", "is MasterWeightOptimizer, AdamW"),
    ("LossScaleOptimizer", "clips at 2", r"=1\.0, but this one has .*norm=2\.0"),
    ("SGD, 32 bits", "SGD, 16 bits", "state_bits=32.*state_bits=16"),
    *(
        (f"unfrozen, {n} bits", f"SGD, {n} bits", r"contains '.*\.layers\.1\.bias")
        for n in (32, 16, 8)
    ),
]


def initialize(run):
    run.optimizer.init(run.model.trainable_parameters())
    return run


@pytest.mark.parametrize(("saved", "other", "message"), WRONG)
@pytest.mark.parametrize("prepare", [lambda run: run, initialize])
def test_error_names_a_mismatch_and_restores_nothing(
    saved, other, message, prepare, tmp_path
):
    runs = KINDS | OTHERS
    save_checkpoint(tmp_path / "run", *initialize(runs[saved]()).parts)
    other = prepare(runs[other]())
    before = state_of(other)
    with pytest.raises(ValueError, match=message) as caught:
        restore_checkpoint(tmp_path / "run", *other.parts)
    assert "Nothing was changed" in str(caught.value)
    assert state_of(other) == before


def test_warning_about_a_missing_schedule_points_to_the_call(tmp_path):
    run = started("schedule", 1)
    save_checkpoint(tmp_path, *run.parts)
    other = Run(optim.AdamW(1e-2, bias_correction=True))
    with pytest.warns(UserWarning, match="schedule for learning_rate, but this") as w:
        restore_checkpoint(tmp_path, *other.parts)
    assert [warning.filename for warning in w] == [__file__]


def test_checkpoint_without_an_optimizer_says_how_to_load_its_weights(tmp_path):
    run = started("AdamW", 1)
    save_checkpoint(tmp_path, run.model, optim.Optimizer())
    with pytest.raises(ValueError, match=r"saved with Optimizer, .*load_weights\("):
        restore_checkpoint(tmp_path, *run.parts)
    model = started("AdamW", 2).model
    model.load_weights(str(tmp_path / "save-000001" / "model.safetensors"))
    assert bits(model.parameters()) == bits(run.model.parameters())


@pytest.mark.parametrize(
    ("place", "state_bits"),
    # A remainder is always finite, and so are the codes of moments.
    [("weight", 32), ("master", 32), ("weight", 16), ("moment", 16), ("weight", 8)],
)
def test_diverged_run_does_not_replace_a_good_checkpoint(place, state_bits, tmp_path):
    run = half(optim.AdamW(1e-2), state_bits=state_bits)
    run.train(0, 2)
    save_checkpoint(tmp_path / "run", *run.parts, step=2)
    layer, state = run.model.layers[2], run.optimizer.state
    if place == "weight":
        layer.weight *= float("nan")
    elif place == "master":
        state["masters"]["layers.2.weight"] *= float("nan")
    else:
        state["optimizer"]["layers"][2]["weight"]["m"] *= float("nan")
    with pytest.raises(ValueError, match=r"layers.2.weight.* contains NaN.*an earlier"):
        save_checkpoint(tmp_path / "run", *run.parts, step=3)
    assert restore_checkpoint(tmp_path / "run", *run.parts) == {"step": 2}
    assert mx.isfinite(layer.weight).all().item()


def test_wrong_arguments_and_open_iterations_raise_before_anything_is_written(tmp_path):
    run = KINDS["AdamW"]()
    with pytest.raises(AttributeError, match=r"'AdamW' .* no attribute 'parameters'"):
        save_checkpoint(tmp_path / "run", run.optimizer, run.model)
    with pytest.raises(TypeError, match=r"must be a GradScaler, got 5\. .* step=5"):
        save_checkpoint(tmp_path / "run", run.model, run.optimizer, 5)
    run = KINDS["GradScaler"]()
    run.scaler.unscale_(run.optimizer, {"w": run.scaler.scale(mx.ones(2))})
    with pytest.raises(RuntimeError, match="between iterations"):
        save_checkpoint(tmp_path / "run", *run.parts)
    run = KINDS["LossScaleOptimizer"]()
    with pytest.raises(ValueError, match="has its own scaler"):
        save_checkpoint(tmp_path / "run", run.model, run.optimizer, scaler())
    with pytest.raises(ValueError, match="keep must be 1 or more, got 0"):
        save_checkpoint(tmp_path / "run", *run.parts, keep=0)
    with pytest.raises(FileNotFoundError, match="There is no checkpoint in"):
        restore_checkpoint(tmp_path / "none", *run.parts)
    assert not list(tmp_path.iterdir())


class TupleState(optim.SGD):
    def init_single(self, parameter, state):
        state["pair"] = (parameter, 1)


def test_optimizer_state_with_arrays_in_a_tuple_is_not_saved(tmp_path):
    model, optimizer = nn.Linear(2, 2), TupleState(0.1)
    optimizer.init(model.trainable_parameters())
    with pytest.raises(TypeError, match=r"'weight\.pair\.0' in a tuple.*Use a list"):
        save_checkpoint(tmp_path / "run", model, optimizer)


def test_tuple_of_arrays_in_a_model_is_a_constant(tmp_path):
    runs = [Run(optim.SGD(0.1)) for _ in range(2)]
    for run in runs:
        run.model.pair = (mx.ones(2), mx.zeros(2))
    save_checkpoint(tmp_path / "run", *runs[0].parts)
    restore_checkpoint(tmp_path / "run", *runs[1].parts)
    assert runs[0].fingerprint() == runs[1].fingerprint()


class Late(optim.Optimizer):
    """Like some of mlx-optimizers: numbers, text, a state made in the first step."""

    def __init__(self):
        super().__init__()
        self._maybe_schedule("learning_rate", lambda step: 1 / (1 + step.item()))

    def init_single(self, parameter, state):
        state["count"] = 0
        state["shape"] = ("ab->ba", (parameter.ndim, None))

    def apply_single(self, gradient, parameter, state):
        state["count"] += 1
        state["first"] = state.get("first", gradient)
        return parameter - state["first"] / state["count"]


@pytest.mark.parametrize("wrapped", [False, True])
def test_state_that_grows_in_the_first_step_and_python_numbers_are_restored(
    wrapped, tmp_path
):
    def start():
        return nn.Linear(2, 2), MasterWeightOptimizer(Late()) if wrapped else Late()

    model, optimizer = start()
    for _ in range(2):
        optimizer.update(model, model.parameters())
    save_checkpoint(tmp_path / "run", model, optimizer)
    other = start()
    restore_checkpoint(tmp_path / "run", *other)
    inner = other[1].optimizer if wrapped else other[1]
    assert type(inner.state["bias"]["count"]) is int
    assert (inner.state["bias"]["count"], float(inner.learning_rate)) == (2, 0.5)
    for parts in ((model, optimizer), other):
        parts[1].update(parts[0], parts[0].parameters())
    assert bits(other[0].parameters()) == bits(model.parameters())


@pytest.mark.parametrize(("ready", "few"), [(False, 16), (True, 16), (True, 8)])
def test_checkpoint_with_fewer_bits_restores_decoded_into_32(ready, few, tmp_path):
    run, other = (half(optim.AdamW(1e-2), state_bits=n) for n in (few, 32))
    run.train(0, 6)
    save_checkpoint(tmp_path / "run", *run.parts)
    if ready:
        other.train(0, 2)
    restore_checkpoint(tmp_path / "run", *other.parts)
    masters, decoded = (
        dict(tree_flatten(x.optimizer.masters(x.model.trainable_parameters())))
        for x in (run, other)
    )
    assert bits(decoded) == bits(masters)
    assert bits(run.model.parameters()) == bits(other.model.parameters())
    inner = run.optimizer.optimizer
    found = [list(moments_of(x.optimizer.optimizer)) for x in (run, other)]
    for (_, box), (_, decoded) in zip(*found, strict=True):
        assert bits(decoded) == bits(STORAGES[few].decode(inner, box))
    # The decoded masters are those of the next step.
    other.optimizer.learning_rate = 0.0
    other.optimizer.weight_decay = 0.0
    other.train(6, 7)
    after = other.optimizer.masters(other.model.trainable_parameters())
    assert bits(dict(tree_flatten(after))) == bits(masters)


def test_optimizer_that_packs_its_moments_resumes_bit_identically(tmp_path):
    check_resume(lambda: PackedAdamW(1e-2), tmp_path)
