"""Each check of the reader at its bound: the last that is read, the first that is not.

And each part of a check that has several, by itself.
"""

import struct
from collections import Counter

import pytest
from tests.support.torch_files import (
    GOLDEN,
    integer,
    name,
    pack,
    pickled,
    storage,
    tensor,
    text,
)

from mlx_gradscale import torch_checkpoint
from mlx_gradscale.torch_checkpoint import CheckpointError, Limits, Placeholder
from mlx_gradscale.torch_checkpoint.limits import Budget

ZIP = (GOLDEN / "zip.pt").read_bytes()
NOTHING = pack({"data.pkl": b"\x80\x02N."})


def refused(data: bytes, says: str, **options) -> None:
    with pytest.raises(CheckpointError, match=says):
        torch_checkpoint.load(data, **options)


def put(data: bytes, form: str, at: int, *values) -> bytes:
    changed = bytearray(data)
    struct.pack_into(form, changed, at, *values)
    return bytes(changed)


# The zip file.


@pytest.mark.parametrize("field", ["disk", "first disk", "entries here", "comment"])
def test_each_number_of_the_end_record(field):
    end = NOTHING.rindex(b"PK\x05\x06")
    at = {"disk": 4, "first disk": 6, "entries here": 8, "comment": 20}[field]
    refused(put(NOTHING, "<H", end + at, 2), "end record does not fit")


@pytest.mark.parametrize("size", [1, 65535])
def test_a_file_with_a_comment_is_read(size):
    end = NOTHING.rindex(b"PK\x05\x06")
    commented = put(NOTHING, "<H", end + 20, size) + b"P" * size
    assert torch_checkpoint.load(commented) is None
    refused(commented + b"P", "does not fit|no directory")


def with_zip64(data: bytes) -> bytes:
    """The same file with the end record of large files before the ordinary one."""
    end = data.rindex(b"PK\x05\x06")
    _, _, here, count, size, start, _ = struct.unpack_from("<4H2LH", data, end + 4)
    record = struct.pack(
        "<4sQ2H2L4Q", b"PK\x06\x06", 44, 45, 45, 0, 0, here, count, size, start
    )
    locator = struct.pack("<4sLQL", b"PK\x06\x07", 0, end, 1)
    return data[:end] + record + locator + data[end:]


LARGE = with_zip64(NOTHING)
END64, LOCATOR64 = LARGE.rindex(b"PK\x06\x06"), LARGE.rindex(b"PK\x06\x07")


def test_a_zip64_end_record_is_read_and_counts():
    assert torch_checkpoint.load(LARGE) is None
    # The ordinary one says nothing then, as in files that are really large.
    end = LARGE.rindex(b"PK\x05\x06")
    assert (
        torch_checkpoint.load(put(LARGE, "<2L", end + 12, 2**32 - 1, 2**32 - 1)) is None
    )


@pytest.mark.parametrize(
    ("form", "at", "value", "says"),
    [
        ("<L", LOCATOR64 + 4, 1, "several parts"),
        ("<L", LOCATOR64 + 16, 2, "several parts"),
        ("<L", LOCATOR64 + 16, 0, "several parts"),
        ("<Q", LOCATOR64 + 8, 2**40, "outside the file"),
        ("<Q", LOCATOR64 + 8, END64 - 1, "zip64 end record does not fit"),
        ("<L", END64 + 16, 1, "zip64 end record does not fit"),
        ("<L", END64 + 20, 1, "zip64 end record does not fit"),
        ("<Q", END64 + 24, 2, "zip64 end record does not fit"),
        ("<Q", END64 + 40, 2**40, "overlaps its end record"),
        ("<Q", END64 + 48, END64, "overlaps its end record"),
    ],
)
def test_each_number_of_the_zip64_end_record(form, at, value, says):
    refused(put(LARGE, form, at, value), says)


def with_extra(extra: bytes, places: dict[int, int], comment: bytes = b"") -> bytes:
    """NOTHING, with an extra field and a comment in the directory's one entry."""
    end = NOTHING.rindex(b"PK\x05\x06")
    (start,) = struct.unpack_from("<L", NOTHING, end + 16)
    entry = NOTHING[start:end]
    for at, value in places.items():
        entry = put(entry, "<L", at, value)
    entry = put(entry, "<2H", 30, len(extra), len(comment)) + extra + comment
    return NOTHING[:start] + entry + put(NOTHING[end:], "<L", 12, len(entry))


def extra_field(kind: int, *values: int) -> bytes:
    return struct.pack(f"<2H{len(values)}Q", kind, 8 * len(values), *values)


def test_sizes_and_places_of_64_bits():
    size, many = len(b"\x80\x02N."), 2**32 - 1
    packed_at, size_at, header_at = 20, 24, 42
    all_wide = {packed_at: many, size_at: many, header_at: many}
    other = extra_field(0x7075, 7)
    wide = extra_field(1, size, size, 0)
    for data in (
        with_extra(wide, all_wide),
        with_extra(other + wide, all_wide, b"PK\x01\x02"),
        with_extra(wide + other, all_wide),
        with_extra(extra_field(1, 0), {header_at: many}),
        with_extra(other, {}),
        # Only of what does not fit in 32 bits.
        with_extra(extra_field(1, 9, 9, 9), {}),
    ):
        assert torch_checkpoint.load(data) is None
    for data in (
        with_extra(extra_field(1, size, size), all_wide),
        with_extra(extra_field(2, size, size, 0), all_wide),
        with_extra(extra_field(1, size, size, 1), all_wide),
        with_extra(extra_field(1, size, size - 1, 0), all_wide),
        with_extra(wide[:-1], all_wide),
    ):
        with pytest.raises(CheckpointError):
            torch_checkpoint.load(data)


def test_a_directory_that_reaches_into_its_end_record():
    end = NOTHING.rindex(b"PK\x05\x06")
    size, start = struct.unpack_from("<2L", NOTHING, end + 12)
    refused(put(NOTHING, "<L", end + 12, size + 1), "overlaps its end record")
    refused(put(NOTHING, "<L", end + 16, start + 1), "overlaps its end record")
    refused(put(NOTHING, "<L", end + 12, size - 1), "cut off|damaged")
    # Numbers that look like another end record are still this one's.
    lookalike = put(NOTHING, "<4s", end + 16, b"PK\x05\x06")
    refused(lookalike, "overlaps its end record")


def test_as_many_records_and_bytes_as_the_limits_say():
    two = pack({"data.pkl": b"\x80\x02N.", "data/0": b"x"})
    assert torch_checkpoint.load(two, limits=Limits(records=2)) is None
    refused(two, "more than 1 records", limits=Limits(records=1))
    end = two.rindex(b"PK\x05\x06")
    (directory,) = struct.unpack_from("<L", two, end + 12)
    assert torch_checkpoint.load(two, limits=Limits(pickle_bytes=directory)) is None
    says = f"directory has {directory} bytes"
    refused(two, says, limits=Limits(pickle_bytes=directory - 1))


def test_records_that_touch_are_read_and_one_byte_more_is_refused():
    data = pack({"data.pkl": b"\x80\x02N.", "data/0": b"xx"})
    entry = data.index(b"PK\x01\x02", data.index(b"PK\x01\x02") + 1)
    assert torch_checkpoint.load(data) is None
    # Of the last record, into the directory.
    refused(put(data, "<2L", entry + 20, 3, 3), "overlap")


def test_a_local_header_of_an_encrypted_or_compressed_record():
    for at in (6, 8):
        refused(put(NOTHING, "<H", at, 1), "damaged header")


# The pickle.


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_protocols(protocol):
    data = pack({"data.pkl": bytes([0x80, protocol]) + b"N."})
    assert torch_checkpoint.load(data) is None


def test_objects_that_were_never_put():
    refused(pickled(b"h\x00"), "refers to object 0")
    refused(pickled(b"Nq\x05h\x03"), "refers to object 3")
    refused(pickled(b"Nq\x05h\x06"), "refers to object 6")
    assert torch_checkpoint.load(pickled(b"K\x07q\x05h\x05\x86")) == (7, 7)
    # MEMOIZE counts what was put, not the highest number.
    assert torch_checkpoint.load(pickled(b"K\x07q\x00K\x08\x94h\x01\x87")) == (7, 8, 8)


def test_a_number_that_ends_with_the_pickle():
    for cut in (b"J\x01\x00\x00", b"G" + bytes(7), b"M\x01"):
        data = pack({"data.pkl": b"\x80\x02" + cut})
        refused(data, "cut off")
    assert torch_checkpoint.load(pickled(b"J\xff\xff\xff\xff")) == -1


def test_a_frame_may_end_with_the_pickle():
    for size, fits in ((2, True), (3, False)):
        data = pack({"data.pkl": b"\x80\x04\x95" + size.to_bytes(8, "little") + b"N."})
        if fits:
            assert torch_checkpoint.load(data) is None
        else:
            refused(data, "cut off")


def test_as_many_operations_as_the_limit_says():
    # Three instructions besides the end: the protocol, a number and another.
    data = pack({"data.pkl": b"\x80\x02K\x01K\x02\x86."})
    assert torch_checkpoint.load(data, limits=Limits(operations=4)) == (1, 2)
    refused(data, "more than 3 operations", limits=Limits(operations=3))


def test_a_set_is_made_of_one_list():
    made = name("__builtin__", "set")
    assert torch_checkpoint.load(pickled(made + b")R")) == set()
    assert torch_checkpoint.load(pickled(made + b"](K\x01e\x85R")) == {1}
    for arguments in (b"]]\x86", b")\x85", b"]"):
        refused(pickled(made + arguments + b"R"), "not a list")
    frozen = torch_checkpoint.load(pickled(name("__builtin__", "frozenset") + b")R"))
    assert frozen == frozenset()
    assert type(frozen) is frozenset


def test_a_counter_is_made_of_a_dict_of_numbers():
    made = name("collections", "Counter")
    found = torch_checkpoint.load(pickled(made + b"}" + text("a") + b"K\x02s\x85R"))
    assert type(found) is Counter
    assert found == {"a": 2}
    for arguments in (b"]\x85", b"}" + text("a") + b"\x88s\x85", b"N\x85"):
        refused(pickled(made + arguments + b"R"), "arguments of other types")
    refused(pickled(made + b")R"), "with 0 arguments")


# Names.


def test_the_longest_name():
    for length, fits in ((1000, True), (1001, False)):
        named = text("m") + text("n" * (length - 2)) + b"\x93"
        if fits:
            assert type(torch_checkpoint.load(pickled(named))) is Placeholder
        else:
            refused(pickled(named), "is no name")
    line = b"c" + b"m" * 998 + b"\nn\n"
    assert type(torch_checkpoint.load(pickled(line))) is Placeholder


def storage_id(*parts: bytes) -> bytes:
    return b"(" + b"".join(parts) + b"tQ"


FLOATS = name("torch", "FloatStorage")


@pytest.mark.parametrize(
    ("pid", "says"),
    [
        (b"]Q", "other than a storage"),
        (storage_id(), "other than a storage"),
        (storage_id(text("storage"), FLOATS, text("0"), text("cpu")), "other than"),
        (storage_id(text("stora"), FLOATS, text("0"), text("cpu"), b"K\x04"), "other"),
        (storage_id(text("module"), FLOATS, text("0"), text("cpu")), "whole model"),
        (
            storage_id(text("storage"), b"N", text("0"), text("cpu"), b"K\x04"),
            "unknown",
        ),
        (
            storage_id(text("storage"), FLOATS, b"K\x00", text("cpu"), b"K\x04"),
            "unknown",
        ),
        (
            storage_id(text("storage"), FLOATS, text("0"), text("cpu"), b"\x88"),
            "unknown",
        ),
        (
            storage_id(
                text("storage"), name("torch", "Size"), text("0"), text("cpu"), b"K\x04"
            ),
            "unknown",
        ),
    ],
)
def test_each_part_of_a_storage(pid, says):
    refused(pickled(tensor(of=pid)), says)


def part(start: int, count: int, kind: bytes = FLOATS, total: int = 4) -> bytes:
    piece = b"(" + text("0") + integer(start) + integer(count) + b"t"
    head = (text("storage"), kind, text("0"), text("cpu"), integer(total))
    return storage_id(*head, piece)


def test_a_part_of_a_storage():
    values = struct.pack("<4f", 0, 1, 2, 3)

    def load(of, count):
        data = b"\x80\x02" + tensor(of=of, shape=(count,)) + b"."
        return torch_checkpoint.load(pack({"data.pkl": data, "data/0": values}))

    assert load(part(1, 3), 3).tolist() == [1, 2, 3]
    assert load(part(2, 1), 1).tolist() == [2]
    assert load(part(0, 4), 4).tolist() == [0, 1, 2, 3]
    refused(pickled(tensor(of=part(1, 4), shape=(4,))), "reaches outside it")
    refused(pickled(tensor(of=part(1, 3), shape=(4,))), "outside its storage of 3")
    untyped = part(0, 4, name("torch.storage", "UntypedStorage"), 16)
    refused(pickled(tensor(of=untyped)), "reaches outside it")


def test_a_key_of_64_characters():
    key = "0" * 64
    data = b"\x80\x02" + tensor(of=storage(key=key)) + b"."
    assert torch_checkpoint.load(
        pack({"data.pkl": data, f"data/{key}": bytes(16)})
    ).size


# Tensors.


def test_64_dimensions():
    assert torch_checkpoint.load(
        pickled(tensor(shape=(1,) * 64, strides=(1,) * 64))
    ).size
    many = tensor(shape=(1,), strides=(1,) * 65)
    refused(pickled(many), "more than 64 dimensions")


def test_the_largest_dimension_and_size():
    last = 2**31 - 1
    for shape in ((0, last), (last, 0), (0, 2**30, 2**31 - 1)):
        found = torch_checkpoint.load(
            pickled(tensor(shape=shape, strides=(0,) * len(shape)))
        )
        assert found.shape == shape
    refused(pickled(tensor(shape=(0, last + 1), strides=(0, 0))), "beyond 2147483647")
    too_much = (0, 2**30, 2**30, 4)
    refused(pickled(tensor(shape=too_much, strides=(0,) * 4)), "overflows 64 bits")


def test_the_largest_stride():
    last = 2**63 - 1  # what MLX's strides hold; of a single element it is never used
    found = torch_checkpoint.load(pickled(tensor(shape=(1,), strides=(last,))))
    assert found.tolist() == [0]
    beyond = tensor(shape=(1,), strides=(last + 1,))
    refused(pickled(beyond), "not a tuple of sizes")


def test_what_is_exactly_inside_a_storage():
    values = struct.pack("<4f", 0, 1, 2, 3)

    def load(**arguments):
        data = b"\x80\x02" + tensor(**arguments) + b"."
        return torch_checkpoint.load(
            pack({"data.pkl": data, "data/0": values})
        ).tolist()

    assert load(offset=3, shape=(1,), strides=(9,)) == [3]
    assert load(offset=1, shape=(2,), strides=(2,)) == [1, 3]
    assert load(shape=(2, 2), strides=(1, 2)) == [[0, 2], [1, 3]]
    assert load(shape=(2, 2), strides=(2, 1)) == [[0, 1], [2, 3]]
    assert load(shape=(4, 1), strides=(1, 7)) == [[0], [1], [2], [3]]
    assert load(shape=(3,), strides=(0,), offset=2) == [2, 2, 2]
    assert load(shape=(0,), offset=100) == []
    for beyond in ({"offset": 4, "shape": (1,)}, {"shape": (3, 2), "strides": (1, 2)}):
        refused(pickled(tensor(**{"strides": (1,)} | beyond)), "outside its storage")


def test_tensors_may_hold_what_the_limit_says():
    view = tensor(shape=(1000,), strides=(0,))
    data = pickled(view)
    extra = 4000 - 4 * len(data)
    assert torch_checkpoint.load(data, limits=Limits(extra_bytes=extra)).size == 1000
    refused(data, "four times its size", limits=Limits(extra_bytes=extra - 1))
    # The same view again is the same array, and counts once.
    twice = pickled(b"(" + view + view + b"t")
    extra = 4000 - 4 * len(twice)
    a, b = torch_checkpoint.load(twice, limits=Limits(extra_bytes=extra))
    assert a is b


def test_elements_and_bytes_of_a_storage_must_agree():
    for numel in (3, 5):
        data = tensor(of=storage(numel=numel), shape=(1,))
        refused(pickled(data), f"should have {numel} elements")
    empty = tensor(of=storage(numel=5), shape=(0,))
    refused(pickled(empty), "should have 5 elements")


@pytest.mark.parametrize(
    ("bits", "expected"),
    [
        ((), [1 + 2j, 3 - 4j]),
        (("conj",), [1 - 2j, 3 + 4j]),
        (("neg",), [-1 - 2j, -3 + 4j]),
        (("conj", "neg"), [-1 + 2j, -3 - 4j]),
    ],
)
def test_conjugate_and_negative_each_by_itself(bits, expected):
    metadata = b"}" + b"".join(text(bit) + b"\x88s" for bit in bits)
    complex_numbers = storage(kind="ComplexFloatStorage", numel=2)
    data = tensor(of=complex_numbers, shape=(2,), metadata=metadata)
    values = struct.pack("<4f", 1, 2, 3, -4)
    file = pack({"data.pkl": b"\x80\x02" + data + b".", "data/0": values})
    assert torch_checkpoint.load(file).tolist() == expected


def typed_tensor(of: bytes, count: int, dtype: bytes) -> bytes:
    """As PyTorch writes uint16 and its like: the tensor says its dtype itself."""
    parts = (of, integer(0), b"(" + integer(count) + b"t", b"(" + integer(1) + b"t")
    hooks = b"\x89" + name("collections", "OrderedDict") + b")R"
    rebuild = name("torch._utils", "_rebuild_tensor_v3")
    return rebuild + b"(" + b"".join(parts) + hooks + dtype + b"tR"


def test_a_dtype_that_the_tensor_says_counts():
    untyped = storage(kind="UntypedStorage", numel=16)
    for of in (untyped, storage()):
        found = torch_checkpoint.load(
            pickled(typed_tensor(of, 8, name("torch", "float16")))
        )
        assert (found.shape, str(found.dtype)) == ((8,), "mlx.core.float16")
        too_many = typed_tensor(of, 9, name("torch", "float16"))
        refused(pickled(too_many), "outside its storage of 8 elements")
    refused(pickled(typed_tensor(untyped, 8, b"N")), "without a known dtype")
    refused(pickled(typed_tensor(untyped, 8, text("torch.float17"))), "known dtype")
    refused(pickled(tensor(of=untyped)), "without a known dtype")


def test_a_tensor_with_attributes_is_made_by_a_plain_function_of_a_known_class():
    plain = name("torch._utils", "_rebuild_tensor_v2")
    itself = name("torch._tensor", "_rebuild_from_type_v2")
    own, theirs = name("torch", "Tensor"), name("x", "TheirTensor")
    arguments = tensor()[len(plain) : -1]

    def made(function: bytes, kind: bytes) -> bytes:
        return pickled(itself + b"(" + function + kind + arguments + b"}tR")

    assert torch_checkpoint.load(made(plain, own)).tolist() == [0, 0, 0, 0]
    parameter = name("torch.nn.parameter", "Parameter")
    assert torch_checkpoint.load(made(plain, parameter)).shape == (4,)
    ordered = name("collections", "OrderedDict")
    for function in (itself, ordered, own, theirs, b"N", text("torch._utils.x")):
        refused(made(function, own), "arguments of other types")
    for kind in (theirs, ordered, b"N", text("torch.Tensor")):
        refused(made(plain, kind), "arguments of other types")


@pytest.mark.parametrize("spec", [b"", b"N", b"]", text("x"), name("x", "Y")])
def test_a_dtensor_whose_placement_says_nothing_is_what_is_held_of_it(spec):
    held = b"}" + text("_local_tensor") + tensor() + b"s"
    held += text("_spec") + spec + b"s" if spec else b""
    wrapper = name("torch._utils", "_rebuild_wrapper_subclass")
    kind = name("torch.distributed.tensor", "DTensor")

    def load(shape):
        arguments = b"(NN(" + b"".join(map(integer, shape)) + b"tt"
        parts = b"(" + wrapper + kind + arguments + b"(" + held + b"tt"
        rebuild = name("torch._tensor", "_rebuild_from_type_v2")
        return torch_checkpoint.load(pickled(rebuild + parts + b"R"))

    assert load((4,)).tolist() == [0, 0, 0, 0]
    with pytest.raises(CheckpointError, match="holds a part of shape"):
        load((8,))


# The limits themselves.


def test_limits_cannot_be_changed_for_everybody():
    with pytest.raises(AttributeError):
        torch_checkpoint.Limits().operations = 1


def test_what_is_shared_a_lot_is_read_with_the_limits_as_they_are():
    # A list of 250 numbers, 250 times: a kilobyte in the file, 62,500 numbers.
    numbers = b"](" + b"K\x07" * 250 + b"eq\x00"
    found = torch_checkpoint.load(pickled(b"(" + numbers + b"h\x00" * 249 + b"t"))
    assert len(found) == 250
    assert all(part is found[0] for part in found)
    short = Limits(shared_bytes=0)
    refused(pickled(b"(" + numbers + b"h\x00" * 249 + b"t"), "shared", limits=short)


def test_a_budget_is_used_up_to_the_last_and_only_by_what_is_taken():
    budget = Budget(Limits(memory=10, operations=5))
    budget.take(operations=5)
    budget.take(10)
    budget.take()
    assert (budget.memory, budget.operations) == (0, 0)
    with pytest.raises(CheckpointError, match="more than 10 bytes"):
        budget.take(1)
    with pytest.raises(CheckpointError, match="more than 5 operations"):
        budget.take(operations=1)


def test_an_argument_that_is_copied_again_is_paid_for_again():
    sizes = b"(" + b"K\x07" * 5000 + b"tq\x00" + name("torch", "Size") + b"q\x01"

    def copies(count: int) -> bytes:
        return pickled(b"(" + sizes + b"h\x01h\x00\x85R" * count + b"t")

    limits = Limits(memory=10_000_000)
    assert len(torch_checkpoint.load(copies(5), limits=limits)) == 7
    refused(copies(50), "more than 10000000 bytes of memory", limits=limits)


def test_the_limits_are_what_they_are_said_to_be():
    # A changed one is a decision: what a file may cost whoever opens it.
    assert Limits() == Limits(
        operations=10_000_000,
        memory=2**30,
        depth=128,
        pickle_bytes=2**26,
        records=1_000_000,
        shared_bytes=2**24,
        extra_bytes=2**30,
    )
