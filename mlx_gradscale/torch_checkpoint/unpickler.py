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
# because a pickle may copy a memoized value thousands of times. Each takes at most
# about 150 bytes of memory. PyTorch writes about 35 instructions for each tensor.
MAX_WORK = 4_000_000
# A set, or a new name, takes as much memory as this many instructions.
_OBJECT = 3
UNTYPED = ("torch.storage.UntypedStorage", "torch.UntypedStorage")
_Python: Any = pickle._Unpickler


class Unpickler(_Python):  # type: ignore[misc]
    """Read the pickles of a file.

    Attributes:
        storages (dict): The storages that the pickles name, by key. Their place in the
            file is for the caller to find.
        tensors (dict): The tensors, as keys and values.
    """

    def __init__(self, stream: BytesIO) -> None:
        super().__init__(stream, encoding="utf-8")
        self.storages: dict[str, Storage] = {}
        self.tensors: dict[Tensor, Tensor] = {}
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
            while self._work < MAX_WORK:
                self._work += 1
                _ACTIONS[self.read(1)[0]](self)
            self._spend(1)
        except pickle._Stop as stop:  # type: ignore
            return stop.value
        except Exception as error:  # Python's unpickler raises ten different types
            problem = str(error)
            if isinstance(error, KeyError):
                problem = f"{bytes(error.args)!a} is not an instruction of checkpoints."
            elif not isinstance(error, CheckpointError):
                problem = f"the pickle is damaged or cut off ({error}). Copy the file."
            # The last string on the stack is usually the key of a bad value.
            parts = (*self.metastack[-1:], self.stack)
            keys = [x for part in parts for x in part[-2:] if type(x) is str]
            near = f"Near {keys[-1][:80]!a}: " if keys else ""
            raise CheckpointError(near + problem) from None

    def _spend(self, work: int) -> None:
        self._work += work
        check(
            self._work <= MAX_WORK,
            f"the file has more than {MAX_WORK:,} pickle instructions, or copies as "
            "many values",
            "Split it in PyTorch.",
        )

    def find_class(self, module: str, name: str) -> Placeholder:
        """Return the placeholder for a name, the same object for equal names."""
        key = module, name
        if key not in self._names:
            self._spend(_OBJECT)
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
            self.append(self.construct(path, args))
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
        is_sound = type(shape) is type(strides) is tuple
        is_sound = is_sound and len(shape) == len(strides) <= 32
        numbers = (offset, *shape, *strides)
        is_sound = is_sound and {*map(type, numbers)} == {int} and min(numbers) >= 0
        is_sound = is_sound and max(numbers) < 2**63 and max((0, *shape)) <= MAX_DIM
        check(is_sound, "the offset, shape or strides of a tensor are invalid")
        room = storage.nbytes // SIZES.get(dtype, 1)
        last = offset + sum((n - 1) * by for n, by in zip(shape, strides, strict=True))
        problem = f"a tensor reaches outside its storage of {room} elements"
        check(0 in shape or last < room, problem)
        view = storage, dtype, offset, shape, strides
        return self._unique(Tensor(*view, bool(requires_grad)))

    def rebuild_parameter(self, data: Tensor, requires_grad: bool, *_: Any) -> Tensor:
        """Return a tensor as a ``torch.nn.Parameter``, without Python attributes."""
        check(type(data) is Tensor, "a parameter has no tensor")
        grad = bool(requires_grad)
        return self._unique(replace(data, requires_grad=grad, is_parameter=True))

    def _unique(self, tensor: Tensor) -> Tensor:
        """Return the same object for equal views, so that tied tensors are one."""
        return self.tensors.setdefault(tensor, tensor)

    def rebuild_from_type(
        self, function: Placeholder, kind: Placeholder, args: tuple[Any, ...], *_: Any
    ) -> Any:
        """Return a tensor without its Python attributes."""
        check(
            function.path in _TENSORS and kind.path in _TENSOR_CLASSES,
            f"a tensor has the unknown class {kind.path!a}",
            "If it is a DTensor, gather the full state dict in PyTorch, on all ranks, "
            "and save it on rank 0: torch.distributed.checkpoint.state_dict."
            "get_state_dict(model, optimizer, options=StateDictOptions("
            "full_state_dict=True, cpu_offload=True)).",
        )
        return _TENSORS[function.path](self, *args)

    def construct(self, path: str, args: tuple[Any, ...]) -> Any:
        """Return an object of a plain type; what its constructor copies is work."""
        function, *signatures = CONSTRUCTORS[path]
        is_known = [*map(type, args[:3])] in signatures
        check(is_known, f"the pickle calls {path} with invalid arguments")
        copied = args[0] if args and type(args[0]) is not float else ()
        self._spend(
            _OBJECT + len(copied) // (64 if type(copied) in (str, bytes) else 1)
        )
        for member in copied if function in (set, frozenset) else ():
            check_key(member)
        return function(*args)

    def push(self, value: Any) -> None:
        """Push a value. Unlike ``append``, it is looked up after marks are popped."""
        self.stack.append(value)

    def load_bytearray8(self) -> None:
        """Read before allocating, unlike Python."""
        self.append(bytearray(self.read(int.from_bytes(self.read(8), "little"))))


_TENSORS: dict[str, Callable[..., Any]] = {
    "torch._utils._rebuild_tensor": Unpickler.rebuild_tensor,
    "torch._utils._rebuild_tensor_v2": Unpickler.rebuild_tensor,
    "torch._utils._rebuild_tensor_v3": Unpickler.rebuild_tensor,
    "torch._utils._rebuild_parameter": Unpickler.rebuild_parameter,
    "torch._utils._rebuild_parameter_with_state": Unpickler.rebuild_parameter,
}
_TENSOR_CLASSES = {"torch.Tensor"} | {
    f"torch.nn.parameter.{name}" for name in ("Parameter", "Buffer")
}
_BUILDERS = _TENSORS | {
    # The module was renamed in PyTorch 1.9.
    "torch._tensor._rebuild_from_type_v2": Unpickler.rebuild_from_type,
    "torch.tensor._rebuild_from_type_v2": Unpickler.rebuild_from_type,
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
_Action = Callable[[Unpickler], None]
# Instructions that Python's unpickler may carry out.
_KEPT = {
    *("PROTO", "FRAME", "STOP", "MARK", "POP", "POP_MARK"),
    *("NONE", "NEWTRUE", "NEWFALSE", "BINFLOAT"),
    *("BININT", "BININT1", "BININT2", "LONG1", "LONG4"),
    *("BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8"),
    *("BINSTRING", "SHORT_BINSTRING"),  # Python 2's str
    *("BINBYTES", "SHORT_BINBYTES", "BINBYTES8"),
    *("EMPTY_LIST", "EMPTY_DICT"),
    *("EMPTY_TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "TUPLE"),
    *("BINPUT", "LONG_BINPUT", "MEMOIZE", "BINGET", "LONG_BINGET"),
    *("GLOBAL", "STACK_GLOBAL", "BINPERSID"),
}
_OWN: dict[str, _Action] = {
    "BYTEARRAY8": Unpickler.load_bytearray8,
    "EMPTY_SET": lambda u: u.push(u.construct("builtins.set", ())),
    "FROZENSET": lambda u: u.push(u.construct("builtins.frozenset", (u.pop_mark(),))),
    "APPEND": lambda u: u.edit(b"a", [u.stack.pop()]),
    "APPENDS": lambda u: u.edit(b"e", u.pop_mark()),
    "SETITEM": lambda u: u.edit(b"s", [u.stack.pop(), u.stack.pop()][::-1]),
    "SETITEMS": lambda u: u.edit(b"u", u.pop_mark()),
    "ADDITEMS": lambda u: u.edit(b"\x90", u.pop_mark()),
    "BUILD": lambda u: u.edit(b"b", [u.stack.pop()]),
    "REDUCE": lambda u: u.call(b"R"),
    "NEWOBJ": lambda u: u.call(b"\x81"),
}
_CODES = {op.name: ord(op.code) for op in pickletools.opcodes}
_ACTIONS: dict[int, _Action] = {
    _CODES[name]: _Python.dispatch[_CODES[name]] for name in _KEPT
}
_ACTIONS |= {_CODES[name]: action for name, action in _OWN.items()}
