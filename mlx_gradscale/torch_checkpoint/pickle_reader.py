"""A closed interpreter for pickles: plain values, tensors, and placeholders.

It follows the instructions that PyTorch's pickles (protocols 2 to 5) are made of and
raises ``CheckpointError`` for any other. Names go through a fixed table,
``pickle_allowlist.look_up``; what is done with one that is not in it is noted on a
``Placeholder`` and not done. Python's own unpickler is not involved.
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
from .pickle_opcodes import PLACE, STEPS, U8, opcode_name, utf8
from .tensors import TensorRef

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
    """Read one pickle from a buffer.

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
        self.persistent_load: Callable[[Any], Any] = persistent_load
        self.budget = budget
        self.keys = Keys(budget)
        self.stack: list[Any] = []
        self.outer: list[list[Any]] = []
        # A list, not a dict: a file can choose the numbers.
        self.memo: list[Any] = []
        self.remembered: int = 0
        self.names: dict[tuple[str, str], Placeholder] = {}
        # The containers and tensors that may be in the object more than once, by id.
        self.shared: dict[int, Any] = {}

    def read(self) -> Any:
        """Run the instructions up to the end and return the object."""
        start = self.position
        try:
            while (code := self.number(U8)) != _STOP:
                self.budget.take(operations=1)
                step = STEPS.get(code)
                if step is None:
                    raise CheckpointError(
                        f"pickle opcode {opcode_name(code)} is not one that plain "
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
        """Return the next bytes."""
        end = self.position + size
        if end > len(self.data):
            raise CutOffError("the pickle is cut off.")
        piece = self.data[self.position : end]
        self.position = end
        return piece

    def number(self, form: struct.Struct) -> Any:
        """Return the next number, written in this form."""
        start = self.position
        self.position += form.size
        if self.position > len(self.data):
            raise CutOffError("the pickle is cut off.")
        return form.unpack_from(self.data, start)[0]

    def line(self) -> str:
        """Return the text up to the end of the line."""
        # Names of modules and classes: 1000 characters are plenty.
        end = self.data.find(b"\n", self.position, self.position + 1000)
        if end < 0:
            cut = len(self.data) < self.position + 1000
            kind = CutOffError if cut else CheckpointError
            raise kind("a name in the pickle does not end.")
        text = utf8(self.take(end - self.position))
        self.position += 1
        return text

    def to_mark(self) -> list[Any]:
        """Take all values above the last mark from the stack."""
        items = self.stack
        self.stack = self.outer.pop()
        return items

    # Building values.

    def push(self, value: Any) -> None:
        """Put a new value on the stack, paid for by what it takes."""
        self.budget.take(getsizeof(value) + PLACE)
        self.stack.append(value)

    def put(self, index: int) -> None:
        """Remember the value on top of the stack under a number."""
        value = self.stack[-1]
        missing = index + 1 - len(self.memo)
        if missing > 0:
            self.budget.take(PLACE * missing)
            self.memo.extend([_NOTHING] * missing)
        self.remembered += self.memo[index] is _NOTHING
        self.memo[index] = value

    def get(self, index: int) -> None:
        """Put the value that was remembered under a number on the stack."""
        value = self.memo[index] if index < len(self.memo) else _NOTHING
        if value is _NOTHING:
            raise CheckpointError(
                f"the pickle refers to object {index}, which is not there."
            )
        self.budget.take(PLACE)
        if type(value) in _SHAREABLE and id(value) not in self.shared:
            self.budget.take(_SHARED)
            self.shared[id(value)] = value
        self.stack.append(value)

    def note(self, step: bytes, values: list[Any]) -> bool:
        """Note what is done with a placeholder, if it is one."""
        target = self.stack[-1]
        if type(target) is not Placeholder:
            return False
        self.budget.take(_STEP + PLACE * len(values))
        target.steps.append((step, values))
        return True

    def set_items(self, items: list[Any], step: bytes = b"u") -> None:
        """Set items of the dict on top of the stack, from keys and values in turn."""
        target = self.stack[-1]
        if len(items) % 2 == 0 and self.note(step, items):
            return
        if type(target) not in _DICTS or len(items) % 2:
            raise CheckpointError(f"sets items of a {type(target).__name__}.")
        for key, value in zip(items[::2], items[1::2], strict=True):
            self.keys.add(target, key)
            target[key] = value

    def extend(self, items: list[Any], step: bytes = b"e") -> None:
        """Append to the list on top of the stack."""
        if self.note(step, items):
            return
        if type(self.stack[-1]) is not list:
            raise CheckpointError(f"appends to a {type(self.stack[-1]).__name__}.")
        self.budget.take(PLACE * len(items))
        self.stack[-1].extend(items)

    def add_items(self, items: list[Any]) -> None:
        """Add to the set on top of the stack."""
        if self.note(b"\x90", items):
            return
        if type(self.stack[-1]) is not set:
            raise CheckpointError(f"adds to a {type(self.stack[-1]).__name__}.")
        self.keys.fill(self.stack[-1], items)

    def place(self, how: bytes, callee: Any, args: Any, kwargs: Any = None) -> None:
        """Put a placeholder for what the file would have made on the stack."""
        fits = type(args) is tuple and type(kwargs) in (dict, type(None))
        if type(callee) is not Placeholder or not fits:
            raise CheckpointError(f"makes an object of a {type(callee).__name__}.")
        self.push_placeholder(callee.called(how, args, kwargs))

    def push_placeholder(self, value: Placeholder) -> None:
        """Put a placeholder on the stack, paid for by its own size."""
        self.budget.take(_PLACEHOLDER + len(value.module) + len(value.name))
        self.push(value)

    def reduce(self) -> None:
        """Call what is named below the arguments on the stack."""
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
        """Pay for an argument, which can come from the memo any number of times."""
        count = len(arg) if type(arg) in _CONTAINERS else 0
        self.budget.take(getsizeof(arg) + _COPIED * count, count)

    def build(self) -> None:
        """Set the state of the object on top of the stack."""
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
        """Put what a name stands for on the stack: of the table, or a placeholder."""
        if type(module) is not str or type(name) is not str:
            raise CheckpointError("a name in the pickle is not text.")
        found = look_up(module, name)
        if type(found) is not Placeholder:
            return self.push(found)
        # The same name is the same object, as the class itself would be (as a key).
        found = self.names.setdefault((module, name), found)
        self.push_placeholder(found)

    def tuple_of(self, count: int) -> None:
        """Make the last values on the stack a tuple."""
        if len(self.stack) < count:
            raise IndexError
        items = tuple(self.stack[-count:])
        del self.stack[-count:]
        self.push(items)
