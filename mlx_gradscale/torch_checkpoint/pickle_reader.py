"""A closed interpreter for pickles: it can build plain values and nothing else.

It follows the instructions that PyTorch's pickles (protocols 2 to 5) are made of and
raises ``CheckpointError`` for any other. Names go through ``names.look_up``, a fixed
table; Python's own unpickler is not involved.
"""

import struct
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from typing import Any

from .limits import CheckpointError, CutOffError, Limits
from .names import FROZENSET, SET, call, look_up

_U8, _U16, _U32, _U64, _I32, _F64 = map(
    struct.Struct, ("B", "<H", "<I", "<Q", "<i", ">d")
)
_PLAIN_KEYS = frozenset({str, float, bool, bytes, type(None)})
# A dict, an OrderedDict or a set takes about four times the memory of a number.
_CONTAINER_COST = 4
_STOP = ord(".")


class PickleReader:
    """Reads one pickle from a buffer.

    Args:
        data (bytes): The buffer.
        start (int): Where the pickle begins. After ``read``, ``position`` is its end.
        persistent_load (callable): Makes a value of a persistent id.
        limits (Limits): How long and how large the pickle may be.
    """

    def __init__(
        self,
        data: bytes,
        start: int,
        persistent_load: Callable[[Any], Any],
        limits: Limits,
    ) -> None:
        self.data = data
        self.position = start
        self.persistent_load = persistent_load
        self.limits = limits
        self.stack: list[Any] = []
        self.outer: list[list[Any]] = []
        self.memo: dict[int, Any] = {}
        self.budget = limits.opcodes
        self.hard_keys = limits.hard_keys

    def read(self) -> Any:
        start = self.position
        try:
            while (code := self.number(_U8)) != _STOP:
                self.budget -= 1
                if self.budget < 0:
                    raise CheckpointError(
                        f"the pickle has more than {self.limits.opcodes} instructions; "
                        "if the file is to be trusted, raise limits.opcodes."
                    )
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

    def put(self, index: int) -> None:
        self.memo[index] = self.stack[-1]
        if len(self.memo) > self.limits.memo:
            raise CheckpointError(
                f"the pickle remembers more than {self.limits.memo} objects; "
                "if the file is to be trusted, raise limits.memo."
            )

    def get(self, index: int) -> None:
        if index not in self.memo:
            raise CheckpointError(
                f"the pickle refers to object {index}, which it has not."
            )
        self.stack.append(self.memo[index])

    def container(self, value: Any) -> None:
        self.budget -= _CONTAINER_COST - 1
        self.stack.append(value)

    def check_key(self, key: Any) -> None:
        kind = type(key)
        if kind in _PLAIN_KEYS or (kind is int and key.bit_length() <= 64):
            return
        # The hashes of these can be chosen: n equal ones cost n * n comparisons.
        self.hard_keys -= 1
        if self.hard_keys < 0:
            raise CheckpointError(
                f"more than {self.limits.hard_keys} tuples or complex numbers are "
                "dict keys or set members."
            )
        flat = kind is tuple and len(key) <= 64
        if kind is not complex and not (flat and all(map(_is_flat, key))):
            raise CheckpointError(
                f"a dict key or set member is of type {kind.__name__}; only plain "
                "values, integers of 64 bits and flat tuples of them can be."
            )

    def set_items(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if type(target) not in (dict, OrderedDict, Counter) or len(items) % 2:
            raise CheckpointError(f"sets items of a {type(target).__name__}.")
        for key, value in zip(items[::2], items[1::2], strict=True):
            self.check_key(key)
            target[key] = value

    def extend(self, items: list[Any]) -> None:
        if type(self.stack[-1]) is not list:
            raise CheckpointError(f"appends to a {type(self.stack[-1]).__name__}.")
        self.stack[-1].extend(items)

    def add_items(self, items: list[Any]) -> None:
        if type(self.stack[-1]) is not set:
            raise CheckpointError(f"adds to a {type(self.stack[-1]).__name__}.")
        self.stack[-1].update(self.members(items))

    def members(self, items: Iterable[Any]) -> list[Any]:
        members = list(items)
        for member in members:
            self.check_key(member)
        return members

    def reduce(self) -> None:
        args = self.stack.pop()
        name = self.stack.pop()
        if name is SET or name is FROZENSET:
            if type(args) is not tuple or [type(a) for a in args] not in ([list], []):
                raise CheckpointError(f"calls {name.path} with something not a list.")
            make = set if name is SET else frozenset
            value = make(self.members(args[0] if args else ()))
        else:
            value = call(name, args)
        self.container(value)

    def build(self) -> None:
        state = self.stack.pop()
        target = self.stack[-1]
        if type(target) is not OrderedDict or type(state) is not dict:
            raise CheckpointError(f"sets the state of a {type(target).__name__}.")
        # What nn.Module.state_dict() adds; other names could shadow methods.
        if set(state) - {"_metadata"}:
            raise CheckpointError(
                "an OrderedDict has attributes other than _metadata; save it as a "
                "plain dict."
            )
        target.__dict__.update(state)

    def global_name(self, module: Any, name: Any) -> None:
        if type(module) is not str or type(name) is not str:
            raise CheckpointError("a name in the pickle is not text.")
        self.stack.append(look_up(module, name))

    def tuple_of(self, count: int) -> None:
        if len(self.stack) < count:
            raise IndexError
        items = tuple(self.stack[-count:])
        self.stack[-count:] = [items]


def _is_flat(value: Any) -> bool:
    kind = type(value)
    return kind in _PLAIN_KEYS or (kind is int and value.bit_length() <= 64)


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
    r.stack.append(int.from_bytes(r.take(r.number(_U8)), "little", signed=True))


def _frame(r: PickleReader) -> None:
    # Only a hint for buffering: the instructions simply go on.
    if r.number(_U64) > len(r.data) - r.position:
        raise CutOffError("the pickle is cut off.")


def _mark(r: PickleReader) -> None:
    r.outer.append(r.stack)
    r.stack = []


def _global(r: PickleReader) -> None:
    module = r.line()
    r.global_name(module, r.line())


def _stack_global(r: PickleReader) -> None:
    name = r.stack.pop()
    r.global_name(r.stack.pop(), name)


def _set_item(r: PickleReader) -> None:
    value, key = r.stack.pop(), r.stack.pop()
    r.set_items([key, value])


def _append(r: PickleReader) -> None:
    item = r.stack.pop()
    r.extend([item])


def _tuple(r: PickleReader) -> None:
    items = r.to_mark()
    r.stack.append(tuple(items))


def _frozenset(r: PickleReader) -> None:
    members = r.members(r.to_mark())
    r.container(frozenset(members))


_STEPS: dict[int, Callable[[PickleReader], None]] = {
    0x80: _proto,
    0x95: _frame,
    # Values.
    ord("N"): lambda r: r.stack.append(None),
    0x88: lambda r: r.stack.append(True),
    0x89: lambda r: r.stack.append(False),
    ord("K"): lambda r: r.stack.append(r.number(_U8)),
    ord("M"): lambda r: r.stack.append(r.number(_U16)),
    ord("J"): lambda r: r.stack.append(r.number(_I32)),
    ord("G"): lambda r: r.stack.append(r.number(_F64)),
    0x8A: _long1,
    # Text: BINUNICODE, SHORT_BINUNICODE, BINUNICODE8, and Python 2's str.
    ord("X"): lambda r: r.stack.append(_utf8(r.take(r.number(_U32)))),
    0x8C: lambda r: r.stack.append(_utf8(r.take(r.number(_U8)))),
    0x8D: lambda r: r.stack.append(_utf8(r.take(r.number(_U64)))),
    ord("U"): lambda r: r.stack.append(_utf8(r.take(r.number(_U8)))),
    ord("T"): lambda r: r.stack.append(_utf8(r.take(r.number(_U32)))),
    # Bytes: BINBYTES, SHORT_BINBYTES, BINBYTES8, BYTEARRAY8.
    ord("B"): lambda r: r.stack.append(r.take(r.number(_U32))),
    ord("C"): lambda r: r.stack.append(r.take(r.number(_U8))),
    0x8E: lambda r: r.stack.append(r.take(r.number(_U64))),
    0x96: lambda r: r.stack.append(bytearray(r.take(r.number(_U64)))),
    # Containers.
    ord("("): _mark,
    ord(")"): lambda r: r.stack.append(()),
    0x85: lambda r: r.tuple_of(1),
    0x86: lambda r: r.tuple_of(2),
    0x87: lambda r: r.tuple_of(3),
    ord("t"): _tuple,
    ord("]"): lambda r: r.stack.append([]),
    ord("a"): _append,
    ord("e"): lambda r: r.extend(r.to_mark()),
    ord("}"): lambda r: r.container({}),
    ord("s"): _set_item,
    ord("u"): lambda r: r.set_items(r.to_mark()),
    0x8F: lambda r: r.container(set()),
    0x90: lambda r: r.add_items(r.to_mark()),
    0x91: _frozenset,
    # Names.
    ord("c"): _global,
    0x93: _stack_global,
    ord("R"): lambda r: r.reduce(),
    ord("b"): lambda r: r.build(),
    ord("Q"): lambda r: r.stack.append(r.persistent_load(r.stack.pop())),
    # References: BINPUT, LONG_BINPUT, MEMOIZE, BINGET, LONG_BINGET.
    ord("q"): lambda r: r.put(r.number(_U8)),
    ord("r"): lambda r: r.put(r.number(_U32)),
    0x94: lambda r: r.put(len(r.memo)),
    ord("h"): lambda r: r.get(r.number(_U8)),
    ord("j"): lambda r: r.get(r.number(_U32)),
}
