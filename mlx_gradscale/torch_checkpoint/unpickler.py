"""A subclass of Python's own unpickler that imports nothing and calls nothing foreign.

Python's C unpickler is not used: a pickle of 9 bytes made it allocate 4 GiB. A pickle
can make only the calls in ``_CALLS``, a table of names and argument types; any other
name or call becomes a ``Placeholder``.
"""

import pickle
import sys
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from io import BytesIO
from typing import Any

from .objects import (
    DICTS,
    CheckpointError,
    Placeholder,
    Storage,
    check,
    check_keys,
)
from .tensors import MAX_DIM, SIZES, STORAGES, Tensor

MAX_PICKLE = 2**26
# The instructions, weighted by the memory they take, and the memory that constructors
# take, because a pickle may copy a memoized value thousands of times. Each unit takes
# at most about 150 bytes. PyTorch writes up to 35 instructions for each tensor.
MAX_WORK = 4_000_000
UNTYPED = ("torch.storage.UntypedStorage", "torch.UntypedStorage")
# Instructions that take all values above a mark.
MARKED = (pickle.APPENDS, pickle.SETITEMS, pickle.ADDITEMS)
_Python: Any = pickle._Unpickler


class Unpickler(_Python):  # type: ignore[misc]
    """Read the pickles of a file, which do not say where its storages are."""

    def __init__(self, stream: BytesIO) -> None:
        super().__init__(stream, encoding="utf-8")
        self.storages: dict[str, Storage] = {}  # by key
        self.tensors: dict[Tensor, Tensor] = {}  # equal ones are the same object
        self.find_class = cache(Placeholder)  # so are equal names
        self._work, self._opcode = 0, b""

    def load(self) -> Any:
        """Interpret the instructions of one pickle and return its object."""
        self.memo: dict[int, Any] = {}
        try:
            return super().load()
        except Exception as error:  # Python's unpickler raises ten different types
            problem = str(error)
            if type(error) is KeyError:
                problem = f"{bytes(error.args)!a} is not an instruction of checkpoints."
            elif type(error) is not CheckpointError:
                problem = f"the pickle is damaged or cut off ({error!a:.99}). Copy it."
            # The last string on the stack is usually the key of a bad value.
            parts = (*self.metastack[-1:], self.stack)
            keys = [x for part in parts for x in part[-2:] if type(x) is str]
            near = f"Near {keys[-1][:80]!a}: " if keys else ""
            raise CheckpointError(near + problem) from None

    @property
    def dispatch(self) -> "Unpickler":
        """The table in which Python's loop looks up every instruction."""
        return self

    def __getitem__(self, code: int) -> Callable[["Unpickler"], None]:
        self._spend(_COSTS.get(code, 1))
        self._opcode = bytes([code])
        return _ACTIONS[code]

    def _spend(self, work: int) -> None:
        self._work += work
        if self._work > MAX_WORK:
            raise CheckpointError(
                f"the file has more than {MAX_WORK:,} pickle instructions, or copies "
                "as many values. Split it in PyTorch."
            )

    def persistent_load(self, pid: Any) -> Storage:
        """Return the storage that a persistent id describes."""
        types = [*map(type, pid)] if type(pid) is tuple else []
        is_storage = types[:5] == [str, Placeholder, str, str, int]
        check(
            is_storage and pid[0] == "storage" and pid[5:] in ((), (None,)),
            "the file refers to something that is not a storage, as whole models saved "
            "by old PyTorch versions do",
            "Save model.state_dict() in PyTorch instead.",
        )
        _, kind, key, _location, numel, *_ = pid
        dtype = STORAGES.get(kind.path.removeprefix("torch."))
        check(
            (dtype or kind.path in UNTYPED) and numel >= 0,
            f"a storage has the unknown type {kind.path!a}",
            "Convert its tensor in PyTorch with .dequantize() or .cpu(), and save "
            "again.",
        )
        storage = Storage(dtype, numel * SIZES[dtype])
        old = self.storages.setdefault(key, storage)
        is_same = (old.dtype, old.nbytes) == (storage.dtype, storage.nbytes)
        check(is_same, f"the storage {key[:80]!a} has two types or sizes")
        return old

    def call(self) -> None:
        """Push the result of a known call, or a placeholder for that of any other."""
        args, callee = self.stack.pop(), self.stack.pop()
        shown = f"{type(callee).__name__} with {type(args).__name__}"
        is_call = type(callee) is Placeholder and type(args) is tuple
        check(is_call, f"the pickle calls {shown} as its arguments")
        is_known = callee.callee is None and self._opcode == pickle.REDUCE
        make = _CALLS.get((callee.path, *map(type, args[:3]))) if is_known else None
        made = make(*args) if make else None
        if made is None:
            made = callee.called(self._opcode, args)
        elif type(made) is Tensor:
            made = self.tensors.setdefault(made, made)
        name = made.name if type(made) is Placeholder else ""  # getattr makes new ones
        self._spend((sys.getsizeof(made) + sys.getsizeof(name)) // 128)
        self.append(made)

    def edit(self) -> None:
        """Edit the object on top of the stack; a placeholder only records the edit."""
        opcode = self._opcode
        if opcode in MARKED:
            values = self.pop_mark()
        else:
            at = -2 if opcode == pickle.SETITEM else -1
            values = self.stack[at:]
            del self.stack[at:]
        target, kind = self.stack[-1], type(self.stack[-1])
        if kind is Placeholder and target.callee:
            target.edits.append((opcode, values))
        elif kind is list and opcode in (pickle.APPEND, pickle.APPENDS):
            target.extend(values)
        elif kind in DICTS and opcode in (pickle.SETITEM, pickle.SETITEMS):
            check_keys(values[::2])
            for key, value in zip(values[::2], values[1::2], strict=True):
                target[key] = value
        elif kind is set and opcode == pickle.ADDITEMS:
            target.update(_make_set(set, values))
        else:
            # nn.Module.state_dict() sets _metadata. Other names could shadow methods.
            is_state = kind is OrderedDict and opcode == pickle.BUILD
            is_state = is_state and [*values[0]] == ["_metadata"]
            check(is_state, f"unknown change to a value of type {kind.__name__}")
            target._metadata = values[0]["_metadata"]

    def load_frozenset(self) -> None:
        """Check the members before they are hashed, unlike Python."""
        members = self.pop_mark()
        self.append(_make_set(frozenset, members))

    def load_bytearray8(self) -> None:
        """Read before allocating, unlike Python."""
        self.append(bytearray(self.read(int.from_bytes(self.read(8), "little"))))


def _rebuild_tensor(
    storage: Storage, offset: int, shape: Any, strides: Any, *more: Any
) -> Tensor:
    """Return a view of a storage.

    The arguments are those of PyTorch's ``_rebuild_tensor``, ``_v2`` and ``_v3``.
    """
    requires_grad, _hooks, *rest = more or (False, None)
    dtype = storage.dtype or ""
    if rest and type(rest[0]) is Placeholder:  # in _v3, the metadata follows
        dtype = rest.pop(0).path.removeprefix("torch.")
    check(
        not any(rest),
        "the tensor is lazily conjugated or negated",
        "Call .resolve_conj() and .resolve_neg() in PyTorch and save again.",
    )
    numbers = (offset, *shape, *strides)
    is_sound = 0 < len(dtype) <= 40 and type(strides) is tuple and len(shape) <= 32
    is_sound = is_sound and {*map(type, numbers)} == {int} and min(numbers) >= 0
    is_sound = is_sound and max(numbers) < 2**63 and max((0, *shape)) <= MAX_DIM
    check(is_sound, "the dtype, offset, shape or strides of a tensor are invalid")
    room = storage.nbytes // SIZES.get(dtype, 1)
    last = offset + sum((n - 1) * by for n, by in zip(shape, strides, strict=True))
    problem = f"a tensor reaches outside its storage of {room} elements"
    check(0 in shape or last < room, problem)
    return Tensor(storage, dtype, offset, shape, strides, bool(requires_grad))


def _rebuild_parameter(data: Tensor, requires_grad: bool, *_: Any) -> Tensor:
    """Return a tensor as a ``torch.nn.Parameter``, without Python attributes."""
    return replace(data, requires_grad=requires_grad, is_parameter=True)


def _rebuild_from_type(
    function: Placeholder, kind: Placeholder, args: tuple[Any, ...], *_: Any
) -> Any:
    """Return a tensor without its Python attributes."""
    make = _CALLS.get((function.path, *map(type, args[:3])), Placeholder)
    check(
        make is not Placeholder and kind.path in _TENSOR_CLASSES,
        f"a tensor has the unknown class {kind.path!a}",
        "If it is a DTensor, gather the full state dict in PyTorch, on all ranks, "
        "and save it on rank 0: torch.distributed.checkpoint.state_dict."
        "get_state_dict(model, optimizer, options=StateDictOptions("
        "full_state_dict=True, cpu_offload=True)).",
    )
    return make(*args)


def _get_inner_class(outer: Placeholder, name: str) -> Placeholder | None:
    """Return a nested class, to which protocol 2 refers with ``getattr``."""
    is_class = outer.callee is None  # and not an object, whose method this is
    return Placeholder(outer.module, f"{outer.name}.{name}") if is_class else None


def _encode(text: str, encoding: str) -> bytes:
    check(encoding in ("latin1", "latin-1"), "the text of a bytes value is not Latin-1")
    return text.encode("latin1")


def _make_set(kind: type, members: list[Any]) -> Any:
    check_keys(members)
    return kind(members)


# The calls that a pickle can make: a name and the types of the first three arguments.
_VIEW = (Storage, int, tuple)
_PARAMETER = (Tensor, bool, OrderedDict)
_FROM_TYPE = (Placeholder, Placeholder, tuple)
_CALLS: dict[tuple[Any, ...], Callable[..., Any]] = {
    ("torch._utils._rebuild_tensor", *_VIEW): _rebuild_tensor,
    ("torch._utils._rebuild_tensor_v2", *_VIEW): _rebuild_tensor,
    ("torch._utils._rebuild_tensor_v3", *_VIEW): _rebuild_tensor,
    ("torch._utils._rebuild_parameter", *_PARAMETER): _rebuild_parameter,
    ("torch._utils._rebuild_parameter_with_state", *_PARAMETER): _rebuild_parameter,
    # The module was renamed in PyTorch 1.9.
    ("torch._tensor._rebuild_from_type_v2", *_FROM_TYPE): _rebuild_from_type,
    ("torch.tensor._rebuild_from_type_v2", *_FROM_TYPE): _rebuild_from_type,
    ("collections.OrderedDict",): OrderedDict,
    ("collections.Counter",): Counter,
    ("collections.Counter", dict): Counter,
    ("builtins.getattr", Placeholder, str): _get_inner_class,
    ("_codecs.encode", str, str): _encode,
    ("builtins.bytes",): bytes,
    ("builtins.bytearray",): bytearray,
    ("builtins.bytearray", bytes): bytearray,
    ("builtins.bytearray", str, str): lambda *text: bytearray(_encode(*text)),
    ("builtins.complex", float, float): complex,
    ("builtins.set", list): partial(_make_set, set),
    ("builtins.frozenset", list): partial(_make_set, frozenset),
}
_TENSOR_CLASSES = {
    *("torch.Tensor", "torch.nn.parameter.Parameter", "torch.nn.parameter.Buffer")
}


def _codes(names: str) -> list[int]:
    return [getattr(pickle, name)[0] for name in names.split()]


# Instructions that are neither written by torch.save nor safe in Python's unpickler.
_REFUSED = _codes("EXT1 EXT2 EXT4 INST OBJ NEWOBJ_EX PERSID DICT") + _codes(
    "NEXT_BUFFER READONLY_BUFFER"
)
_EDITS = _codes("APPEND APPENDS SETITEM SETITEMS BUILD ADDITEMS")
_ACTIONS: dict[int, Callable[[Unpickler], None]] = {
    **{code: act for code, act in _Python.dispatch.items() if code not in _REFUSED},
    **dict.fromkeys(_codes("REDUCE NEWOBJ"), Unpickler.call),
    **dict.fromkeys(_EDITS, Unpickler.edit),
    pickle.FROZENSET[0]: Unpickler.load_frozenset,
    pickle.BYTEARRAY8[0]: Unpickler.load_bytearray8,
}
_COSTS = {
    **dict.fromkeys(_codes("EMPTY_LIST EMPTY_DICT REDUCE NEWOBJ") + _EDITS, 2),
    **dict.fromkeys(_codes("EMPTY_SET FROZENSET ADDITEMS GLOBAL STACK_GLOBAL"), 4),
}
