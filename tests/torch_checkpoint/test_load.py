"""Whatever ``torch.save`` writes of plain training state, ``load`` reads the same."""

from concurrent.futures import ThreadPoolExecutor

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_gradscale import torch_checkpoint
from mlx_gradscale.torch_checkpoint import CheckpointError
from tests.support.torch_files import assert_equals_torch, nested_values, torch_bytes

torch = pytest.importorskip("torch")
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402

WRITERS = [
    {"pickle_protocol": protocol, "_use_new_zipfile_serialization": is_zip}
    for is_zip in (True, False)
    for protocol in (2, 3, 4, 5)
]
NAMES = "float32 float16 bfloat16 complex64 bool uint8 int8 int16 int32 int64"
DTYPES = [getattr(torch, x) for x in f"{NAMES} uint16 uint32 uint64".split()]


@st.composite
def strided_tensors(draw):
    """Any view of a storage that PyTorch itself allows."""
    dtype = draw(st.sampled_from(DTYPES))
    size = draw(st.integers(1, 200)) * dtype.itemsize
    random = torch.manual_seed(draw(st.integers(0, 99)))
    data = torch.randint(0, 256, (size,), generator=random).to(torch.uint8)
    base = data % 2 == 1 if dtype == torch.bool else data.view(dtype)
    shape = draw(st.lists(st.integers(0, 5), max_size=4))
    strides = [draw(st.integers(0, 9)) for _ in shape]
    reach = sum((n - 1) * s for n, s in zip(shape, strides, strict=True) if n)
    offset = draw(st.integers(0, 20))
    if 0 not in shape and offset + reach >= len(base):
        offset, strides = 0, [0] * len(shape)
    return torch.as_strided(base, shape, strides, offset)


OF_TORCH = st.sampled_from([torch.float16, torch.device("cuda", 1), torch.Size([2, 3])])


@pytest.mark.parametrize("options", WRITERS, ids=str)
@settings(deadline=None, max_examples=40)
@given(obj=nested_values(OF_TORCH | strided_tensors()))
def test_plain_objects_saved_by_pytorch_load_equal(options, obj):
    assert_equals_torch(torch_checkpoint.load(torch_bytes(obj, **options)), obj)


@pytest.mark.parametrize("options", WRITERS, ids=str)
def test_pytorch_training_state_loads_equal(options, tmp_path):
    model = torch.nn.Sequential(
        torch.nn.Conv2d(1, 2, 3), torch.nn.BatchNorm2d(2), torch.nn.LSTM(2, 3)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=False)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    state = {
        "model": model.state_dict(),
        "module parameters": dict(model.named_parameters()),
        "optimizer": optimizer.state_dict(),
        "rng": torch.get_rng_state(),
        "scaler": torch.amp.GradScaler("cpu").state_dict(),
    }
    path = tmp_path / "run.pt"
    torch.save(state, path, **options)
    loaded = torch_checkpoint.load(path)
    assert_equals_torch(loaded, state)
    lazy = torch_checkpoint.shapes(path)
    parameter, weight = lazy["module parameters"]["0.weight"], lazy["model"]["0.weight"]
    assert (parameter.requires_grad, parameter.is_parameter) == (True, True)
    assert (weight.requires_grad, weight.is_parameter) == (False, False)


def test_tensors_with_python_attributes_lose_only_the_attributes():
    plain, parameter = torch.ones(2), torch.nn.Parameter(torch.zeros(2))
    plain.note, parameter.note = "x", "y"
    obj = {"plain": plain, "parameter": parameter, "b": torch.nn.Buffer(torch.ones(1))}
    assert_equals_torch(torch_checkpoint.load(torch_bytes(obj)), obj)


Z = torch.tensor([1 + 2j, 3 - 4j])


@pytest.mark.parametrize(
    ("refused", "says"),
    [
        (Z.conj(), r"\.resolve_conj\(\)"),
        (Z.conj().imag, r"\.resolve_conj\(\)"),
        (Z.to(torch.complex128), r"obj\['z'\].*complex128"),
    ],
)
def test_complex_tensors_that_mlx_cannot_hold_are_refused(refused, says):
    with pytest.raises(CheckpointError, match=says):
        torch_checkpoint.load(torch_bytes({"z": refused}))


@pytest.mark.parametrize("options", [{}, {"_use_new_zipfile_serialization": False}])
def test_shared_storage_is_loaded_into_memory_once(options):
    base = torch.randn(1_000_000)
    obj = [base, base.view(1000, 1000).T, base[::2], base[10:].view(-1, 10)] * 3
    data = torch_bytes(obj, **options)
    before = mx.get_active_memory()
    loaded = torch_checkpoint.load(data)
    assert mx.get_active_memory() - before < 1.05 * 4_000_000
    assert loaded[0] is loaded[4]
    assert_equals_torch(loaded, obj)


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32, torch.uint16])
def test_empty_tensors_of_empty_and_other_storages_load_equal(dtype):
    obj = [torch.zeros((3, 0), dtype=dtype), torch.ones(3, dtype=dtype)[3:]]
    assert_equals_torch(torch_checkpoint.load(torch_bytes(obj)), obj)


def test_storage_that_ends_with_a_part_of_an_element_is_read():
    obj = torch.arange(7, dtype=torch.uint8)[:6].view(torch.uint16)
    assert_equals_torch(torch_checkpoint.load(torch_bytes(obj)), obj)


@pytest.mark.parametrize("options", [{}, {"_use_new_zipfile_serialization": False}])
def test_arrays_loaded_in_another_thread_can_be_used_in_the_main_thread(options):
    expected = [torch.arange(6.0).view(2, 3).T, *torch.randn(50, 30_000).unbind()]
    data = torch_bytes([x.clone() for x in expected], **options)
    with ThreadPoolExecutor(1) as thread:
        found = thread.submit(torch_checkpoint.load, data).result()
    assert (found[0] + 1).tolist() == [[1.0, 4.0], [2.0, 5.0], [3.0, 6.0]]
    assert_equals_torch(found, expected)


def test_shapes_of_a_file_larger_than_4_gib_are_read(tmp_path):
    # Sparse on disk: PyTorch writes only the sizes of these tensors, and no checksum.
    sizes = [(12,), (5 * 2**10, 2**20), (16,)]
    with FakeTensorMode():
        obj = [torch.empty(size, dtype=torch.uint8) for size in sizes]
    path = tmp_path / "big.pt"
    with torch.serialization.skip_data(materialize_fake_tensors=True):
        torch.save(obj, path)
    assert path.stat().st_size > 5 * 2**30
    found = torch_checkpoint.shapes(path)
    assert [leaf.shape for leaf in found] == sizes


def test_load_accepts_paths_and_bytes_and_refuses_other_types(tmp_path):
    data = torch_bytes({"x": torch.arange(3)})
    path = tmp_path / "x.pt"
    path.write_bytes(data)
    link = tmp_path / "link.pt"
    link.symlink_to(path)
    for source in (path, str(path), data, bytearray(data), link):
        assert torch_checkpoint.load(source)["x"].tolist() == [0, 1, 2]
    with pytest.raises(TypeError, match="PathLike object, not"):
        torch_checkpoint.load(3)
    with pytest.raises(FileNotFoundError):
        torch_checkpoint.load(tmp_path / "missing.pt")


@pytest.mark.parametrize("numel", [100, 2**20 + 3])  # one piece, and several
def test_every_flipped_bit_is_an_error(numel):
    data = torch_bytes({"weight": torch.ones(numel)})
    start = data.index(torch.ones(numel).numpy().tobytes())
    for at in (data.index(b"weight"), start, start + 2 * numel, start + 4 * numel - 1):
        flipped = bytearray(data)
        flipped[at] ^= 4
        with pytest.raises(CheckpointError, match="CRC-32"):
            torch_checkpoint.load(bytes(flipped))
