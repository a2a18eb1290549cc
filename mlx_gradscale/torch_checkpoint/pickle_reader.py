"""A closed interpreter for pickles: plain values, tensors, and placeholders.

It follows the instructions that PyTorch's pickles (protocols 2 to 5) are made of and
raises ``CheckpointError`` for any other. Names go through ``names.look_up``, a fixed
table; what is done with one that is not in it is noted on a ``Placeholder`` and not
done. Python's own unpickler is not involved.
"""

import struct
from collections import Counter, OrderedDict
from collections.abc import Callable
from sys import getsizeof
from typing import Any

from .foreign import DefaultDict, Placeholder, TorchSize
from .keys import Keys
from .limits import Budget, CheckpointError, CutOffError
from .pickle_allowlist import COUNTER, FROZENSET, SET, call, check_call, look_up
from .tensors import TensorRef

_U8, _U16, _U32, _U64, _I32, _F64 = map(
    struct.Struct, ("B", "<H", "<I", "<Q", "<i", ">d")
)
# Bytes for a place on the stack, in a list or in the memo, while it is growing.
_PLACE = 16
# An item of a container in a call's arguments, which may be copied to a table.
_COPIED = 100
# A tensor's reference, its text and its array, without the data.
_TENSOR = 2000
# What is kept of a container that can be met again.
_SHARED = 300
# What a placeholder takes, also while its tensors are read, and each of the steps noted
# on it.
_PLACEHOLDER, _STEP = 1000, 150
_DICTS = frozenset({dict, OrderedDict, Counter, DefaultDict})
_CONTAINERS = _DICTS | {list, tuple, TorchSize, set, frozenset}
_SHAREABLE = _CONTAINERS | {TensorRef, Placeholder}
_STOP = ord(".")
_NOTHING = object()


class PickleReader:
    """Reads one pickle from a buffer.

    Args:
        data (bytes): The buffer.
        start (int): Where the pickle begins. After ``read``, ``position`` is its end.
        persistent_load (callable): Makes a value of a persistent id.
        budget (Budget): What the file has left; the pickle takes from it.
    """

    def __init__(
        self,
        data: bytes,
        start: int,
        persistent_load: Callable[[Any], Any],
        budget: Budget,
    ) -> None:
        self.data = data
        self.position = start
        self.persistent_load = persistent_load
        self.budget = budget
        self.keys = Keys(budget)
        self.stack: list[Any] = []
        self.outer: list[list[Any]] = []
        # A list, not a dict: a file can choose the numbers.
        self.memo: list[Any] = []
        self.remembered = 0
        self.names: dict[tuple[str, str], Placeholder] = {}
        # The containers and tensors that may be in the object more than once, by id.
        self.shared: dict[int, Any] = {}

    def read(self) -> Any:
        start = self.position
        try:
            while (code := self.number(_U8)) != _STOP:
                self.budget.take(operations=1)
                step = _STEPS.get(code)
                if step is None:
                    raise CheckpointError(
                        f"pickle opcode {_opcode_name(code)} is not one that plain "
                        "checkpoints use."
                    )
                step(self)
            if self.outer or len(self.stack) != 1:
                raise CheckpointError("the pickle stops in the middle.")
            return self.stack[0]
        except CheckpointError as error:
            where = f"Pickle, byte {self.position - start}: "
            text = str(error)
            raise type(error)(where + text[:1].lower() + text[1:]) from None
        except IndexError:
            raise CheckpointError(
                f"Pickle, byte {self.position - start}: takes a value from an empty "
                "stack; the file is damaged."
            ) from None

    # Reading arguments.

    def take(self, size: int) -> bytes:
        end = self.position + size
        if end > len(self.data):
            raise CutOffError("the pickle is cut off.")
        piece = self.data[self.position : end]
        self.position = end
        return piece

    def number(self, form: struct.Struct) -> Any:
        start = self.position
        self.position += form.size
        if self.position > len(self.data):
            raise CutOffError("the pickle is cut off.")
        return form.unpack_from(self.data, start)[0]

    def line(self) -> str:
        # Names of modules and classes: 1000 characters are plenty.
        end = self.data.find(b"\n", self.position, self.position + 1000)
        if end < 0:
            cut = len(self.data) < self.position + 1000
            kind = CutOffError if cut else CheckpointError
            raise kind("a name in the pickle does not end.")
        text = _utf8(self.take(end - self.position))
        self.position += 1
        return text

    def to_mark(self) -> list[Any]:
        items = self.stack
        self.stack = self.outer.pop()
        return items

    # Building values.

    def push(self, value: Any) -> None:
        """A new value, paid for by what it takes."""
        self.budget.take(getsizeof(value) + _PLACE)
        self.stack.append(value)

    def put(self, index: int) -> None:
        value = self.stack[-1]
        missing = index + 1 - len(self.memo)
        if missing > 0:
            self.budget.take(_PLACE * missing)
            self.memo.extend([_NOTHING] * missing)
        self.remembered += self.memo[index] is _NOTHING
        self.memo[index] = value

    def get(self, index: int) -> None:
        value = self.memo[index] if index < len(self.memo) else _NOTHING
        if value is _NOTHING:
            raise CheckpointError(
                f"the pickle refers to object {index}, which it has not."
            )
        self.budget.take(_PLACE)
        if type(value) in _SHAREABLE and id(value) not in self.shared:
            self.budget.take(_SHARED)
            self.shared[id(value)] = value
        self.stack.append(value)

    def note(self, step: bytes, values: list[Any]) -> bool:
        """Note what is done with a placeholder, if it is one."""
        target = self.stack[-1]
        if type(target) is not Placeholder:
            return False
        self.budget.take(_STEP + _PLACE * len(values))
        target.steps.append((step, values))
        return True

    def set_items(self, items: list[Any], step: bytes = b"u") -> None:
        target = self.stack[-1]
        if len(items) % 2 == 0 and self.note(step, items):
            return
        if type(target) not in _DICTS or len(items) % 2:
            raise CheckpointError(f"sets items of a {type(target).__name__}.")
        for key, value in zip(items[::2], items[1::2], strict=True):
            self.keys.add(target, key)
            target[key] = value

    def extend(self, items: list[Any], step: bytes = b"e") -> None:
        if self.note(step, items):
            return
        if type(self.stack[-1]) is not list:
            raise CheckpointError(f"appends to a {type(self.stack[-1]).__name__}.")
        self.budget.take(_PLACE * len(items))
        self.stack[-1].extend(items)

    def add_items(self, items: list[Any]) -> None:
        if self.note(b"\x90", items):
            return
        if type(self.stack[-1]) is not set:
            raise CheckpointError(f"adds to a {type(self.stack[-1]).__name__}.")
        self.keys.fill(self.stack[-1], items)

    def place(self, how: bytes, callee: Any, args: Any, kwargs: Any = None) -> None:
        """A placeholder for what the file would have made here."""
        fits = type(args) is tuple and type(kwargs) in (dict, type(None))
        if type(callee) is not Placeholder or not fits:
            raise CheckpointError(f"makes an object of a {type(callee).__name__}.")
        self.push_placeholder(callee.called(how, args, kwargs))

    def push_placeholder(self, value: Placeholder) -> None:
        self.budget.take(_PLACEHOLDER + len(value.module) + len(value.name))
        self.push(value)

    def reduce(self) -> None:
        args = self.stack.pop()
        name = self.stack.pop()
        if type(name) is Placeholder:
            return self.place(b"R", name, args)
        if name is SET or name is FROZENSET:
            if type(args) is not tuple or [type(a) for a in args] not in ([list], []):
                raise CheckpointError(f"calls {name.path} with something not a list.")
            members = self.keys.fill(set(), args[0] if args else ())
            return self.push(members if name is SET else frozenset(members))
        check_call(name, args)
        for arg in args:
            self.pay_for_copy(arg)
        if name is COUNTER and type(args[0]) is dict:
            self.keys.fill(set(), args[0])
        value = call(name, args)
        if type(value) is TensorRef:
            self.budget.take(_TENSOR)
        self.push(value)

    def pay_for_copy(self, arg: Any) -> None:
        """An argument can come from the memo any number of times."""
        count = len(arg) if type(arg) in _CONTAINERS else 0
        self.budget.take(getsizeof(arg) + _COPIED * count, count)

    def build(self) -> None:
        state = self.stack.pop()
        target = self.stack[-1]
        if self.note(b"b", [state]):
            return
        if type(target) is not OrderedDict or type(state) is not dict:
            raise CheckpointError(f"sets the state of a {type(target).__name__}.")
        # What nn.Module.state_dict() adds; other names could shadow methods.
        if any(key != "_metadata" for key in state):
            raise CheckpointError(
                "an OrderedDict has attributes other than _metadata; save it as a "
                "plain dict."
            )
        self.budget.take(_COPIED)
        target.__dict__.update(state)

    def global_name(self, module: Any, name: Any) -> None:
        if type(module) is not str or type(name) is not str:
            raise CheckpointError("a name in the pickle is not text.")
        found = look_up(module, name)
        if type(found) is not Placeholder:
            return self.push(found)
        # The same name is the same object, as the class itself would be (as a key).
        found = self.names.setdefault((module, name), found)
        self.push_placeholder(found)

    def tuple_of(self, count: int) -> None:
        if len(self.stack) < count:
            raise IndexError
        items = tuple(self.stack[-count:])
        del self.stack[-count:]
        self.push(items)


def _utf8(data: bytes) -> str:
    try:
        return data.decode("utf-8", "surrogatepass")
    except UnicodeDecodeError:
        raise CheckpointError("a text in the pickle is not valid UTF-8.") from None


def _opcode_name(code: int) -> str:
    import pickletools

    opcode = pickletools.code2op.get(chr(code))
    return opcode.name if opcode else f"0x{code:02x}"


def _proto(r: PickleReader) -> None:
    version = r.number(_U8)
    if not 2 <= version <= 5:
        raise CheckpointError(f"pickle protocol {version} is not one of 2 to 5.")


def _long1(r: PickleReader) -> None:
    r.push(int.from_bytes(r.take(r.number(_U8)), "little", signed=True))


def _frame(r: PickleReader) -> None:
    # Only a hint for buffering: the instructions simply go on.
    if r.number(_U64) > len(r.data) - r.position:
        raise CutOffError("the pickle is cut off.")


def _mark(r: PickleReader) -> None:
    r.outer.append(r.stack)
    r.stack = []
    r.budget.take(getsizeof(r.stack) + _PLACE)


def _global(r: PickleReader) -> None:
    module = r.line()
    r.global_name(module, r.line())


def _stack_global(r: PickleReader) -> None:
    name = r.stack.pop()
    r.global_name(r.stack.pop(), name)


def _set_item(r: PickleReader) -> None:
    value, key = r.stack.pop(), r.stack.pop()
    r.set_items([key, value], b"s")


def _append(r: PickleReader) -> None:
    item = r.stack.pop()
    r.extend([item], b"a")


def _tuple(r: PickleReader) -> None:
    items = r.to_mark()
    r.push(tuple(items))


def _new_object(r: PickleReader) -> None:
    args, kind = r.stack.pop(), r.stack.pop()
    r.place(b"\x81", kind, args)


def _new_object_ex(r: PickleReader) -> None:
    kwargs, args, kind = r.stack.pop(), r.stack.pop(), r.stack.pop()
    r.place(b"\x92", kind, args, kwargs if kwargs is not None else ())


def _pop(r: PickleReader) -> None:
    # A mark on top is taken too, as Python does.
    if r.stack:
        r.stack.pop()
    else:
        r.to_mark()


def _frozenset(r: PickleReader) -> None:
    r.push(frozenset(r.keys.fill(set(), r.to_mark())))


_STEPS: dict[int, Callable[[PickleReader], None]] = {
    0x80: _proto,
    0x95: _frame,
    # Values.
    ord("N"): lambda r: r.push(None),
    0x88: lambda r: r.push(True),
    0x89: lambda r: r.push(False),
    ord("K"): lambda r: r.push(r.number(_U8)),
    ord("M"): lambda r: r.push(r.number(_U16)),
    ord("J"): lambda r: r.push(r.number(_I32)),
    ord("G"): lambda r: r.push(r.number(_F64)),
    0x8A: _long1,
    # Text: BINUNICODE, SHORT_BINUNICODE, BINUNICODE8, and Python 2's str.
    ord("X"): lambda r: r.push(_utf8(r.take(r.number(_U32)))),
    0x8C: lambda r: r.push(_utf8(r.take(r.number(_U8)))),
    0x8D: lambda r: r.push(_utf8(r.take(r.number(_U64)))),
    ord("U"): lambda r: r.push(_utf8(r.take(r.number(_U8)))),
    ord("T"): lambda r: r.push(_utf8(r.take(r.number(_U32)))),
    # Bytes: BINBYTES, SHORT_BINBYTES, BINBYTES8, BYTEARRAY8.
    ord("B"): lambda r: r.push(r.take(r.number(_U32))),
    ord("C"): lambda r: r.push(r.take(r.number(_U8))),
    0x8E: lambda r: r.push(r.take(r.number(_U64))),
    0x96: lambda r: r.push(bytearray(r.take(r.number(_U64)))),
    # Containers.
    ord("("): _mark,
    ord(")"): lambda r: r.push(()),
    0x85: lambda r: r.tuple_of(1),
    0x86: lambda r: r.tuple_of(2),
    0x87: lambda r: r.tuple_of(3),
    ord("t"): _tuple,
    ord("]"): lambda r: r.push([]),
    ord("a"): _append,
    ord("e"): lambda r: r.extend(r.to_mark()),
    ord("}"): lambda r: r.push({}),
    ord("s"): _set_item,
    ord("u"): lambda r: r.set_items(r.to_mark()),
    0x8F: lambda r: r.push(set()),
    0x90: lambda r: r.add_items(r.to_mark()),
    0x91: _frozenset,
    # Names.
    ord("c"): _global,
    0x93: _stack_global,
    ord("R"): lambda r: r.reduce(),
    ord("b"): lambda r: r.build(),
    0x81: _new_object,
    0x92: _new_object_ex,
    ord("Q"): lambda r: r.push(r.persistent_load(r.stack.pop())),
    # POP and POP_MARK, which Python writes for tuples that hold themselves.
    ord("0"): _pop,
    ord("1"): lambda r: r.to_mark(),
    # References: BINPUT, LONG_BINPUT, MEMOIZE, BINGET, LONG_BINGET.
    ord("q"): lambda r: r.put(r.number(_U8)),
    ord("r"): lambda r: r.put(r.number(_U32)),
    0x94: lambda r: r.put(r.remembered),
    ord("h"): lambda r: r.get(r.number(_U8)),
    ord("j"): lambda r: r.get(r.number(_U32)),
}
