"""A closed interpreter for pickles: plain values, tensors, and placeholders.

It executes the instructions used by PyTorch's pickles (protocols 2 to 5) and raises
``CheckpointError`` for all others. The only functions it calls are those in
``builders.BUILDERS``; other calls are recorded on a ``Placeholder`` and not made.
Python's own unpickler is not used.
"""

import pickletools
import struct
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from typing import Any

import mlx.core as mx
import numpy as np

from .builders import BUILDERS, look_up
from .foreign import DefaultDict, Placeholder, TensorShape, TorchName, TorchSize
from .limits import Budget, CheckpointError, Limits, check, require
from .tensors import TensorReader

_SETS = ("builtins.set", "builtins.frozenset")
_DICTS = frozenset({dict, OrderedDict, Counter, DefaultDict})
_ITEMS = _DICTS | {list, tuple, TorchSize, set, frozenset}
_TEXTS = frozenset({str, bytes, bytearray, TorchName})
_NUMBERS = frozenset({int, float, bool, type(None), complex})
_KEYS = frozenset({str, bytes, TorchName, Placeholder}) | _NUMBERS
_LEAVES = _NUMBERS | _TEXTS | {Placeholder, TensorShape}
_NOTHING = object()
_STOP = ord(".")
# Bytes of text per operation, and the operations that a call or a set costs.
_TEXT, _OBJECT = 32, 4
# Probing this many occupied slots of a hash table takes as long as one operation.
_SLOTS = 64
# Python's own recursion limit is 1000.
_MAX_DEPTH = 400


class Unpickler:
    """Read one pickle from a buffer.

    Args:
        data (bytes): The buffer.
        start (int): Start of the pickle. After ``read``, ``position`` is its end.
        tensors (TensorReader): Builds the tensors.
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
        # A list rather than a dict, because a file can choose the numbers.
        self._memo: list[Any] = []
        self._remembered = 0
        self._names: dict[str, Any] = {}

    def read(self) -> Any:
        """Execute the instructions to the end and return the object."""
        start, budget = self.position, self._budget
        try:
            while (code := self._data[self.position]) != _STOP:
                self.position += 1
                budget.operations -= 1
                if budget.operations < 0:
                    budget.spend(0)
                if code in _VALUES:
                    value = _VALUES[code](self)
                    self._stack.append(value)
                elif code in _ACTIONS:
                    _ACTIONS[code](self)
                else:
                    names = {ord(op.code): op.name for op in pickletools.opcodes}
                    problem = f"pickle opcode {names.get(code, hex(code))} does not "
                    raise CheckpointError(f"{problem}occur in checkpoints.")
            self.position += 1
            check(
                not self._outer and len(self._stack) == 1,
                "the pickle stops in the middle.",
            )
            check_tree(self._stack[0], budget.limits)
            return self._stack[0]
        except IndexError:
            is_cut = self.position >= len(self._data)
            problem = "is cut off" if is_cut else "takes a value from an empty stack"
            where = f"Pickle, byte {self.position - start}: "
            raise CheckpointError(f"{where}the pickle {problem}.") from None
        except CheckpointError as error:
            where = f"Pickle, byte {self.position - start}{self._last_key()}: "
            raise CheckpointError(f"{where}{error}") from None

    def _last_key(self) -> str:
        """Return the last string on the stack, usually the key of a damaged value."""
        for stack in (self._stack, *self._outer[:-4:-1]):
            if stack and type(stack[-1]) is str:
                return f", near {stack[-1][:80]!a}"
        return ""

    # Instruction arguments.

    def _take(self, size: int) -> bytes:
        end = self.position + size
        check(end <= len(self._data), "the pickle is cut off.")
        piece = self._data[self.position : end]
        self.position = end
        return piece

    def _number(self, size: int) -> int:
        return int.from_bytes(self._take(size), "little")

    def _signed(self, data: bytes) -> int:
        return int.from_bytes(data, "little", signed=True)

    def _float(self) -> Any:
        return struct.unpack(">d", self._take(8))[0]

    def _bytes(self, size: int) -> bytes:
        """Return bytes preceded by their length, a number of ``size`` bytes."""
        data = self._take(self._number(size))
        self._budget.spend(len(data) // _TEXT)
        return data

    def _text(self, size: int) -> str:
        return _decode(self._bytes(size))

    def _line(self) -> str:
        end = self._data.find(b"\n", self.position, self.position + 1000)
        check(end >= 0, "a name in the pickle does not end.")
        text = _decode(self._take(end - self.position))
        self.position += 1
        return text

    def _pop_mark(self) -> list[Any]:
        items = self._stack
        self._stack = self._outer.pop()
        return items

    # Instructions.

    def _protocol(self) -> None:
        version = self._number(1)
        check(2 <= version <= 5, f"pickle protocol {version} is not one of 2 to 5.")

    def _mark(self) -> None:
        self._outer.append(self._stack)
        self._stack = []

    def _tuple(self, count: int) -> tuple[Any, ...]:
        if len(self._stack) < count:
            raise IndexError
        items = tuple(self._stack[-count:])
        del self._stack[-count:]
        return items

    def _pop(self) -> None:
        # With nothing above it, the mark itself is removed, as in Python.
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

    def _get(self, index: int) -> Any:
        value = self._memo[index] if index < len(self._memo) else _NOTHING
        check(value is not _NOTHING, f"object {index} is not in the pickle.")
        return value

    def _target(self, opcode: bytes, values: list[Any], *kinds: type) -> Any:
        """Return the container on top of the stack; a placeholder records values."""
        target = self._stack[-1]
        if type(target) is Placeholder:
            target.edits.append((opcode, values))
            return None
        change = f"it changes a {_kind(target)} as if it were a {kinds[0].__name__}."
        check(type(target) in kinds, change)
        return target

    def _extend(self, items: list[Any], opcode: bytes = b"e") -> None:
        target = self._target(opcode, items, list)
        if target is not None:
            target.extend(items)

    def _append(self) -> None:
        item = self._stack.pop()
        self._extend([item], b"a")

    def _set_items(self, items: list[Any], opcode: bytes = b"u") -> None:
        check(len(items) % 2 == 0, "it sets a key without a value.")
        target = self._target(opcode, items, dict, *_DICTS)
        if target is not None:
            for key, value in zip(items[::2], items[1::2], strict=True):
                self._pay_for_key(target, key)
                target[key] = value

    def _set_item(self) -> None:
        value, key = self._stack.pop(), self._stack.pop()
        self._set_items([key, value], b"s")

    def _add_items(self) -> None:
        items = self._pop_mark()
        target = self._target(b"\x90", items, set)
        if target is not None:
            self._set_of(items, target)

    def _set_of(self, members: list[Any], target: set[Any] | None = None) -> set[Any]:
        require(type(members) is list)
        target = set() if target is None else target
        self._budget.spend(_OBJECT)
        for member in members:
            self._budget.spend(1)
            self._pay_for_key(target, member)
            target.add(member)
        return target

    def _pay_for_key(self, target: Any, key: Any) -> None:
        """Pay for adding a key to a dict or set.

        A file can choose numbers and tuples that collide: n of them take n * n steps.
        String hashes are randomized; only long strings cost more.
        """
        if type(key) is str and len(key) < 1024:
            return
        parts = _check_key(key)
        texts = [len(part) // 1024 for part in parts if type(part) in _TEXTS]
        if len(texts) == len(parts):
            self._budget.spend(sum(texts))
        # The keys 0, 1, 2, ... of an optimizer never collide.
        elif type(key) is not int or not 0 <= key <= len(target):
            # Others may have equal hashes and are then compared in every slot.
            is_short = type(key) is float or (type(key) is int and abs(key) < 2**60)
            cost = 1 if is_short else 8 * len(parts) + sum(texts)
            self._budget.spend(cost * len(target) // _SLOTS + 1)

    def _name(self, module: Any, name: Any) -> Any:
        check(type(module) is type(name) is str, "a name in the pickle is not text.")
        # One object per name, as for the class itself.
        key = f"{module}\n{name}"
        if key not in self._names:
            self._budget.spend(_OBJECT + len(key) // _TEXT)
            self._names[key] = look_up(module, name)
        return self._names[key]

    def _global(self) -> Any:
        module = self._line()
        return self._name(module, self._line())

    def _stack_global(self) -> Any:
        name = self._stack.pop()
        return self._name(self._stack.pop(), name)

    def _persistent(self) -> Any:
        self._budget.spend(_OBJECT)
        return self._tensors.storage(self._stack.pop())

    def _new_object(self) -> Placeholder:
        args = self._stack.pop()
        return self._call(b"\x81", self._stack.pop(), args)

    def _call(self, opcode: bytes, callee: Any, args: Any) -> Placeholder:
        """Return a placeholder for the object that a call would make."""
        check(
            type(callee) is Placeholder and type(args) is tuple,
            f"it calls a {_kind(callee)} with a {_kind(args)}.",
        )
        self._budget.spend(_OBJECT)
        return callee.called(opcode, args)  # type: ignore[no-any-return]

    def _reduce(self) -> Any:
        args, callee = self._stack.pop(), self._stack.pop()
        path = callee.path if type(callee) is Placeholder and not callee.callee else ""
        if type(args) is not tuple or (path not in BUILDERS and path not in _SETS):
            return self._call(b"R", callee, args)
        self._budget.spend(_OBJECT)
        try:
            if path in _SETS:
                require(len(args) < 2)
                members = self._set_of(*args or ([],))
                return members if path == "builtins.set" else frozenset(members)
            # An argument may come from the memo and be copied any number of times.
            for arg in args:
                if type(arg) in _TEXTS:
                    self._budget.spend(len(arg) // _TEXT)
                elif type(arg) is dict:
                    self._set_of(list(arg))
                elif type(arg) in _ITEMS:
                    self._budget.spend(len(arg))
            return BUILDERS[path](self._tensors, *args)
        except TypeError:
            problem = f"{path} is called with arguments that it does not take."
            raise CheckpointError(problem) from None

    def _build(self) -> None:
        """Set the state of the object on top of the stack."""
        state = self._stack.pop()
        target = self._target(b"b", [state], OrderedDict)
        if target is not None:
            # nn.Module.state_dict() sets _metadata; others could shadow methods.
            check(
                type(state) is dict and all(key == "_metadata" for key in state),
                "an OrderedDict has attributes other than _metadata. Save it as a "
                "plain dict.",
            )
            self._budget.spend(_OBJECT)
            target.__dict__.update(state)


_ACTIONS: dict[int, Callable[[Unpickler], object]] = {
    0x80: Unpickler._protocol,
    0x95: lambda u: u._take(8),  # frame size, a hint for buffering
    ord("("): Unpickler._mark,
    ord("a"): Unpickler._append,
    ord("e"): lambda u: u._extend(u._pop_mark()),
    ord("s"): Unpickler._set_item,
    ord("u"): lambda u: u._set_items(u._pop_mark()),
    0x90: Unpickler._add_items,
    ord("b"): Unpickler._build,
    # POP and POP_MARK, which Python writes for tuples that contain themselves.
    ord("0"): Unpickler._pop,
    ord("1"): Unpickler._pop_mark,
    # The memo: BINPUT, LONG_BINPUT, MEMOIZE.
    ord("q"): lambda u: u._put(u._number(1)),
    ord("r"): lambda u: u._put(u._number(4)),
    0x94: lambda u: u._put(u._remembered),
}
# Instructions that push a value onto the stack.
_VALUES: dict[int, Callable[[Unpickler], Any]] = {
    ord("N"): lambda u: None,
    0x88: lambda u: True,
    0x89: lambda u: False,
    ord("K"): lambda u: u._number(1),
    ord("M"): lambda u: u._number(2),
    ord("J"): lambda u: u._signed(u._take(4)),
    0x8A: lambda u: u._signed(u._bytes(1)),
    0x8B: lambda u: u._signed(u._bytes(4)),
    ord("G"): Unpickler._float,
    # Text: BINUNICODE, SHORT_BINUNICODE, BINUNICODE8, and Python 2's str.
    ord("X"): lambda u: u._text(4),
    0x8C: lambda u: u._text(1),
    0x8D: lambda u: u._text(8),
    ord("U"): lambda u: u._text(1),
    ord("T"): lambda u: u._text(4),
    # Bytes: BINBYTES, SHORT_BINBYTES, BINBYTES8, BYTEARRAY8.
    ord("B"): lambda u: u._bytes(4),
    ord("C"): lambda u: u._bytes(1),
    0x8E: lambda u: u._bytes(8),
    0x96: lambda u: bytearray(u._bytes(8)),
    # Containers.
    ord(")"): lambda u: (),
    0x85: lambda u: u._tuple(1),
    0x86: lambda u: u._tuple(2),
    0x87: lambda u: u._tuple(3),
    ord("t"): lambda u: tuple(u._pop_mark()),
    ord("]"): lambda u: [],
    ord("}"): lambda u: {},
    0x8F: lambda u: u._set_of([]),
    0x91: lambda u: frozenset(u._set_of(u._pop_mark())),
    # Names and objects.
    ord("c"): Unpickler._global,
    0x93: Unpickler._stack_global,
    ord("R"): Unpickler._reduce,
    0x81: Unpickler._new_object,
    ord("Q"): Unpickler._persistent,
    # The memo: BINGET, LONG_BINGET.
    ord("h"): lambda u: u._get(u._number(1)),
    ord("j"): lambda u: u._get(u._number(4)),
}


def _decode(data: bytes) -> str:
    try:
        return data.decode("utf-8", "surrogatepass")
    except UnicodeDecodeError:
        raise CheckpointError("a text in the pickle is not valid UTF-8.") from None


def _kind(value: Any) -> str:
    return type(value).__name__


def _check_key(key: Any) -> tuple[Any, ...]:
    """Return the parts of a key that is a plain value or a flat tuple of them."""
    parts = key if type(key) in (tuple, TorchSize) and len(key) <= 64 else (key,)
    check(
        all(type(part) in _KEYS for part in parts),
        f"a dict key or set member is a {_kind(key)}. It must be a plain value or a "
        "flat tuple of them.",
    )
    return parts


def check_tree(root: Any, limits: Limits) -> None:
    """Raise if an object is too deep, too large when expanded, or contains itself.

    Only placeholders may form cycles. Code that walks the object later does not need
    these checks.
    """
    left, most = limits.operations, min(limits.depth, _MAX_DEPTH)
    too_deep = f"containers are nested more than {most} deep, or one contains itself."
    # Placeholders are visited last, each only once.
    pending: list[tuple[int, Iterable[Any]]] = [(0, (root,))]
    seen: set[int] = set()

    def visit(value: Any, depth: int) -> None:
        nonlocal left
        kind = type(value)
        left -= 1 + (len(value) // _TEXT if kind in _TEXTS else 0)
        if left < 0:
            raise CheckpointError(
                f"the object has more than {limits.operations} values, counting shared "
                "ones wherever they appear. If you trust it, raise limits.operations."
            )
        if kind is Placeholder:
            if id(value) not in seen:
                seen.add(id(value))
                edits = [item for _, items in value.edits for item in items]
                held = [value.callee, value.args, *edits]
                pending.append((depth + 1, held))
        elif kind in _ITEMS:
            check(depth < most, too_deep)
            if kind not in (list, tuple, TorchSize):
                for key in value:
                    _check_key(key)
            held = value
            if kind in _DICTS:
                # OrderedDict may have a _metadata attribute, DefaultDict a factory.
                attributes = getattr(value, "__dict__", {})
                held = [*value, *value.values(), *attributes.values()]
            for item in held:
                visit(item, depth + 1)
        elif kind not in _LEAVES and not isinstance(value, (mx.array, np.ndarray)):
            raise CheckpointError(f"a {kind.__name__} cannot be a value.")

    for depth, values in pending:
        for value in values:
            visit(value, depth)
