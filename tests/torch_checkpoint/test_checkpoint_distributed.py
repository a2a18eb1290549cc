"""Folders of torch.distributed.checkpoint, read without PyTorch."""

import pickle
import random
import warnings
from argparse import Namespace
from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest

from mlx_gradscale.torch_checkpoint import (
    CheckpointError,
    Limits,
    is_distributed,
    load,
    load_distributed,
)

torch = pytest.importorskip("torch", reason="needs PyTorch")
dcp = pytest.importorskip("torch.distributed.checkpoint")
metadata = pytest.importorskip("torch.distributed.checkpoint.metadata")

STATE = {
    "model": {
        "weight": torch.arange(24.0).reshape(6, 4),
        "half": torch.ones(3, dtype=torch.bfloat16),
        "count": torch.tensor(7),
        "none": torch.zeros(0, 2),
    },
    "groups": [{"lr": 0.1, "params": ["weight"]}, {"lr": 0.2, "params": []}],
    "args": Namespace(epochs=3),
    "step": 5,
}


def save(folder, state=STATE):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state, checkpoint_id=folder, no_dist=True)
    return folder


def edit(folder, change):
    """Changes what .metadata says."""
    file = folder / ".metadata"
    found = pickle.loads(file.read_bytes())
    file.write_bytes(pickle.dumps(change(found) or found))


def test_it_is_what_pytorch_makes_of_it(tmp_path):
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    folder = save(tmp_path / "dcp")
    assert is_distributed(folder)
    assert not is_distributed(tmp_path)
    dcp_to_torch_save(folder, tmp_path / "one.pt")
    found, want = load_distributed(folder), load(tmp_path / "one.pt")
    assert found.keys() == want.keys() == STATE.keys()
    assert list(found["model"]) == list(STATE["model"])
    for name, x in want["model"].items():
        assert found["model"][name].dtype == x.dtype
        assert mx.array_equal(found["model"][name], x)
    for key in ("groups", "step"):
        assert found[key] == want[key] == STATE[key]
    assert str(found["args"]) == "argparse.Namespace(epochs=3)"


def split(folder, cuts):
    """Write the pieces of a tensor as ranks do that hold a grid of it."""
    whole = STATE["model"]["weight"]
    pieces, chunks, stored = b"", [], {}
    for index, (rows, columns) in enumerate(cuts):
        part = whole[rows, columns].clone()
        offsets = torch.Size([rows.start, columns.start])
        file = folder / "piece.pt"
        torch.save(part, file)
        data = file.read_bytes()
        file.unlink()
        key = metadata.MetadataIndex("model.weight", offsets, index)
        stored[key] = (len(pieces), len(data))
        chunks.append(metadata.ChunkStorageMetadata(offsets, part.shape))
        pieces += data
    (folder / "__1_0.distcp").write_bytes(pieces)

    def change(found):
        info = next(iter(found.storage_data.values()))
        kept = {k: x for k, x in found.storage_data.items() if k.fqn != "model.weight"}
        found.storage_data = kept | {
            key: replace(
                info, relative_path="__1_0.distcp", offset=start, length=length
            )
            for key, (start, length) in stored.items()
        }
        found.state_dict_metadata["model.weight"].chunks = chunks

    edit(folder, change)
    return folder


GRIDS = {
    "rows": [(slice(0, 4), slice(0, 4)), (slice(4, 6), slice(0, 4))],
    "columns": [(slice(0, 6), slice(2, 4)), (slice(0, 6), slice(0, 2))],
    "both": [(slice(a, a + 3), slice(b, b + 2)) for a in (3, 0) for b in (0, 2)],
    "an empty one": [(slice(0, 6), slice(0, 4)), (slice(6, 6), slice(0, 4))],
}


@pytest.mark.parametrize("cuts", GRIDS.values(), ids=GRIDS)
def test_shards_are_put_together(cuts, tmp_path):
    found = load_distributed(split(save(tmp_path / "dcp"), cuts))
    want = STATE["model"]["weight"].numpy()
    np.testing.assert_array_equal(np.array(found["model"]["weight"]), want)


@pytest.mark.parametrize(
    "cuts",
    [
        GRIDS["rows"][:1],
        [(slice(0, 3), slice(0, 4)), (slice(4, 6), slice(0, 4))],
        [(slice(0, 4), slice(0, 4)), (slice(3, 6), slice(0, 4))],
        [(slice(0, 4), slice(0, 4)), (slice(4, 6), slice(0, 2))],
        [],
    ],
    ids=["one is missing", "a gap", "an overlap", "a corner is missing", "none"],
)
def test_shards_that_do_not_fit_are_an_error(cuts, tmp_path):
    folder = split(save(tmp_path / "dcp"), cuts)
    with pytest.raises(CheckpointError, match=r"'model\.weight': "):
        load_distributed(folder)


def first(found):
    return next(iter(found.storage_data))


def with_info(**changes):
    def change(found):
        key = first(found)
        found.storage_data[key] = replace(found.storage_data[key], **changes)

    return change


def same_bytes(found):
    infos = list(found.storage_data.values())
    found.storage_data = dict.fromkeys(found.storage_data, infos[0])


def without_a_place(found):
    del found.storage_data[first(found)]


def a_path(path):
    def change(found):
        found.planner_data["step"] = path

    return change


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (with_info(relative_path="../x.distcp"), "no plain name"),
        (with_info(relative_path=".metadata"), "no .distcp file"),
        (with_info(offset=-1), "damaged"),
        (with_info(offset=3), "damaged|same bytes"),
        (with_info(offset=10**9, length=10**18), "reaches outside"),
        (with_info(transform_descriptors=["zstd"]), "compressed"),
        (same_bytes, "same bytes"),
        (without_a_place, "."),
        (a_path(("model",)), "damaged"),
        (a_path(("model", "weight", "x")), "damaged"),
        (a_path(("groups", 10**9)), "lacks some"),
        (a_path(()), "damaged"),
        (a_path(tuple("x" * 200)), "damaged"),
        (lambda found: {"state_dict_metadata": {}}, "damaged"),
    ],
)
def test_a_hostile_folder_is_an_error(change, word, tmp_path):
    folder = save(tmp_path / "dcp")
    edit(folder, change)
    with pytest.raises((CheckpointError, ValueError), match=word):
        load_distributed(folder)


def test_one_budget_is_for_all_pieces(tmp_path):
    folder = save(tmp_path / "dcp")
    load_distributed(folder, limits=Limits(operations=3000))
    many = {"model": {str(i): torch.ones(2) for i in range(100)}}
    save(tmp_path / "many", many)
    with pytest.raises(CheckpointError, match=r"limits\.operations"):
        load_distributed(tmp_path / "many", limits=Limits(operations=3000))


def test_a_piece_cannot_be_more_than_its_bytes(tmp_path):
    folder = save(tmp_path / "dcp", {"x": torch.ones(2)})
    torch.save(torch.ones(1).expand(10**8), folder / "big.pt")
    data = (folder / "big.pt").read_bytes()
    (folder / "big.pt").unlink()
    (folder / "__0_0.distcp").write_bytes(data)
    edit(folder, with_info(offset=0, length=len(data)))
    with pytest.raises(CheckpointError, match="extra_bytes"):
        load_distributed(folder)


@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp"])
def test_damaged_folders_load_or_are_checkpoint_errors(name, tmp_path):
    folder = save(tmp_path / "dcp")
    file, rng = folder / name, random.Random(0)
    whole, failed = file.read_bytes(), 0
    for _ in range(150):
        data = bytearray(whole)
        for _ in range(rng.randint(1, 4)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        file.write_bytes(data[: rng.choice([len(data), rng.randrange(len(data))])])
        try:
            load_distributed(folder, float64=mx.float32)
        except (ValueError, FileNotFoundError):
            failed += 1
    assert 0 < failed <= 150
