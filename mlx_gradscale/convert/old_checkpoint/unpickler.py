"""A restricted pickle interpreter for plain values, tensors and placeholders.

It executes the instructions used by PyTorch's pickles (protocols 2 to 5) and raises
``CheckpointError`` for all others. The standard library's disassembler decodes the
arguments, except GLOBAL's. Python's unpickler is not used, nothing is imported, and a
pickle can call only the functions in ``BUILDERS``; any other call is recorded in a
``Placeholder`` instead of being executed.
"""

import io
import pickletools
import re
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection
from sys import getsizeof
from typing import IO, Any

import mlx.core as mx
import numpy as np

from .foreign import (
    DefaultDict,
    Placeholder,
    TensorShape,
    TorchSize,
    dtype_name,
    flag,
)
from .limits import TEXT, CheckpointError, Limits, check
from .tensors import DTYPES, Storage, TensorReader, is_count

# The name used to write a TensorShape.
TENSOR_SHAPE = ("mlx_gradscale.torch_checkpoint", "TensorShape")
_DICTS = frozenset({dict, OrderedDict, Counter, DefaultDict})
_TUPLES = frozenset({tuple, TorchSize})
_ITEMS = _DICTS | _TUPLES | {list, set, frozenset}
_TEXTS = frozenset({str, bytes, bytearray})
_KEYS = frozenset({int, float, bool, complex, type(None), str, bytes, Placeholder})
_LEAVES = _KEYS | {bytearray, TensorShape}
_NOTHING = object()
# The cost, in operations, of a name, a call, a set or a storage.
_OBJECT = 12
# The cost of a value in the result: a conversion visits each value several times.
_VALUE = 8
# Probing this many occupied slots of a hash table costs one operation.
_SLOTS = 64
# Maximum nesting of containers. Python's recursion limit is 1000.
_MAX_DEPTH = 128
# Python does not convert longer integers (4,300 digits) to text, for example in errors.
_MAX_BITS = 14_000
_GATHER = (
    "If it is a DTensor, gather the full state dict in PyTorch, on all ranks, and save "
    "it on rank 0: torch.distributed.checkpoint.state_dict.get_state_dict(model, "
    "optimizer, options=StateDictOptions(full_state_dict=True, cpu_offload=True))."
)


class Unpickler:
    """Read one pickle from a stream.

    Args:
        stream (BytesIO): The stream. After ``read``, it is at the end of the pickle.
        tensors (TensorReader): Builds the tensors and holds the limits.
    """

    def __init__(self, stream: io.BytesIO, tensors: TensorReader) -> None:
        self._stream = stream
        self._tensors = tensors
        self._limits = tensors.limits
        self._stack: list[Any] = []
        self._outer: list[list[Any]] = []
        # A list, because a file could choose dict keys whose hashes collide.
        self._memo: list[Any] = []
        self._names: dict[tuple[str, str], Placeholder] = {}

    def read(self) -> Any:
        """Interpret the instructions of the pickle and return its object."""
        stream, limits, start = self._stream, self._limits, self._stream.tell()
        try:
            while (code := stream.read(1)) != b".":
                decode, action = _OPCODES[code]
                argument = decode(stream) if decode else None
                limits.operations -= 1
                if limits.operations < 0:
                    limits.spend(0)
                if action:
                    action(self, argument)
                else:
                    self._stack.append(argument)
            is_whole = not self._outer and len(self._stack) == 1
            check(is_whole, "the pickle does not end with one complete object.")
            self._tensors.result_bytes += check_tree(self._stack[0], limits)
            return self._stack[0]
        except (ValueError, LookupError) as error:
            problem = str(error)
            if isinstance(error, IndexError):
                problem = "the pickle is damaged (empty stack). Copy the file again."
            elif isinstance(error, KeyError):
                problem = f"{code!a} is not an instruction that checkpoints use."
                problem = problem if code else "the pickle is cut off. Copy it again."
            elif not isinstance(error, CheckpointError):
                problem = f"the pickle is damaged or cut off ({error})."
            where = f"Pickle, byte {stream.tell() - start}{self._last_key()}"
            raise CheckpointError(f"{where}: {problem}") from None

    def _last_key(self) -> str:
        """Describe the last string on the stack, usually the key of a bad value."""
        for stack in (self._stack, *self._outer[:-4:-1]):
            if stack and type(stack[-1]) is str:
                return f", near {stack[-1][:80]!a}"
        return ""

    def _push(self, value: Any) -> None:
        self._stack.append(value)

    def _pop(self, count: int) -> tuple[Any, ...]:
        if len(self._stack) < count:
            raise IndexError
        items = tuple(self._stack[-count:])
        del self._stack[-count:]
        return items

    def _mark(self, _: None) -> None:
        self._outer.append(self._stack)
        self._stack = []

    def _pop_mark(self, _: None = None) -> list[Any]:
        items, self._stack = self._stack, self._outer.pop()
        return items

    def _discard(self, _: None) -> None:
        # With nothing above it, the mark itself is removed, as in Python.
        self._pop(1) if self._stack else self._pop_mark()

    def _put(self, index: int) -> None:
        missing = index + 1 - len(self._memo)
        if missing > 0:
            self._limits.spend(missing - 1)
            self._memo.extend([_NOTHING] * missing)
        self._memo[index] = self._stack[-1]

    def _get(self, index: int) -> None:
        value = self._memo[index] if index < len(self._memo) else _NOTHING
        check(value is not _NOTHING, f"object {index} is not in the pickle.")
        self._stack.append(value)

    def _edit(self, opcode: bytes, values: list[Any]) -> None:
        """Edit the object on top of the stack; a placeholder only records the edit."""
        target, kind = self._stack[-1], type(self._stack[-1])
        is_pairs = opcode in b"su"
        is_whole = not is_pairs or len(values) % 2 == 0
        check(is_whole, "the pickle sets a key without a value. Save the file again.")
        if kind is Placeholder:
            target.edits.append((opcode, values))
        elif kind is list and opcode in b"ae":
            target.extend(values)
        elif kind in _DICTS and is_pairs:
            for key, value in zip(values[::2], values[1::2], strict=True):
                self._pay_for_key(target, key)
                target[key] = value
        elif kind is set and opcode == b"\x90":
            self._add(target, values)
        else:
            # nn.Module.state_dict() sets _metadata. Other names could shadow methods.
            is_state = kind is OrderedDict and opcode == b"b"
            is_state = is_state and type(values[0]) is dict
            is_state = is_state and values[0].keys() == {"_metadata"}
            check(is_state, f"unknown change to a value of type {_kind(target)}.")
            self._limits.spend(_OBJECT)
            target._metadata = values[0]["_metadata"]

    def _add(self, target: set[Any], members: Collection[Any] = ()) -> set[Any]:
        self._limits.spend(_OBJECT + len(members))
        for member in members:
            self._pay_for_key(target, member)
            target.add(member)
        return target

    def _pay_for_key(self, target: Any, key: Any) -> None:
        """Deduct the cost of adding a key to a dict or set.

        A file can choose numbers and tuples whose hashes collide: adding n of them
        takes n * n steps. Hashes of text are random, so only long text costs more.
        """
        # Keys added in the order 0, 1, 2, ... do not collide either.
        is_next = type(key) is int and key == len(target)
        if is_next or (type(key) is str and len(key) < 1024):
            return
        parts = _check_key(key)
        cost = sum(1 + getsizeof(part) // 1024 for part in parts)
        if not all(type(part) in _TEXTS for part in parts):
            cost += cost * len(target) // _SLOTS
        self._limits.spend(cost)

    def _name(self, *parts: Any) -> None:
        """Push the placeholder for a module and a name in it, which may be in parts."""
        # Check the length first, because joining copies the text.
        is_text = all(type(part) is str for part in parts)
        size = sum(map(len, parts)) if is_text else 0
        check(is_text and size < 1000, "a name in the pickle is too long or not text.")
        key = parts[0], ".".join(parts[1:])
        # Like a class in Python, each name is one object.
        if key not in self._names:
            self._limits.spend(_OBJECT + size // TEXT)
            self._names[key] = named = Placeholder(*key)
            is_name = named.path.isprintable() and "" not in named.path.split(".")
            check(is_name, f"{named.path[:120]!a} is not a class or function name.")
        self._push(self._names[key])

    def _persistent(self, _: None) -> None:
        self._limits.spend(_OBJECT)
        self._push(self._tensors.storage(*self._pop(1)))

    def _call(self, opcode: bytes) -> None:
        """Push the result of a call to one of ``BUILDERS``, or a placeholder."""
        callee, args = self._pop(2)
        check(
            type(callee) is Placeholder and type(args) is tuple,
            f"the pickle calls {_kind(callee)} with {_kind(args)} as its arguments.",
        )
        path = callee.path if callee.is_name and opcode == b"R" else ""
        self._limits.spend(_OBJECT)
        # Check the length first: there may be millions of arguments.
        is_getattr = path == "builtins.getattr" and len(args) == 2
        is_getattr = is_getattr and [*map(type, args)] == [Placeholder, str]
        if is_getattr and args[0].is_name:
            # Protocol 2 refers to nested classes this way.
            return self._name(args[0].module, args[0].name, args[1])
        if path not in BUILDERS:
            return self._stack.append(callee.called(opcode, args))
        # BUILDERS copy text, and the same argument may be used any number of times.
        for arg in args:
            if type(arg) in _TEXTS:
                self._limits.spend(len(arg) // TEXT)
        self._stack.append(self._build(path, args))

    def _build(self, path: str, args: tuple[Any, ...]) -> Any:
        function, *signatures = BUILDERS[path]
        check(
            any(
                len(args) == len(s) and all(map(isinstance, args, s))
                for s in signatures
            ),
            f"the pickle calls {path} with invalid arguments. Save the file again.",
        )
        return function(self, *args)


def _from_type(u: Unpickler, function: Any, kind: Any, args: Any, _state: Any) -> Any:
    # PyTorch calls this for tensors with Python attributes, which are dropped.
    is_plain = function.path.startswith("torch._utils.") and function.path in BUILDERS
    names = "torch.Tensor", "torch.nn.parameter.Parameter", "torch.nn.parameter.Buffer"
    is_plain = is_plain and kind.path in names
    check(is_plain, f"a tensor has the unknown class {kind.path!a}. {_GATHER}")
    return u._build(function.path, args)


def _size(_: Unpickler, sizes: tuple[Any, ...]) -> TorchSize:
    is_shape = len(sizes) <= 64 and all(type(n) is int for n in sizes)
    check(is_shape, "a torch.Size has too many or invalid sizes. Save the file again.")
    return TorchSize(sizes)


def _tensor_shape(_: Unpickler, shape: Any, dtype: str, *flags: bool) -> TensorShape:
    is_shape = len(shape) <= 64 and all(map(is_count, shape))
    is_shape = is_shape and re.fullmatch(r"\w{1,40}", dtype) is not None
    check(is_shape, "a TensorShape has an invalid shape or dtype. Save the file again.")
    return TensorShape(shape, dtype, *flags)


def _encode(_: Unpickler, text: str, encoding: str) -> bytes:
    is_latin = encoding in ("latin1", "latin-1") and max(text, default="") <= "\xff"
    check(is_latin, "a bytes value is not valid Latin-1. Save the file again.")
    return text.encode("latin1")


def _bytearray(u: Unpickler, *args: Any) -> bytearray:
    return bytearray(_encode(u, *args) if len(args) == 2 else b"".join(args))


def _count(u: Unpickler, counts: dict[Any, int]) -> Counter[Any]:
    u._add(set(), counts)
    return Counter(counts)


_VIEW = (Storage, int, tuple, tuple)
_V2 = (*_VIEW, bool, OrderedDict)
_V3 = (*_V2, Placeholder)
_TENSORS = (_VIEW, _V2, (*_V2, dict), _V3, (*_V3, dict))
_PARAMETER = ((mx.array, TensorShape), bool, OrderedDict)
# Functions that a pickle may call, and the types of the arguments that they take.
BUILDERS: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(
        (f"torch._utils._rebuild_tensor{version}" for version in ("", "_v2", "_v3")),
        (lambda u, *x: u._tensors.tensor(*x), *_TENSORS),
    ),
    **dict.fromkeys(
        (f"torch._utils._rebuild_parameter{x}" for x in ("", "_with_state")),
        (lambda u, x, grad, *_: flag(x, grad, True), _PARAMETER, (*_PARAMETER, object)),
    ),
    **dict.fromkeys(
        # The module was renamed in PyTorch 1.9.
        (f"torch.{module}._rebuild_from_type_v2" for module in ("_tensor", "tensor")),
        (_from_type, (Placeholder, Placeholder, tuple, object)),
    ),
    "torch.Size": (_size, (tuple,)),
    "collections.OrderedDict": (lambda u: OrderedDict(), ()),
    "collections.Counter": (_count, (dict,)),
    "collections.defaultdict": (lambda u, *x: DefaultDict((), *x), (), (Placeholder,)),
    "_codecs.encode": (_encode, (str, str)),
    "builtins.bytes": (lambda u: b"", ()),
    "builtins.bytearray": (_bytearray, (), (bytes,), (str, str)),
    "builtins.complex": (lambda u, *x: complex(*x), (float, float)),
    "builtins.set": (lambda u, *x: u._add(set(), *x), (), (list,)),
    "builtins.frozenset": (lambda u, *x: frozenset(u._add(set(), *x)), (), (list,)),
    ".".join(TENSOR_SHAPE): (_tensor_shape, (tuple, str), (tuple, str, bool, bool)),
}


def _read_names(stream: IO[bytes]) -> tuple[str, str]:
    lines = stream.readline(1000), stream.readline(1000)
    is_ended = all(line.endswith(b"\n") for line in lines)
    check(is_ended, "a name in the pickle does not end. Copy the file again.")
    module, name = (line[:-1].decode("utf-8", "surrogatepass") for line in lines)
    return module, name


# The action of each instruction on its argument. None pushes it onto the stack.
_ACTIONS: dict[str, Callable[[Unpickler, Any], object] | None] = {
    "PROTO": lambda u, version: check(
        2 <= version <= 5, f"pickle protocol {version} is not supported. Use 2 to 5."
    ),
    "FRAME": lambda u, size: None,  # a hint for buffering
    **dict.fromkeys(("BININT", "BININT1", "BININT2", "LONG1", "LONG4", "BINFLOAT")),
    **dict.fromkeys(("BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8")),
    **dict.fromkeys(("BINSTRING", "SHORT_BINSTRING")),  # Python 2's str
    **dict.fromkeys(("BINBYTES", "SHORT_BINBYTES", "BINBYTES8", "BYTEARRAY8")),
    "NONE": lambda u, _: u._push(None),
    "NEWTRUE": lambda u, _: u._push(True),
    "NEWFALSE": lambda u, _: u._push(False),
    "EMPTY_LIST": lambda u, _: u._push([]),
    "EMPTY_DICT": lambda u, _: u._push({}),
    "EMPTY_TUPLE": lambda u, _: u._push(()),
    "TUPLE1": lambda u, _: u._push(u._pop(1)),
    "TUPLE2": lambda u, _: u._push(u._pop(2)),
    "TUPLE3": lambda u, _: u._push(u._pop(3)),
    "TUPLE": lambda u, _: u._push(tuple(u._pop_mark())),
    "EMPTY_SET": lambda u, _: u._push(u._add(set())),
    "FROZENSET": lambda u, _: u._push(frozenset(u._add(set(), u._pop_mark()))),
    "MARK": Unpickler._mark,
    # Python writes these two for tuples that contain themselves.
    "POP": Unpickler._discard,
    "POP_MARK": Unpickler._pop_mark,
    **dict.fromkeys(("BINPUT", "LONG_BINPUT"), Unpickler._put),
    "MEMOIZE": lambda u, _: u._put(len(u._memo)),
    **dict.fromkeys(("BINGET", "LONG_BINGET"), Unpickler._get),
    "APPEND": lambda u, _: u._edit(b"a", [*u._pop(1)]),
    "APPENDS": lambda u, _: u._edit(b"e", u._pop_mark()),
    "SETITEM": lambda u, _: u._edit(b"s", [*u._pop(2)]),
    "SETITEMS": lambda u, _: u._edit(b"u", u._pop_mark()),
    "ADDITEMS": lambda u, _: u._edit(b"\x90", u._pop_mark()),
    "BUILD": lambda u, _: u._edit(b"b", [*u._pop(1)]),
    "GLOBAL": lambda u, names: u._name(*names),
    "STACK_GLOBAL": lambda u, _: u._name(*u._pop(2)),
    "REDUCE": lambda u, _: u._call(b"R"),
    "NEWOBJ": lambda u, _: u._call(b"\x81"),
    "BINPERSID": Unpickler._persistent,
}
_OPCODES = {
    op.code.encode("latin1"): (op.arg.reader if op.arg else None, _ACTIONS[op.name])
    for op in pickletools.opcodes
    if op.name in _ACTIONS
}
# pickletools decodes escapes in names. Python's unpickler does not.
_OPCODES[b"c"] = _read_names, _ACTIONS["GLOBAL"]


def _kind(value: Any) -> str:
    return type(value).__name__


def _check_key(key: Any, unknown: type[Exception] = CheckpointError) -> tuple[Any, ...]:
    """Return the parts of a dict key; raise unless they are all plain values."""
    parts = key if type(key) in _TUPLES and len(key) <= 64 else (key,)
    if not all(type(part) in _KEYS for part in parts):
        raise unknown(
            f"a dict key or set member has type {_kind(key)}. It must be a plain value "
            "or a flat tuple of plain values."
        )
    return parts


def check_tree(
    root: Any, limits: Limits, unknown: type[Exception] = CheckpointError
) -> int:
    """Raise unless ``load`` and ``save`` support an object's types, depth and size.

    Shared values count each time they appear, and only placeholders may form cycles, so
    code that walks the object later is safe. ``unknown`` is raised for bad types.
    Returns the size of all arrays in bytes, each counted once, as ``save`` writes them.
    """
    too_deep = f"values are nested over {_MAX_DEPTH} deep, or one contains itself."
    # Placeholders are visited last, each only once.
    pending: list[tuple[int, list[Any]]] = [(0, [root])]
    seen: set[int] = set()
    arrays: dict[int, int] = {}
    trail: list[Any] = [None] * (_MAX_DEPTH + 1)

    def visit(value: Any, depth: int) -> None:
        kind = type(value)
        limits.spend(_VALUE + (len(value) // TEXT if kind in _TEXTS else 0))
        if kind is int:
            is_short = value.bit_length() <= _MAX_BITS
            check(is_short, f"an integer has over {_MAX_BITS} bits. Save it as bytes.")
        elif kind is Placeholder:
            check(depth <= _MAX_DEPTH, too_deep)
            if id(value) not in seen:
                seen.add(id(value))
                edits = [item for _, items in value.edits for item in items]
                pending.append((depth + 1, [value.callee, value.args, *edits]))
        elif kind in _ITEMS:
            check(depth < _MAX_DEPTH, too_deep)
            items = enumerate(value)
            for key in value if kind is not list and kind not in _TUPLES else ():
                _check_key(key, unknown)
            if kind in _DICTS:
                attributes = getattr(value, "__dict__", {})
                is_known = attributes.keys() <= {"_metadata", "factory"}
                check(is_known, "a dict has attributes other than _metadata.")
                for held in (*value, *attributes.values()):
                    visit(held, depth + 1)
                items = value.items()
            for trail[depth], item in items:
                visit(item, depth + 1)
        elif kind in _LEAVES:
            return
        elif isinstance(value, (mx.array, np.ndarray)) and dtype_name(value) in DTYPES:
            arrays[id(value)] = value.nbytes
        else:
            dtype = f" of dtype {value.dtype}" if isinstance(value, np.ndarray) else ""
            advice = " Save its .item()." if isinstance(value, np.generic) else ""
            place = "".join(f"[{key!a:.80}]" for key in trail[:depth][:20])
            raise unknown(
                f"obj{place} has type {_kind(value)}{dtype}, which a checkpoint cannot "
                f"hold.{advice} Only arrays, dicts, lists, tuples, sets, numbers, "
                "strings, bytes and None can be saved."
            )

    for depth, values in pending:
        trail[:depth] = ["..."] * depth
        for value in values:
            visit(value, depth)
    return sum(arrays.values())
