"""``GradScaler``: state dicts, files, copies."""

import copy
import json
import pickle

import mlx.core as mx
import mlx.optimizers as optim
import numpy as np
import pytest
from support.helpers import INF, NAN, bits, same
from support.scaler_helpers import apply

from mlx_gradscale import GradScaler, torch_checkpoint
from mlx_gradscale.diagnostics import SkipAlarm

pytestmark = pytest.mark.core


def trained(**settings):
    scaler, optimizer = GradScaler(**settings), optim.SGD(0.1)
    for value in (1.0, INF, 1.0, 1.0):
        apply(scaler, optimizer, value)
        scaler.update()
    return scaler


def test_the_state_dict_is_pytorchs_with_its_types():
    state = GradScaler(init_scale=4, growth_factor=1.1).state_dict()
    assert state == {
        "scale": 4.0,
        "growth_factor": 1.1,
        "backoff_factor": 0.5,
        "growth_interval": 2000,
        "_growth_tracker": 0,
    }
    assert [type(x) for x in state.values()] == [float, float, float, int, int]


def test_own_settings_are_saved_only_where_they_differ():
    state = trained(backoff_interval=3, min_scale=1.0).state_dict()
    extra = set(state) - set(GradScaler().state_dict())
    assert extra == {"backoff_interval", "min_scale", "skipped_steps"}


@pytest.mark.parametrize(
    "suffix", [".json", ".json.gz", ".safetensors", ".pt", ".pt.gz"]
)
def test_files_give_back_the_whole_state(tmp_path, suffix):
    scaler = trained(growth_factor=1.5, backoff_interval=2, max_scale=2.0**30)
    path = tmp_path / f"scaler{suffix}"
    scaler.save(path)
    other = GradScaler()
    state = other.state
    other.load(path)
    assert other.state is state
    assert other.state_dict() == scaler.state_dict()
    assert same(other.state, scaler.state)
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


@pytest.mark.parametrize("copied", [copy.deepcopy, copy.copy, None])
def test_pickle_and_copy_between_iterations(copied):
    scaler = trained(growth_interval=3)
    other = copied(scaler) if copied else pickle.loads(pickle.dumps(scaler))
    assert other.state_dict() == scaler.state_dict()
    assert other.state is not scaler.state
    apply(scaler, optimizer := optim.SGD(0.1), 1.0)
    with pytest.raises(RuntimeError, match="between iterations"):
        pickle.dumps(scaler)
    scaler.update()
    pickle.dumps(scaler)
    assert optimizer.step.item() == 1


class Named(GradScaler):
    def __init__(self, name):
        super().__init__(init_scale=4.0)
        self.name = name


@pytest.mark.parametrize("copied", [copy.deepcopy, copy.copy, None])
def test_copies_of_a_subclass_keep_what_it_added(copied):
    scaler = Named("run")
    other = copied(scaler) if copied else pickle.loads(pickle.dumps(scaler))
    assert (type(other), other.name, other.get_scale()) == (Named, "run", 4.0)


@pytest.mark.parametrize("copied", [copy.deepcopy, None])
def test_copies_keep_the_alarm_and_not_the_gradients_it_has_seen(copied):
    scaler = GradScaler()
    explain = lambda: "a closure, which pickle refuses"  # noqa: E731
    for alarm in (SkipAlarm(7, "raise", explain), None):
        scaler.skip_alarm = alarm
        apply(scaler, optim.SGD(0.1), 1.0)
        scaler.update()
        other = copied(scaler) if copied else pickle.loads(pickle.dumps(scaler))
        kept = other.skip_alarm
        if alarm is None:
            assert kept is None
        else:
            assert (kept.limit, kept.action, kept is alarm) == (7, "raise", False)
    assert pickle.loads(pickle.dumps(GradScaler())).skip_alarm.limit == 50


GOOD = GradScaler(init_scale=512.0).state_dict()


@pytest.mark.parametrize(
    "bad",
    [
        {},
        [1],
        "state",
        {k: v for k, v in GOOD.items() if k != "_growth_tracker"},
        {"scale": 2.0},
        {**GOOD, "scale": "abc"},
        {**GOOD, "scale": 0.0},
        {**GOOD, "scale": NAN},
        {**GOOD, "scale": True},
        {**GOOD, "growth_factor": 0.5},
        {**GOOD, "backoff_factor": 9},
        {**GOOD, "growth_interval": 0},
        {**GOOD, "growth_interval": 3.7},
        {**GOOD, "_growth_tracker": -1},
        {**GOOD, "_growth_tracker": 3.7},
        {**GOOD, "backoff_interval": 0},
        {**GOOD, "min_scale": 1024.0},
        {**GOOD, "dynamic": 3},
    ],
    ids=str,
)
def test_a_bad_state_dict_changes_nothing(bad):
    scaler = trained()
    before = bits(scaler.state)
    with pytest.raises((TypeError, ValueError, KeyError, RuntimeError)):
        scaler.load_state_dict(bad)
    assert bits(scaler.state) == before


def test_extra_keys_are_ignored_and_scalars_of_other_kinds_taken():
    scaler = GradScaler(backoff_interval=3)
    scaler.load_state_dict(
        {**GOOD, "scale": mx.array(2.0), "_growth_tracker": np.int64(7), "new": object}
    )
    assert scaler.state_dict() == {
        **GOOD,
        "scale": 2.0,
        "_growth_tracker": 7,
        "backoff_interval": 3,
    }


@pytest.mark.parametrize("suffix", [".json", ".json.gz", ".safetensors", ".pt"])
@pytest.mark.parametrize("content", [b"", b"nonsense", b"[1, 2]", None])
def test_a_truncated_or_foreign_file_changes_nothing(tmp_path, suffix, content):
    path = tmp_path / f"scaler{suffix}"
    if content is None:
        trained().save(path)
        content = path.read_bytes()[:-9]
    path.write_bytes(content)
    scaler = GradScaler()
    with pytest.raises(ValueError, match="scaler"):
        scaler.load(path)
    assert scaler.state_dict() == GradScaler().state_dict()


def test_a_file_that_unpacks_to_too_much_is_refused(tmp_path):
    import gzip

    path = tmp_path / "bomb.json.gz"
    path.write_bytes(gzip.compress(b" " * 2**24))
    with pytest.raises(ValueError, match="holds more"):
        GradScaler().load(path)


def test_a_damaged_gzip_is_a_value_error(tmp_path):
    path = tmp_path / "scaler.json.gz"
    trained().save(path)
    data = bytearray(path.read_bytes())
    data[10] ^= 1
    path.write_bytes(data)
    with pytest.raises(ValueError, match="scaler"):
        GradScaler().load(path)


def test_an_unknown_suffix_names_the_known_ones(tmp_path):
    with pytest.raises(ValueError, match=r"\.safetensors"):
        GradScaler().save(tmp_path / "scaler.bin")
    with pytest.raises(FileNotFoundError):
        GradScaler().load(tmp_path / "missing.json")


def test_a_failed_save_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "scaler.json"
    GradScaler(init_scale=2.0).save(path)
    monkeypatch.setattr(json, "dumps", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        GradScaler(init_scale=4.0).save(path)
    monkeypatch.undo()
    assert json.loads(path.read_text())["scale"] == 2.0
    assert len(list(tmp_path.iterdir())) == 1


def test_a_whole_checkpoint_says_where_the_scaler_is(tmp_path):
    scaler = GradScaler()
    whole = {"epoch": 3, "scaler": scaler.state_dict()}
    with pytest.raises(KeyError, match="load its 'scaler'"):
        scaler.load_state_dict(whole)
    torch_checkpoint.save(tmp_path / "run.pt", whole | {"model": mx.zeros(2**19)})
    with pytest.raises(ValueError, match=r'torch_checkpoint.load\(path\)\["scaler"\]'):
        scaler.load(tmp_path / "run.pt")
