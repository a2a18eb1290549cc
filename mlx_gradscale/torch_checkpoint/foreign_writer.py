"""Pickle what only PyTorch, or only the file's own program, has a class for."""

from typing import TYPE_CHECKING, Any

from .foreign import DefaultDict, PlacedTensor, Placeholder, TorchName, TorchSize
from .pickle_allowlist import torch_name

# Instructions that take all values down to a mark.
_MARKED = frozenset({b"e", b"u", b"\x90"})


class ForeignSavers:
    """The part of ``PickleWriter`` that writes a file's own names again."""

    if TYPE_CHECKING:  # what the rest of PickleWriter has
        _inside: int

        def _fail(self, text: str) -> TypeError: ...
        def _save(self, value: Any) -> None: ...
        def _emit(self, opcode: bytes, form: str = "", *values: Any) -> None: ...
        def _put(self, *value: Any) -> None: ...
        def _name(self, path: str) -> None: ...
        def _global(self, module: str, name: str) -> None: ...
        def _int(self, value: int) -> None: ...
        def _call(self, tuple_opcode: bytes, value: Any) -> None: ...
        def _entries(self, value: dict[Any, Any]) -> None: ...
        def _check_key(self, key: Any) -> None: ...
        def _array(
            self, value: Any, requires_grad: bool = False, remembered: Any = None
        ) -> None: ...

    def _default_dict(self, value: DefaultDict) -> None:
        self._name("collections.defaultdict")
        if value.factory is None:
            self._emit(b")")
        else:
            self._save(value.factory)
            self._emit(b"\x85")
            self._put()
        self._emit(b"R")
        self._put(value)
        self._entries(value)

    def _frozenset(self, value: frozenset[Any]) -> None:
        if not self._inside:
            raise self._fail("is a frozenset, which torch.load() refuses; save a set.")
        for member in value:
            self._check_key(member)
        self._name("__builtin__.frozenset")
        self._save(list(value))
        self._call(b"\x85", value)

    def _torch_name(self, value: TorchName) -> None:
        torch_name(str(value))
        if value.startswith("torch."):
            return self._name(str(value))
        kind, colon, index = str(value).partition(":")
        self._name("torch.device")
        self._save(kind)
        if colon:
            self._int(int(index))
        self._call(b"\x86" if colon else b"\x85", value)

    def _torch_size(self, value: TorchSize) -> None:
        self._name("torch.Size")
        self._save(tuple(value))
        self._call(b"\x85", value)

    # What this package does not know.

    def _placeholder(self, value: Placeholder) -> None:
        """Tell the file's own way to make the object again."""
        self._inside += 1
        if value.callee is None:
            self._foreign_name(value.module, value.name)
        else:
            self._save(value.callee)
            self._save(value.args)
            if value.kwargs is not None:
                self._save(value.kwargs)
            self._emit(value.how)
            self._put(value)
            for step, held in value.steps:
                if step in _MARKED:
                    self._emit(b"(")
                for item in held:
                    self._save(item)
                self._emit(step)
        self._inside -= 1

    def _foreign_name(self, module: str, name: str) -> None:
        if not f"{module}{name}".isprintable():
            raise self._fail(f"has a name that is none: {module!r:.80} {name!r:.80}.")
        outer, dot, inner = name.rpartition(".")
        if not dot:
            return self._global(module, name)
        # Protocol 2 has no dotted names: Python takes the inner from the outer.
        self._name("__builtin__.getattr")
        self._foreign_name(module, outer)
        self._save(inner)
        self._emit(b"\x86")
        self._put()
        self._emit(b"R")
        self._put()

    def _placed_tensor(self, value: PlacedTensor) -> None:
        array, requires_grad, is_parameter = value
        if not is_parameter:
            return self._array(array, requires_grad, value)
        self._name("torch._utils._rebuild_parameter")
        self._array(array)
        self._emit(b"\x88" if requires_grad else b"\x89")
        self._name("collections.OrderedDict")
        self._emit(b")R")
        self._put()
        self._call(b"\x87", value)
