"""The instructions of a pickle that are followed, as a table: what each does."""

import struct
from collections.abc import Callable
from sys import getsizeof
from typing import TYPE_CHECKING, Any

from .limits import CheckpointError, CutOffError

if TYPE_CHECKING:
    from .pickle_reader import PickleReader

U8, _U16, _U32, _U64, _I32, _F64 = map(
    struct.Struct, ("B", "<H", "<I", "<Q", "<i", ">d")
)
# Bytes for a place on the stack, in a list or in the memo, while it is growing.
PLACE = 16


def utf8(data: bytes) -> str:
    """Return the text of these bytes, lone surrogates included, or raise."""
    try:
        return data.decode("utf-8", "surrogatepass")
    except UnicodeDecodeError:
        raise CheckpointError("a text in the pickle is not valid UTF-8.") from None


def opcode_name(code: int) -> str:
    """Return the name of an instruction, for an error."""
    import pickletools

    # typeshed does not list it.
    opcodes: dict[str, Any] = pickletools.code2op  # type: ignore[attr-defined]
    opcode = opcodes.get(chr(code))
    return str(opcode.name) if opcode else f"0x{code:02x}"


def _proto(r: "PickleReader") -> None:
    version = r.number(U8)
    if not 2 <= version <= 5:
        raise CheckpointError(f"pickle protocol {version} is not one of 2 to 5.")


def _long1(r: "PickleReader") -> None:
    r.push(int.from_bytes(r.take(r.number(U8)), "little", signed=True))


def _frame(r: "PickleReader") -> None:
    # Only a hint for buffering: the instructions simply go on.
    if r.number(_U64) > len(r.data) - r.position:
        raise CutOffError("the pickle is cut off.")


def _mark(r: "PickleReader") -> None:
    r.outer.append(r.stack)
    r.stack = []
    r.budget.take(getsizeof(r.stack) + PLACE)


def _global(r: "PickleReader") -> None:
    module = r.line()
    r.global_name(module, r.line())


def _stack_global(r: "PickleReader") -> None:
    name = r.stack.pop()
    r.global_name(r.stack.pop(), name)


def _set_item(r: "PickleReader") -> None:
    value, key = r.stack.pop(), r.stack.pop()
    r.set_items([key, value], b"s")


def _append(r: "PickleReader") -> None:
    item = r.stack.pop()
    r.extend([item], b"a")


def _tuple(r: "PickleReader") -> None:
    items = r.to_mark()
    r.push(tuple(items))


def _new_object(r: "PickleReader") -> None:
    args, kind = r.stack.pop(), r.stack.pop()
    r.place(b"\x81", kind, args)


def _new_object_ex(r: "PickleReader") -> None:
    kwargs, args, kind = r.stack.pop(), r.stack.pop(), r.stack.pop()
    r.place(b"\x92", kind, args, kwargs if kwargs is not None else ())


def _pop(r: "PickleReader") -> None:
    # A mark on top is taken too, as Python does.
    if r.stack:
        r.stack.pop()
    else:
        r.to_mark()


def _frozenset(r: "PickleReader") -> None:
    r.push(frozenset(r.keys.fill(set(), r.to_mark())))


STEPS: dict[int, Callable[["PickleReader"], object]] = {
    0x80: _proto,
    0x95: _frame,
    # Values.
    ord("N"): lambda r: r.push(None),
    0x88: lambda r: r.push(True),
    0x89: lambda r: r.push(False),
    ord("K"): lambda r: r.push(r.number(U8)),
    ord("M"): lambda r: r.push(r.number(_U16)),
    ord("J"): lambda r: r.push(r.number(_I32)),
    ord("G"): lambda r: r.push(r.number(_F64)),
    0x8A: _long1,
    # Text: BINUNICODE, SHORT_BINUNICODE, BINUNICODE8, and Python 2's str.
    ord("X"): lambda r: r.push(utf8(r.take(r.number(_U32)))),
    0x8C: lambda r: r.push(utf8(r.take(r.number(U8)))),
    0x8D: lambda r: r.push(utf8(r.take(r.number(_U64)))),
    ord("U"): lambda r: r.push(utf8(r.take(r.number(U8)))),
    ord("T"): lambda r: r.push(utf8(r.take(r.number(_U32)))),
    # Bytes: BINBYTES, SHORT_BINBYTES, BINBYTES8, BYTEARRAY8.
    ord("B"): lambda r: r.push(r.take(r.number(_U32))),
    ord("C"): lambda r: r.push(r.take(r.number(U8))),
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
    ord("q"): lambda r: r.put(r.number(U8)),
    ord("r"): lambda r: r.put(r.number(_U32)),
    0x94: lambda r: r.put(r.remembered),
    ord("h"): lambda r: r.get(r.number(U8)),
    ord("j"): lambda r: r.get(r.number(_U32)),
}
