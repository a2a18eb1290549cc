"""A closed interpreter for pickles: plain values, tensors, and placeholders.

It follows the instructions that PyTorch's pickles (protocols 2 to 5) consist of and
raises ``CheckpointError`` for all others. The only functions it calls are those of
``builders.BUILDERS``; other calls are noted on a ``Placeholder`` and not made. Python's
own unpickler is not involved.
"""

import pickletools
import struct
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import mlx.core as mx

from .builders import BUILDERS, look_up
from .foreign import DefaultDict, Placeholder, TensorShape, TorchName, TorchSize
from .limits import Budget, CheckpointError, CutOffError
from .tensors import TensorReader

_DICTS = frozenset({dict, OrderedDict, Counter, DefaultDict})
_ITEMS = _DICTS | {list, tuple, TorchSize, set, frozenset}
_TEXTS = frozenset({str, bytes, bytearray, TorchName})
_NUMBERS = frozenset({int, float, bool, type(None), complex})
_KEYS = frozenset({str, bytes, TorchName, Placeholder}) | _NUMBERS
_NOTHING = object()
_STOP = ord(".")
# Bytes of text that count as one operation, and what larger objects count.
_TEXT = 32
_SET, _PLACEHOLDER, _TENSOR = 3, 4, 20
# Passing an occupied slot of a hash table takes about 10 ns.
_SLOTS = 128


class Unpickler:
    """Read one pickle from a buffer.

    Args:
        data (bytes): The buffer.
        start (int): Where the pickle begins. After ``read``, ``position`` is its end.
        tensors (TensorReader): Makes the tensors.
        budget (Budget): The operations that the file has left.
    """

    def __init__(
        self, data: bytes, start: int, tensors: TensorReader, budget: Budget
    ) -> None:
        self.position = start
        self._data = data
        self._tensors = tensors
        self._budget = budget
        self._stack: list[Any] = []
        self._outer: list[list[Any]] = []
        # A list, because a file can choose the numbers.
        self._memo: list[Any] = []
        self._remembered = 0
        self._names: dict[str, Any] = {}

    def read(self) -> Any:
        """Follow the instructions up to the end and return the object."""
        start, budget = self.position, self._budget
        try:
            while True:
                code = self._data[self.position]
                self.position += 1
                if code == _STOP:
                    break
                budget.operations -= 1
                if budget.operations < 0:
                    budget.spend(0)
                handler = _HANDLERS.get(code)
                if handler is None:
                    raise CheckpointError(
                        f"pickle opcode {_opcode_name(code)} does not occur in "
                        "checkpoints."
                    )
                handler(self)
            if self._outer or len(self._stack) != 1:
                raise CheckpointError("the pickle stops in the middle.")
            check_tree(self._stack[0], budget)
            return self._stack[0]
        except CheckpointError as error:
            where = f"Pickle, byte {self.position - start}{self._last_key()}: "
            raise type(error)(f"{where}{error}") from None
        except IndexError:
            where = f"Pickle, byte {self.position - start}: "
            if self.position >= len(self._data):
                raise CutOffError(f"{where}the pickle is cut off.") from None
            raise CheckpointError(
                f"{where}it takes a value from an empty stack; the file is damaged."
            ) from None

    def _last_key(self) -> str:
        """Return the last text on the stack, usually the key of a damaged value."""
        for stack in (self._stack, *self._outer[:-4:-1]):
            if stack and type(stack[-1]) is str:
                return f", near {stack[-1][:80]!a}"
        return ""

    # Arguments of instructions.

    def _take(self, size: int) -> bytes:
        end = self.position + size
        if end > len(self._data):
            raise CutOffError("the pickle is cut off.")
        piece = self._data[self.position : end]
        self.position = end
        return piece

    def _number(self, size: int) -> int:
        return int.from_bytes(self._take(size), "little")

    def _text(self, size: int) -> str:
        data = self._take(self._number(size))
        self._budget.spend(len(data) // _TEXT)
        return _decode(data)

    def _bytes(self, size: int) -> bytes:
        data = self._take(self._number(size))
        self._budget.spend(len(data) // _TEXT)
        return data

    def _line(self) -> str:
        end = self._data.find(b"\n", self.position, self.position + 1000)
        if end < 0:
            is_cut = len(self._data) < self.position + 1000
            kind = CutOffError if is_cut else CheckpointError
            raise kind("a name in the pickle does not end.")
        text = _decode(self._take(end - self.position))
        self.position += 1
        return text

    def _pop_mark(self) -> list[Any]:
        items = self._stack
        self._stack = self._outer.pop()
        return items

    # Instructions.

    def _proto(self) -> None:
        version = self._number(1)
        if not 2 <= version <= 5:
            raise CheckpointError(f"pickle protocol {version} is not one of 2 to 5.")

    def _frame(self) -> None:
        # A hint for buffering, no more.
        if self._number(8) > len(self._data) - self.position:
            raise CutOffError("the pickle is cut off.")

    def _long(self, size: int) -> None:
        data = self._bytes(size)
        self._stack.append(int.from_bytes(data, "little", signed=True))

    def _float(self) -> None:
        self._stack.append(struct.unpack(">d", self._take(8))[0])

    def _int(self) -> None:
        self._stack.append(int.from_bytes(self._take(4), "little", signed=True))

    def _mark(self) -> None:
        self._outer.append(self._stack)
        self._stack = []

    def _tuple(self, count: int) -> None:
        stack = self._stack
        if len(stack) < count:
            raise IndexError
        stack[-count:] = [tuple(stack[-count:])]

    def _marked_tuple(self) -> None:
        items = tuple(self._pop_mark())
        self._stack.append(items)

    def _pop(self) -> None:
        # With nothing above it, the mark itself is removed, as Python does.
        if self._stack:
            self._stack.pop()
        else:
            self._pop_mark()

    def _put(self, index: int) -> None:
        missing = index + 1 - len(self._memo)
        if missing > 0:
            self._budget.spend(missing - 1)
            self._memo.extend([_NOTHING] * missing)
        self._remembered += self._memo[index] is _NOTHING
        self._memo[index] = self._stack[-1]

    def _get(self, index: int) -> None:
        value = self._memo[index] if index < len(self._memo) else _NOTHING
        if value is _NOTHING:
            raise CheckpointError(
                f"the pickle refers to object {index}, which it does not have."
            )
        self._stack.append(value)

    def _note(self, opcode: bytes, values: list[Any]) -> bool:
        """Note an instruction on the placeholder on top of the stack, if it is one."""
        target = self._stack[-1]
        if type(target) is not Placeholder:
            return False
        self._budget.spend(1)
        target.edits.append((opcode, values))
        return True

    def _extend(self, items: list[Any], opcode: bytes = b"e") -> None:
        if self._note(opcode, items):
            return
        if type(self._stack[-1]) is not list:
            raise CheckpointError(f"it appends to a {_kind(self._stack[-1])}.")
        self._budget.spend(len(items) // 4)
        self._stack[-1].extend(items)

    def _append(self) -> None:
        item = self._stack.pop()
        self._extend([item], b"a")

    def _set_items(self, items: list[Any], opcode: bytes = b"u") -> None:
        target = self._stack[-1]
        if len(items) % 2 == 0 and self._note(opcode, items):
            return
        if type(target) not in _DICTS or len(items) % 2:
            raise CheckpointError(f"it sets items of a {_kind(target)}.")
        for key, value in zip(items[::2], items[1::2], strict=True):
            self._pay_for_key(target, key)
            target[key] = value

    def _set_item(self) -> None:
        value, key = self._stack.pop(), self._stack.pop()
        self._set_items([key, value], b"s")

    def _empty_set(self) -> None:
        self._budget.spend(_SET)
        self._stack.append(set())

    def _add_items(self) -> None:
        items = self._pop_mark()
        if self._note(b"\x90", items):
            return
        if type(self._stack[-1]) is not set:
            raise CheckpointError(f"it adds to a {_kind(self._stack[-1])}.")
        self._fill(self._stack[-1], items)

    def _frozenset(self) -> None:
        items = self._pop_mark()
        self._stack.append(frozenset(self._fill(set(), items)))

    def _fill(self, target: set[Any], members: Iterable[Any]) -> set[Any]:
        self._budget.spend(_SET)
        for member in members:
            self._budget.spend(1)
            self._pay_for_key(target, member)
            target.add(member)
        return target

    def _pay_for_key(self, target: Any, key: Any) -> None:
        """Pay for adding a key to a dict or set.

        A file can choose numbers and tuples that occupy each other's slots: n of them
        take n * n steps. The hashes of texts are secret; only long ones cost more.
        """
        kind = type(key)
        if kind in (str, bytes, TorchName):
            if len(key) >= 1024:
                self._budget.spend(len(key) // 1024)
            return
        parts = key if kind in (tuple, TorchSize) and len(key) <= 64 else (key,)
        if not all(type(part) in _KEYS for part in parts):
            raise CheckpointError(
                f"a dict key or set member is a {_kind(key)}. Only plain values and "
                "flat tuples of them can be read."
            )
        # The keys 0, 1, 2, ... of an optimizer are never in each other's way.
        if kind in (bool, Placeholder) or (kind is int and 0 <= key <= len(target)):
            return
        cost = 1
        for part in parts:
            cost += 1 + (len(part) // 1024 if type(part) in _TEXTS else 0)
            if type(part) is int:
                cost += part.bit_length() // 64
        self._budget.spend(cost * len(target) // _SLOTS + cost)

    def _name(self, module: Any, name: Any) -> None:
        if type(module) is not str or type(name) is not str:
            raise CheckpointError("a name in the pickle is not text.")
        # One object for each name, as the class itself would be.
        key = f"{module}\n{name}"
        if key not in self._names:
            self._budget.spend(_PLACEHOLDER + len(key) // _TEXT)
            self._names[key] = look_up(module, name)
        self._stack.append(self._names[key])

    def _global(self) -> None:
        module = self._line()
        self._name(module, self._line())

    def _stack_global(self) -> None:
        name = self._stack.pop()
        self._name(self._stack.pop(), name)

    def _persistent(self) -> None:
        pid = self._stack.pop()
        self._budget.spend(_PLACEHOLDER)
        self._stack.append(self._tensors.storage(pid))

    def _new_object(self) -> None:
        args = self._stack.pop()
        self._call(b"\x81", self._stack.pop(), args)

    def _new_object_ex(self) -> None:
        kwargs, args = self._stack.pop(), self._stack.pop()
        if type(kwargs) is not dict:
            raise CheckpointError("an object is made without keyword arguments.")
        self._call(b"\x92", self._stack.pop(), args, kwargs)

    def _call(
        self,
        opcode: bytes,
        callee: Any,
        args: Any,
        kwargs: dict[Any, Any] | None = None,
    ) -> None:
        """Put the placeholder of the object that a call would make on the stack."""
        if type(callee) is not Placeholder or type(args) is not tuple:
            raise CheckpointError(f"it makes an object of a {_kind(callee)}.")
        # Joining two names makes a text of up to 1000 characters.
        self._budget.spend(_PLACEHOLDER * (5 if callee.is_getattr else 1))
        self._stack.append(callee.called(opcode, args, kwargs))

    def _reduce(self) -> None:
        args, callee = self._stack.pop(), self._stack.pop()
        path = callee.path if type(callee) is Placeholder and not callee.callee else ""
        if type(args) is not tuple:
            raise CheckpointError(f"it makes an object of a {_kind(args)}.")
        if path in ("builtins.set", "builtins.frozenset"):
            if [type(arg) for arg in args] not in ([list], []):
                raise CheckpointError(f"{path} is not made of a list.")
            members = self._fill(set(), *args or [()])
            self._stack.append(members if path.endswith(".set") else frozenset(members))
        elif path in BUILDERS:
            self._stack.append(self._build_value(path, args))
        else:
            self._call(b"R", callee, args)

    def _build_value(self, path: str, args: tuple[Any, ...]) -> Any:
        # An argument may come from the memo and be copied any number of times.
        for arg in args:
            kind = type(arg)
            if kind in _TEXTS:
                self._budget.spend(len(arg) // _TEXT)
            elif kind in _ITEMS:
                self._budget.spend(len(arg))
        if path == "collections.Counter" and args and type(args[0]) is dict:
            self._fill(set(), args[0])
        try:
            value = BUILDERS[path](self._tensors, *args)
        except TypeError:
            raise CheckpointError(
                f"{path} is called with arguments that it does not take."
            ) from None
        is_tensor = isinstance(value, (mx.array, TensorShape))
        self._budget.spend(_TENSOR if is_tensor else _SET)
        return value

    def _build(self) -> None:
        """Set the state of the object on top of the stack."""
        state = self._stack.pop()
        target = self._stack[-1]
        if self._note(b"b", [state]):
            return
        if type(target) is not OrderedDict or type(state) is not dict:
            raise CheckpointError(f"it sets the state of a {_kind(target)}.")
        # nn.Module.state_dict() sets _metadata; other names could shadow methods.
        if any(key != "_metadata" for key in state):
            raise CheckpointError(
                "an OrderedDict has attributes other than _metadata. Save it as a "
                "plain dict."
            )
        self._budget.spend(_SET)
        target.__dict__.update(state)


def _decode(data: bytes) -> str:
    try:
        return data.decode("utf-8", "surrogatepass")
    except UnicodeDecodeError:
        raise CheckpointError("a text in the pickle is not valid UTF-8.") from None


def _kind(value: Any) -> str:
    return type(value).__name__


def _opcode_name(code: int) -> str:
    names = (op.name for op in pickletools.opcodes if ord(op.code) == code)
    return next(names, f"0x{code:02x}")


def check_tree(root: Any, budget: Budget) -> None:
    """Raise if an object is too deep, too large when expanded, or contains itself.

    Only placeholders may form rings. Whoever walks the object elsewhere needs no such
    checks.
    """
    limits = budget.limits
    left = limits.operations
    # Placeholders come last, and each once.
    pending: list[tuple[int, Any]] = [(0, root)]
    seen: set[int] = set()

    def visit(value: Any, depth: int) -> None:
        nonlocal left
        kind = type(value)
        left -= 1
        if left < 0:
            raise CheckpointError(
                f"the object has more than {limits.operations} values, counting shared "
                "ones wherever they appear. If you trust it, raise limits.operations."
            )
        if kind in _NUMBERS:
            return
        if kind in _TEXTS:
            left -= len(value) // _TEXT
        elif kind is Placeholder:
            if id(value) not in seen:
                seen.add(id(value))
                pending.append((depth + 1, value))
        elif kind in _ITEMS:
            if depth >= limits.depth:
                raise CheckpointError(
                    f"containers are nested more than {limits.depth} deep, or one "
                    "contains itself."
                )
            for item in _contents(value):
                visit(item, depth + 1)
        elif not isinstance(value, (mx.array, TensorShape)):
            raise CheckpointError(f"a {kind.__name__} cannot be a value.")

    for depth, value in pending:
        if type(value) is not Placeholder:
            visit(value, depth)
        else:
            for item in (value.callee, value.args, value.kwargs):
                visit(item, depth)
            for _, held in value.edits:
                for item in held:
                    visit(item, depth)


def _contents(value: Any) -> Iterator[Any]:
    if type(value) not in _DICTS:
        yield from value
        return
    for key, item in value.items():
        yield key
        yield item
    if type(value) is OrderedDict:
        yield from vars(value).values()
    elif type(value) is DefaultDict:
        yield value.factory


_HANDLERS: dict[int, Callable[[Unpickler], object]] = {
    0x80: Unpickler._proto,
    0x95: Unpickler._frame,
    # Values.
    ord("N"): lambda u: u._stack.append(None),
    0x88: lambda u: u._stack.append(True),
    0x89: lambda u: u._stack.append(False),
    ord("K"): lambda u: u._stack.append(u._number(1)),
    ord("M"): lambda u: u._stack.append(u._number(2)),
    ord("J"): Unpickler._int,
    ord("G"): Unpickler._float,
    0x8A: lambda u: u._long(1),
    0x8B: lambda u: u._long(4),
    # Text: BINUNICODE, SHORT_BINUNICODE, BINUNICODE8, and Python 2's str.
    ord("X"): lambda u: u._stack.append(u._text(4)),
    0x8C: lambda u: u._stack.append(u._text(1)),
    0x8D: lambda u: u._stack.append(u._text(8)),
    ord("U"): lambda u: u._stack.append(u._text(1)),
    ord("T"): lambda u: u._stack.append(u._text(4)),
    # Bytes: BINBYTES, SHORT_BINBYTES, BINBYTES8, BYTEARRAY8.
    ord("B"): lambda u: u._stack.append(u._bytes(4)),
    ord("C"): lambda u: u._stack.append(u._bytes(1)),
    0x8E: lambda u: u._stack.append(u._bytes(8)),
    0x96: lambda u: u._stack.append(bytearray(u._bytes(8))),
    # Containers.
    ord("("): Unpickler._mark,
    ord(")"): lambda u: u._stack.append(()),
    0x85: lambda u: u._tuple(1),
    0x86: lambda u: u._tuple(2),
    0x87: lambda u: u._tuple(3),
    ord("t"): Unpickler._marked_tuple,
    ord("]"): lambda u: u._stack.append([]),
    ord("a"): Unpickler._append,
    ord("e"): lambda u: u._extend(u._pop_mark()),
    ord("}"): lambda u: u._stack.append({}),
    ord("s"): Unpickler._set_item,
    ord("u"): lambda u: u._set_items(u._pop_mark()),
    0x8F: Unpickler._empty_set,
    0x90: Unpickler._add_items,
    0x91: Unpickler._frozenset,
    # Names and objects.
    ord("c"): Unpickler._global,
    0x93: Unpickler._stack_global,
    ord("R"): Unpickler._reduce,
    ord("b"): Unpickler._build,
    0x81: Unpickler._new_object,
    0x92: Unpickler._new_object_ex,
    ord("Q"): Unpickler._persistent,
    # POP and POP_MARK, which Python writes for tuples that contain themselves.
    ord("0"): Unpickler._pop,
    ord("1"): Unpickler._pop_mark,
    # The memo: BINPUT, LONG_BINPUT, MEMOIZE, BINGET, LONG_BINGET.
    ord("q"): lambda u: u._put(u._number(1)),
    ord("r"): lambda u: u._put(u._number(4)),
    0x94: lambda u: u._put(u._remembered),
    ord("h"): lambda u: u._get(u._number(1)),
    ord("j"): lambda u: u._get(u._number(4)),
}
