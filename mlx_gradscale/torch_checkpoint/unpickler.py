"""A subclass of Python's own unpickler that imports nothing and calls nothing foreign.

Python's C unpickler is not used: a pickle of 9 bytes made it allocate 4 GiB. Only the
instructions in ``_ACTIONS`` are read; names become a ``Placeholder``, and a pickle can
call only the functions in ``BUILDERS``. Any other call is recorded in a
``Placeholder`` instead of being executed.
"""

import pickle
import pickletools
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import replace
from io import BytesIO
from typing import Any

from .objects import CheckpointError, Placeholder, check
from .tensors import SIZES, STORAGES, Storage, Tensor
from .tree import DICTS, check_key

MAX_PICKLE = 2**26
# The number of instructions, and of values (or 64 characters) that constructors copy,
# because a pickle may copy a memoized value thousands of times. Each takes at most
# about 150 bytes of memory. PyTorch writes about 35 instructions for each tensor.
MAX_WORK = 5_000_000
# A set takes as much memory as this many instructions.
_SET = 3
UNTYPED = ("torch.storage.UntypedStorage", "torch.UntypedStorage")
_Python: Any = pickle


class Unpickler(_Python._Unpickler):  # type: ignore[misc]
    """Read the pickles of a file.

    Args:
        stream (BytesIO): The stream. After ``load``, it is at the end of the pickle.
        find (Callable): Returns the storage in the file with a key.
    """

    def __init__(self, stream: BytesIO, find: Callable[[str], Storage]) -> None:
        super().__init__(stream, encoding="utf-8")
        self.storages: dict[str, Storage] = {}
        self.tensors: dict[tuple[Any, ...], Tensor] = {}
        self._stream, self._find, self._work = stream, find, 0
        self._names: dict[tuple[str, str], Placeholder] = {}

    def load(self) -> Any:
        """Interpret the instructions of one pickle and return its object."""
        start = self._stream.tell()
        frames = _Python._Unframer(self._file_read, self._file_readline)
        self.read, self.readinto = frames.read, frames.readinto
        self.readline, self._unframer = frames.readline, frames
        self.memo: dict[int, Any] = {}
        self.metastack: list[Any] = []
        self.stack: list[Any] = []
        self.append, self.proto = self.stack.append, 0
        try:
            while self._work < MAX_WORK:
                self._work += 1
                _ACTIONS[self.read(1)[0]](self)
            self._spend(1)
        except _Python._Stop as stop:
            is_complete = not self.stack and not self.metastack
            check(is_complete, "the pickle does not end with one complete object")
            return stop.value
        except Exception as error:  # Python's unpickler raises ten different types
            problem = str(error)
            if isinstance(error, KeyError):
                code = bytes([error.args[0]])
                problem = f"{code!a} is not an instruction that checkpoints use."
            elif not isinstance(error, CheckpointError):
                problem = f"the pickle is damaged or cut off ({error}). Copy the file."
            where = f"Pickle, byte {self._stream.tell() - start}{self._last_key()}"
            raise CheckpointError(f"{where}: {problem}") from None

    def _spend(self, work: int) -> None:
        self._work += work
        check(
            self._work <= MAX_WORK,
            f"the file has more than {MAX_WORK:,} pickle instructions, or copies as "
            "many values",
            "Split it in PyTorch.",
        )

    def _last_key(self) -> str:
        """Describe the last string on the stack, usually the key of a bad value."""
        for stack in (self.stack, *self.metastack[:-4:-1]):
            if stack and type(stack[-1]) is str:
                return f", near {stack[-1][:80]!a}"
        return ""

    def find_class(self, module: str, name: str) -> Placeholder:
        """Return the placeholder for a name, the same object for equal names."""
        check(len(module) + len(name) < 1000, "a name in the pickle is too long")
        if (module, name) not in self._names:
            named = Placeholder(module, name)
            is_name = named.path.isprintable() and "" not in named.path.split(".")
            check(is_name, f"{named.path[:120]!a} is not a class or function name")
            self._names[module, name] = named
        return self._names[module, name]

    def persistent_load(self, pid: Any) -> Storage:
        """Return the storage that a persistent id describes."""
        # Check the type first: comparing a tensor with a string raises an error.
        check(
            type(pid) is tuple and len(pid) in (5, 6) and pid[0] == "storage",
            "the file refers to something that is not a storage, as whole models saved "
            "by old PyTorch versions do",
            "Save model.state_dict() in PyTorch instead.",
        )
        _, kind, key, _location, numel, *views = pid
        path = kind.path if type(kind) is Placeholder and kind.args is None else ""
        dtype = STORAGES.get(path.removeprefix("torch."))
        is_known = (dtype or path in UNTYPED) and (not views or views[0] is None)
        is_known = is_known and type(key) is str and len(key) <= 64
        check(
            is_known and type(numel) is int and 0 <= numel < 2**63,
            f"a storage of type {path!a} is described in an unknown way",
            "Convert its tensor in PyTorch with .dequantize() or .cpu(), and save "
            "again.",
        )
        nbytes = numel * SIZES[dtype] if dtype else numel
        if key not in self.storages:
            self.storages[key] = found = self._find(key)
            found.dtype = dtype
            if found.nbytes < 0:  # a legacy file does not say it yet
                found.nbytes = nbytes
        storage = self.storages[key]
        check(
            (storage.dtype, storage.nbytes) == (dtype, nbytes),
            f"a storage should have {nbytes} bytes of {dtype}, but has "
            f"{storage.nbytes} of {storage.dtype}",
            "Clone tensors of different types that share it, or copy the file again.",
        )
        return storage

    def rebuild_tensor(
        self,
        storage: Storage,
        offset: int,
        shape: tuple[Any, ...],
        strides: tuple[Any, ...],
        requires_grad: bool = False,
        _hooks: Any = None,
        *rest: Any,
    ) -> Tensor:
        """Return a view of a storage.

        The arguments are those of PyTorch's ``_rebuild_tensor_v2``, or of ``_v3``,
        which has a dtype before the metadata.
        """
        dtype, metadata = storage.dtype or "", rest[-1] if rest else {}
        if rest and type(rest[0]) is Placeholder:
            dtype, metadata = rest[0].name, rest[1:] and rest[1]
            dtype = dtype if rest[0].path == f"torch.{dtype}" else ""
        check(0 < len(dtype) <= 40, "a tensor has no known dtype")
        check(
            type(metadata) is not dict or not metadata,
            "the tensor is lazily conjugated or negated",
            "Call .resolve_conj() and .resolve_neg() in PyTorch and save again.",
        )
        tensor = Tensor(storage, dtype, offset, shape, strides, requires_grad)
        tensor.check()
        return self._unique(tensor)

    def rebuild_parameter(self, data: Tensor, requires_grad: bool, _: Any) -> Tensor:
        """Return a tensor as a ``torch.nn.Parameter``."""
        new = replace(data, requires_grad=requires_grad, is_parameter=True)
        return self._unique(new)

    def _unique(self, tensor: Tensor) -> Tensor:
        """Return the same object for equal views, so that tied tensors are one."""
        flags = tensor.requires_grad, tensor.is_parameter
        # Text, because a file could choose numbers whose hashes collide.
        view = f"{tensor.dtype} {tensor.offset} {tensor.shape} {tensor.strides}"
        return self.tensors.setdefault((tensor.storage, view, flags), tensor)

    def rebuild_from_type(
        self, function: Placeholder, kind: Placeholder, args: tuple[Any, ...]
    ) -> Any:
        """Return a tensor with Python attributes, which are dropped."""
        path = function.path
        check(
            path in _TENSORS and kind.path in _TENSOR_CLASSES,
            f"a tensor has the unknown class {kind.path!a}",
            "If it is a DTensor, gather the full state dict in PyTorch, on all ranks, "
            "and save it on rank 0: torch.distributed.checkpoint.state_dict."
            "get_state_dict(model, optimizer, options=StateDictOptions("
            "full_state_dict=True, cpu_offload=True)).",
        )
        return self._build(path, args)

    def make_set(self, kind: type[Any], members: Iterable[Any] = ()) -> Any:
        """Return a set or frozenset."""
        members = [*members]
        self._spend(_SET + len(members))
        for member in members:
            check_key(member)
        return kind(members)

    def make_bytes(self, kind: type[Any], text: Any = b"", encoding: str = "") -> Any:
        """Return bytes or a bytearray, from bytes or from Latin-1 text."""
        self._spend(len(text) // 64)
        if type(text) is str:
            is_latin = encoding in ("latin1", "latin-1")
            is_latin = is_latin and max(text, default="") <= "\xff"
            check(is_latin, "a bytes value is not valid Latin-1")
            text = text.encode("latin1")
        return kind(text)

    def make_counter(self, counts: dict[Any, Any]) -> Counter[Any]:
        """Return a Counter."""
        self._spend(len(counts))
        return Counter(counts)

    def call(self, opcode: bytes) -> None:
        """Push the result of a call to one of ``BUILDERS``, or a placeholder."""
        args, callee = self.stack.pop(), self.stack.pop()
        shown = f"{type(callee).__name__} with {type(args).__name__}"
        is_call = type(callee) is Placeholder and type(args) is tuple
        check(is_call, f"the pickle calls {shown} as its arguments")
        path = callee.path if callee.args is None and opcode == b"R" else ""
        if path in BUILDERS:
            self.append(self._build(path, args))
        elif path == "builtins.getattr" and [*map(type, args)] == [Placeholder, str]:
            # Protocol 2 refers to nested classes this way.
            name = f"{args[0].name}.{args[1][:1000]}"
            self.append(self.find_class(args[0].module, name))
        else:
            self.append(callee.called(opcode, args))

    def _build(self, path: str, args: tuple[Any, ...]) -> Any:
        function, *signatures = BUILDERS[path]
        # Compare at most 20 types, because there may be millions of arguments.
        types = (*map(type, args[:20]),)
        if path in _STATEFUL:  # the state may have any type, and is dropped
            args, types = args[:-1], types[:-1]
        check(types in signatures, f"the pickle calls {path} with invalid arguments")
        return function(self, *args)

    def edit(self, opcode: bytes, values: list[Any]) -> None:
        """Edit the object on top of the stack; a placeholder only records the edit."""
        target, kind = self.stack[-1], type(self.stack[-1])
        is_pairs = opcode in b"su"
        is_even = not is_pairs or len(values) % 2 == 0
        check(is_even, "the pickle sets a key without a value")
        if kind is Placeholder:
            target.edits.append((opcode, values))
        elif kind is list and opcode in b"ae":
            target.extend(values)
        elif kind in DICTS and is_pairs:
            for key, value in zip(values[::2], values[1::2], strict=True):
                if type(key) is not str:
                    check_key(key)
                target[key] = value
        elif kind is set and opcode == b"\x90":
            target.update(self.make_set(frozenset, values))
        else:
            # nn.Module.state_dict() sets _metadata. Other names could shadow methods.
            is_state = kind is OrderedDict and opcode == b"b"
            is_state = is_state and type(values[0]) is dict
            is_state = is_state and values[0].keys() == {"_metadata"}
            check(is_state, f"unknown change to a value of type {kind.__name__}")
            target._metadata = values[0]["_metadata"]

    def push(self, value: Any) -> None:
        """Push a value. Unlike ``append``, it is looked up after marks are popped."""
        self.stack.append(value)

    def load_bytearray8(self) -> None:
        """Read before allocating, unlike Python."""
        self.append(bytearray(self.read(int.from_bytes(self.read(8), "little"))))


_VIEW = (Storage, int, tuple, tuple)
_V2 = (*_VIEW, bool, OrderedDict)
_V3 = (*_V2, Placeholder)
_TENSOR = [Unpickler.rebuild_tensor, _VIEW, _V2, (*_V2, dict), _V3, (*_V3, dict)]
_PARAMETER = [Unpickler.rebuild_parameter, (Tensor, bool, OrderedDict)]
_TENSORS = {
    "torch._utils._rebuild_tensor": _TENSOR,
    "torch._utils._rebuild_tensor_v2": _TENSOR,
    "torch._utils._rebuild_tensor_v3": _TENSOR,
    "torch._utils._rebuild_parameter": _PARAMETER,
    "torch._utils._rebuild_parameter_with_state": _PARAMETER,
}
_TENSOR_CLASSES = {"torch.Tensor"} | {
    f"torch.nn.parameter.{name}" for name in ("Parameter", "Buffer")
}
_FROM_TYPE = [Unpickler.rebuild_from_type, (Placeholder, Placeholder, tuple)]
# Functions that a pickle may call, and the types of the arguments that they take.
BUILDERS: dict[str, Any] = _TENSORS | {
    # The module was renamed in PyTorch 1.9.
    "torch._tensor._rebuild_from_type_v2": _FROM_TYPE,
    "torch.tensor._rebuild_from_type_v2": _FROM_TYPE,
    "collections.OrderedDict": [lambda u: OrderedDict(), ()],
    "collections.Counter": [Unpickler.make_counter, (dict,)],
    "_codecs.encode": [lambda u, *x: u.make_bytes(bytes, *x), (str, str)],
    "builtins.bytes": [lambda u: b"", ()],
    "builtins.bytearray": [
        lambda u, *x: u.make_bytes(bytearray, *x),
        *((), (bytes,), (str, str)),
    ],
    "builtins.complex": [lambda u, *x: complex(*x), (float, float)],
    "builtins.set": [lambda u, *x: u.make_set(set, *x), (), (list,)],
    "builtins.frozenset": [lambda u, *x: u.make_set(frozenset, *x), (), (list,)],
}
# Their last argument is a state.
_STATEFUL = {path for path in BUILDERS if path.endswith(("_with_state", "type_v2"))}
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
    "EMPTY_SET": lambda u: u.push(u.make_set(set)),
    "FROZENSET": lambda u: u.push(u.make_set(frozenset, u.pop_mark())),
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
    _CODES[name]: _Python._Unpickler.dispatch[_CODES[name]] for name in _KEPT
}
_ACTIONS |= {_CODES[name]: action for name, action in _OWN.items()}
