"""``GradScaler.save`` and ``load``: every format gives back the whole state."""

import gzip
import tracemalloc

import mlx.core as mx
import pytest
from support.helpers import same

from mlx_gradscale import GradScaler, torch_checkpoint

SUFFIXES = [".json", ".json.gz", ".safetensors", ".pt", ".pt.gz"]
CHANGED = {"_growth_tracker": 7, "skipped_steps": 3}


def changed():
    """A scaler none of whose values is at its default."""
    scaler = GradScaler(512.0, growth_factor=1.1, backoff_interval=2, max_scale=2.0**30)
    scaler.load_state_dict(scaler.state_dict() | CHANGED)
    return scaler


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_scaler_file_restores_the_whole_state(tmp_path, suffix):
    scaler, other = changed(), GradScaler()
    path = tmp_path / f"scaler{suffix}"
    scaler.save(path)
    state = other.state
    other.load(path)
    assert other.state is state
    assert other.state_dict() == scaler.state_dict()
    assert scaler.state_dict().items() >= CHANGED.items()
    assert same(other.state, scaler.state)
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("content", [b"", b"nonsense", b"[1, 2]", None])
def test_truncated_or_foreign_file_changes_nothing(tmp_path, suffix, content):
    path = tmp_path / f"scaler{suffix}"
    if content is None:
        changed().save(path)
        content = path.read_bytes()[:-9]
    path.write_bytes(content)
    scaler = GradScaler()
    with pytest.raises((ValueError, TypeError), match=r"[sS]caler"):
        scaler.load(path)
    assert scaler.state_dict() == GradScaler().state_dict()


def test_file_that_decompresses_to_too_much_data_is_refused(tmp_path):
    path = tmp_path / "bomb.json.gz"
    path.write_bytes(gzip.compress(b" " * 2**24))
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match="too large"):
            GradScaler().load(path)
        assert tracemalloc.get_traced_memory()[1] < 2**23
    finally:
        tracemalloc.stop()


def test_flipped_bit_in_a_gzip_file_is_an_error(tmp_path):
    path = tmp_path / "scaler.json.gz"
    changed().save(path)
    data = bytearray(path.read_bytes())
    data[10] ^= 1
    path.write_bytes(data)
    with pytest.raises(ValueError, match="scaler"):
        GradScaler().load(path)


def test_unknown_suffix_error_lists_the_known_suffixes(tmp_path):
    with pytest.raises(ValueError, match=r"\.json, \.json\.gz, \.safetensors"):
        GradScaler().save(tmp_path / "scaler.bin")
    with pytest.raises(FileNotFoundError):
        GradScaler().load(tmp_path / "missing.json")


def test_whole_checkpoint_is_refused_with_the_call_that_loads_its_scaler(tmp_path):
    whole = {"scaler": GradScaler().state_dict(), "model": mx.zeros(2**19)}
    torch_checkpoint.save(tmp_path / "run.pt", whole)
    with pytest.raises(ValueError, match=r'torch_checkpoint.load\(path\)\["scaler"\]'):
        GradScaler().load(tmp_path / "run.pt")
