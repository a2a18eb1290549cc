"""A subclass of Python's own unpickler that imports nothing and calls nothing foreign.

Python's C unpickler is not used: a pickle of 9 bytes made it allocate 4 GiB. Only the
instructions in ``_ACTIONS`` are read; names become a ``Placeholder``, and a pickle can
call only the functions in ``_BUILDERS`` and ``CONSTRUCTORS``. Any other call is
recorded in a ``Placeholder`` instead of being executed.
"""

import pickle
import pickletools
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import replace
from io import BytesIO
from typing import Any

from .objects import CheckpointError, Placeholder, check
from .tensors import MAX_DIM, SIZES, STORAGES, Storage, Tensor
from .tree import DICTS, check_key

MAX_PICKLE = 2**26
# The number of instructions, and of values (or 64 characters) that constructors copy,
# because a pickle may copy a memoized value thousands of times. PyTorch writes up to 35
# instructions for each tensor.
MAX_WORK = 4_000_000
UNTYPED = ("torch.storage.UntypedStorage", "torch.UntypedStorage")
_Python: Any = pickle._Unpickler


class Unpickler(_Python):  # type: ignore[misc]
    """Read the pickles of a file, which do not say where its storages are."""

    def __init__(self, stream: BytesIO) -> None:
        super().__init__(stream, encoding="utf-8")
        self.storages: dict[str, Storage] = {}  # by key
        self.tensors: dict[Tensor, Tensor] = {}  # equal ones are the same object
        self._work, self._names = 0, dict[tuple[str, str], Placeholder]()

    def load(self) -> Any:
        """Interpret the instructions of one pickle and return its object."""
        # As Python's load() does, whose loop does not count.
        frames = pickle._Unframer(self._file_read, self._file_readline)  # type: ignore
        self.read, self.readinto = frames.read, frames.readinto
        self.readline, self._unframer = frames.readline, frames
        self.memo: dict[int, Any] = {}
        self.metastack, self.stack = list[Any](), list[Any]()
        self.append, self.proto = self.stack.append, 0
        try:
            while True:
                code = self.read(1)[0]
                self._work += _COSTS[code]
                if self._work > MAX_WORK:
                    self._spend(0)
                _ACTIONS[code](self)
        except pickle._Stop as stop:  # type: ignore
            return stop.value
        except Exception as error:  # Python's unpickler raises ten different types
            problem = str(error)
            if type(error) is KeyError:
                problem = f"{bytes([code])!a} is not an instruction of checkpoints."
            elif not isinstance(error, CheckpointError):
                problem = f"the pickle is damaged or cut off ({error}). Copy the file."
            # The last string on the stack is usually the key of a bad value.
            parts = (*self.metastack[-1:], self.stack)
            keys = [x for part in parts for x in part[-2:] if type(x) is str]
            near = f"Near {keys[-1][:80]!a}: " if keys else ""
            raise CheckpointError(near + problem) from None

    def _spend(self, work: int) -> None:
        self._work += work
        if self._work > MAX_WORK:
            raise CheckpointError(
                f"the file has more than {MAX_WORK:,} pickle instructions, or copies "
                "as many values. Split it in PyTorch."
            )

    def find_class(self, module: str, name: str) -> Placeholder:
        """Return the placeholder for a name, the same object for equal names."""
        key = module, name
        if key not in self._names:
            self._names[key] = Placeholder(module, name)
        return self._names[key]

    def persistent_load(self, pid: Any) -> Storage:
        """Return the storage that a persistent id describes."""
        check(
            type(pid) is tuple and len(pid) in (5, 6) and pid[0] == "storage",
            "the file refers to something that is not a storage, as whole models saved "
            "by old PyTorch versions do",
            "Save model.state_dict() in PyTorch instead.",
        )
        _, kind, key, _location, numel, *views = pid
        path = kind.path if type(kind) is Placeholder else ""
        dtype = STORAGES.get(path.removeprefix("torch."))
        is_known = (dtype or path in UNTYPED) and (not views or views[0] is None)
        check(
            is_known and type(key) is str and type(numel) is int and numel >= 0,
            f"a storage of type {path!a} is described in an unknown way",
            "Convert its tensor in PyTorch with .dequantize() or .cpu(), and save "
            "again.",
        )
        new = Storage(dtype, numel * SIZES[dtype] if dtype else numel)
        old = self.storages.setdefault(key, new)
        check(
            (old.dtype, old.nbytes) == (new.dtype, new.nbytes),
            f"a storage has {old.nbytes} bytes of {old.dtype}, and also {new.nbytes} "
            f"of {new.dtype}",
            "Clone tensors of different types that share it.",
        )
        return old

    def call(self, opcode: bytes) -> None:
        """Push the result of a call to one of these functions, or a placeholder."""
        args, callee = self.stack.pop(), self.stack.pop()
        shown = f"{type(callee).__name__} with {type(args).__name__}"
        is_call = type(callee) is Placeholder and type(args) is tuple
        check(is_call, f"the pickle calls {shown} as its arguments")
        path = callee.path if callee.args is None and opcode == b"R" else ""
        if path in _BUILDERS:
            self.append(_BUILDERS[path](self, *args))
        elif path in CONSTRUCTORS:
            self.push(path, *args)
        elif path == "builtins.getattr" and [*map(type, args)] == [Placeholder, str]:
            # Protocol 2 refers to nested classes this way.
            self.append(self.find_class(args[0].module, f"{args[0].name}.{args[1]}"))
        else:
            self.append(callee.called(opcode, args))

    def edit(self, opcode: bytes, values: list[Any]) -> None:
        """Edit the object on top of the stack; a placeholder only records the edit."""
        target, kind = self.stack[-1], type(self.stack[-1])
        if kind is Placeholder:
            target.edits.append((opcode, values))
        elif kind is list and opcode in b"ae":
            target.extend(values)
        elif kind in DICTS and opcode in b"su":
            for key, value in zip(values[::2], values[1::2], strict=True):
                if type(key) is not str:
                    check_key(key)
                target[key] = value
        elif kind is set and opcode == b"\x90":
            target.update(self.construct("builtins.set", (values,)))
        else:
            # nn.Module.state_dict() sets _metadata. Other names could shadow methods.
            is_state = kind is OrderedDict and opcode == b"b"
            is_state = is_state and [*values[0]] == ["_metadata"]
            check(is_state, f"unknown change to a value of type {kind.__name__}")
            target._metadata = values[0]["_metadata"]

    def rebuild_tensor(
        self,
        storage: Storage,
        offset: int,
        shape: tuple[int, ...],
        strides: tuple[int, ...],
        requires_grad: bool = False,
        _hooks: Any = None,
        *rest: Any,
    ) -> Tensor:
        """Return a view of a storage.

        The arguments are those of PyTorch's ``_rebuild_tensor_v2``, or of ``_v3``,
        which has a dtype before the metadata.
        """
        check(type(storage) is Storage, "a tensor has no storage")
        dtype, metadata = storage.dtype or "", (*rest, None)[0]
        if type(metadata) is Placeholder:
            is_torch = metadata.module == "torch" and len(metadata.name) <= 40
            dtype, metadata = metadata.name if is_torch else "", (*rest, None)[1]
        check(dtype, "a tensor has no known dtype")
        check(
            not metadata,
            "the tensor is lazily conjugated or negated",
            "Call .resolve_conj() and .resolve_neg() in PyTorch and save again.",
        )
        is_sound = type(shape) is type(strides) is tuple and len(shape) <= 32
        numbers = (offset, *shape, *strides) if is_sound else (-1,)
        is_sound = {*map(type, numbers)} == {int} and min(numbers) >= 0
        is_sound = is_sound and max(numbers) < 2**63 and max((0, *shape)) <= MAX_DIM
        check(is_sound, "the offset, shape or strides of a tensor are invalid")
        room = storage.nbytes // SIZES.get(dtype, 1)
        last = offset + sum((n - 1) * by for n, by in zip(shape, strides, strict=True))
        problem = f"a tensor reaches outside its storage of {room} elements"
        check(0 in shape or last < room, problem)
        new = Tensor(storage, dtype, offset, shape, strides, bool(requires_grad))
        return self.tensors.setdefault(new, new)

    def rebuild_parameter(self, data: Tensor, requires_grad: bool, *_: Any) -> Tensor:
        """Return a tensor as a ``torch.nn.Parameter``, without Python attributes."""
        check(type(data) is Tensor, "a parameter has no tensor")
        new = replace(data, requires_grad=bool(requires_grad), is_parameter=True)
        return self.tensors.setdefault(new, new)

    def rebuild_from_type(
        self, function: Placeholder, kind: Placeholder, args: tuple[Any, ...], *_: Any
    ) -> Any:
        """Return a tensor without its Python attributes."""
        check(
            function.path in _BUILDERS and kind.path in _TENSOR_CLASSES,
            f"a tensor has the unknown class {kind.path!a}",
            "If it is a DTensor, gather the full state dict in PyTorch, on all ranks, "
            "and save it on rank 0: torch.distributed.checkpoint.state_dict."
            "get_state_dict(model, optimizer, options=StateDictOptions("
            "full_state_dict=True, cpu_offload=True)).",
        )
        return _BUILDERS[function.path](self, *args)

    def construct(self, path: str, args: tuple[Any, ...]) -> Any:
        """Return an object of a plain type; what its constructor copies is work."""
        function, *signatures = CONSTRUCTORS[path]
        is_known = [*map(type, args[:3])] in signatures
        check(is_known, f"the pickle calls {path} with invalid arguments")
        copied = args[0] if args and type(args[0]) is not float else ()
        self._spend(len(copied) // (64 if type(copied) in (str, bytes) else 1))
        for member in copied if function in (set, frozenset) else ():
            check_key(member)
        return function(*args)

    def push(self, path: str, *args: Any) -> None:
        """Push an object of a plain type."""
        self.append(self.construct(path, args))

    def load_bytearray8(self) -> None:
        """Read before allocating, unlike Python."""
        self.append(bytearray(self.read(int.from_bytes(self.read(8), "little"))))


_BUILDERS: dict[str, Callable[..., Any]] = {
    "torch._utils._rebuild_tensor": Unpickler.rebuild_tensor,
    "torch._utils._rebuild_tensor_v2": Unpickler.rebuild_tensor,
    "torch._utils._rebuild_tensor_v3": Unpickler.rebuild_tensor,
    "torch._utils._rebuild_parameter": Unpickler.rebuild_parameter,
    "torch._utils._rebuild_parameter_with_state": Unpickler.rebuild_parameter,
    # The module was renamed in PyTorch 1.9.
    "torch._tensor._rebuild_from_type_v2": Unpickler.rebuild_from_type,
    "torch.tensor._rebuild_from_type_v2": Unpickler.rebuild_from_type,
}
_TENSOR_CLASSES = {"torch.Tensor"} | {
    f"torch.nn.parameter.{name}" for name in ("Parameter", "Buffer")
}


def _encode(text: str, encoding: str) -> bytes:
    check(encoding in ("latin1", "latin-1"), "the text of a bytes value is not Latin-1")
    return text.encode("latin1")


def _bytearray(data: Any = b"", *encoding: str) -> bytearray:
    return bytearray(_encode(data, *encoding) if encoding else data)


# Functions of plain types, and the types of the arguments that they may have.
CONSTRUCTORS: dict[str, tuple[Any, ...]] = {
    "collections.OrderedDict": (OrderedDict, []),
    "collections.Counter": (Counter, [], [dict]),
    "_codecs.encode": (_encode, [str, str]),
    "builtins.bytes": (bytes, []),
    "builtins.bytearray": (_bytearray, [], [bytes], [str, str]),
    "builtins.complex": (complex, [float, float]),
    "builtins.set": (set, [], [list]),
    "builtins.frozenset": (frozenset, [], [list]),
}
# Instructions that are neither written by torch.save nor safe in Python's unpickler.
_REFUSED = {
    *("EXT1", "EXT2", "EXT4", "INST", "OBJ", "NEWOBJ_EX", "PERSID"),
    *("DICT", "NEXT_BUFFER", "READONLY_BUFFER"),
}
_CODES = {op.name: ord(op.code) for op in pickletools.opcodes if op.proto <= 5}
_ACTIONS: dict[int, Callable[[Unpickler], None]] = {
    code: _Python.dispatch[code]
    for name, code in _CODES.items()
    if name not in _REFUSED
}
_ACTIONS |= {
    _CODES["BYTEARRAY8"]: Unpickler.load_bytearray8,
    _CODES["EMPTY_SET"]: lambda u: u.push("builtins.set"),
    _CODES["FROZENSET"]: lambda u: u.push("builtins.frozenset", u.pop_mark()),
    _CODES["APPEND"]: lambda u: u.edit(b"a", [u.stack.pop()]),
    _CODES["APPENDS"]: lambda u: u.edit(b"e", u.pop_mark()),
    _CODES["SETITEM"]: lambda u: u.edit(b"s", [u.stack.pop(), u.stack.pop()][::-1]),
    _CODES["SETITEMS"]: lambda u: u.edit(b"u", u.pop_mark()),
    _CODES["ADDITEMS"]: lambda u: u.edit(b"\x90", u.pop_mark()),
    _CODES["BUILD"]: lambda u: u.edit(b"b", [u.stack.pop()]),
    _CODES["REDUCE"]: lambda u: u.call(b"R"),
    _CODES["NEWOBJ"]: lambda u: u.call(b"\x81"),
}
# Each unit of work takes at most about 150 bytes of memory.
_TWO = "EMPTY_LIST EMPTY_DICT REDUCE NEWOBJ BUILD APPEND APPENDS SETITEM SETITEMS"
_FOUR = "EMPTY_SET FROZENSET ADDITEMS GLOBAL STACK_GLOBAL"
_COSTS = dict.fromkeys(_ACTIONS, 1)
_COSTS |= {_CODES[name]: 2 for name in _TWO.split()}
_COSTS |= {_CODES[name]: 4 for name in _FOUR.split()}
