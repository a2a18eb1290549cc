"""The closed table of names in pickles that are built here; the others are kept.

Nothing is imported or looked up: a name in a file is a key of ``TABLE``, or becomes a
``Placeholder``, or is an error where it stands for a tensor.
"""

import inspect
import re
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from .dtypes import BY_NAME, BY_STORAGE, FOREIGN, Element
from .foreign import DefaultDict, Placeholder, TorchName, TorchSize
from .limits import CheckpointError
from .tensors import StorageRef, TensorRef, is_count, view


class Name:
    """A class or function of the table; ``build`` makes its value from arguments."""

    __slots__ = ("arity", "build", "element", "path")

    def __init__(
        self,
        path: str,
        build: Callable[..., Any] | None = None,
        element: Element | None = None,
    ) -> None:
        self.path, self.build, self.element = path, build, element
        wanted = inspect.signature(build).parameters.values() if build else ()
        required = sum(p.default is p.empty for p in wanted)
        self.arity = range(required, len(wanted) + 1)


def check_call(name: Any, args: Any) -> None:
    """Raise unless this is a name of the table with as many arguments as it takes."""
    if not isinstance(name, Name) or name.build is None or type(args) is not tuple:
        what = name.path if isinstance(name, Name) else type(name).__name__
        raise CheckpointError(f"The file calls {what}, which is not a known function.")
    if len(args) not in name.arity:
        raise CheckpointError(f"The file calls {name.path} with {len(args)} arguments.")


def call(name: Any, args: Any) -> Any:
    """Do what REDUCE does: build the value of a name in the table, from a tuple."""
    check_call(name, args)
    return name.build(*args)


def _require(args_fit: object, path: str) -> None:
    if not args_fit:
        raise CheckpointError(f"The file calls {path} with arguments of other types.")


def _tensor_v2(
    storage: Any,
    offset: Any,
    shape: Any,
    strides: Any,
    grad: Any,
    hooks: Any,
    metadata: Any = None,
) -> TensorRef:
    return view(storage, offset, shape, strides, None, metadata, grad is True)


def _tensor_v3(
    storage: Any,
    offset: Any,
    shape: Any,
    strides: Any,
    grad: Any,
    hooks: Any,
    dtype: Any,
    metadata: Any = None,
) -> TensorRef:
    return view(storage, offset, shape, strides, dtype, metadata, grad is True)


def _parameter(
    data: Any, requires_grad: Any = True, hooks: Any = None, state: Any = None
) -> TensorRef:
    _require(isinstance(data, TensorRef), "torch._utils._rebuild_parameter")
    made: TensorRef = replace(
        data, requires_grad=requires_grad is True, is_parameter=True
    )
    return made


def _from_type(function: Any, kind: Any, args: Any, state: Any) -> Any:
    if function is WRAPPER:
        return _local_tensor(kind, args, state)
    # A tensor with Python attributes; an mx.array has no place for them. Only the
    # plain functions may be inside: this one inside itself would recurse.
    plain = isinstance(function, Name) and function.path.startswith("torch._utils.")
    known = isinstance(kind, Name) and kind.path in _TENSOR_CLASSES
    _require(plain and known, "torch._tensor._rebuild_from_type_v2")
    return call(function, args)


def _local_tensor(kind: Any, args: Any, state: Any) -> Any:
    """Return the tensor of FSDP2's DTensor, where this process holds all of it."""
    known = type(kind) is Placeholder and kind.name == "DTensor"
    fits = type(args) is tuple and len(args) > 2 and type(state) is tuple and state
    held: dict[Any, Any] = (
        state[-1] if known and fits and type(state[-1]) is dict else {}
    )
    local: Any = held.get("_local_tensor")
    spec: Any = held.get("_spec")
    _require(type(local) is TensorRef, WRAPPER.path)
    placements = spec.state.get("placements") if _has_dict(spec) else ()
    whole = type(placements) is tuple and not any(
        isinstance(how, Placeholder) and "Partial" in how.name for how in placements
    )
    if not whole or local.shape != args[2]:
        raise CheckpointError(
            f"The file holds a part of shape {local.shape} of a DTensor, one rank's. "
            "Gather the full state dict where PyTorch is, on all ranks, and save what "
            "rank 0 gets: torch.distributed.checkpoint.state_dict.get_state_dict("
            "model, optimizer, options=StateDictOptions(full_state_dict=True, "
            "cpu_offload=True))."
        )
    return local


def _has_dict(value: Any) -> bool:
    return isinstance(value, Placeholder) and type(value.state) is dict


def _ordered_dict() -> OrderedDict[Any, Any]:
    return OrderedDict()


def _default_dict(factory: Any = None) -> DefaultDict:
    named = isinstance(factory, (Name, Placeholder))
    _require(factory is None or named, "collections.defaultdict")
    return DefaultDict(factory=factory)


def _counter(counts: Any) -> Counter[Any]:
    plain = type(counts) is dict and all(type(n) is int for n in counts.values())
    _require(plain, "collections.Counter")
    return Counter(counts)


def torch_size(sizes: Any = ()) -> TorchSize:
    """Return a ``torch.Size``, checked."""
    _require(type(sizes) is tuple and all(map(is_count, sizes)), "torch.Size")
    return TorchSize(sizes)


def _device(kind: Any, index: Any = None) -> TorchName:
    fits = type(kind) is str and _DEVICE.fullmatch(kind)
    _require(fits and (index is None or is_count(index)), "torch.device")
    return TorchName(kind if index is None else f"{kind}:{index}")


def torch_name(text: Any) -> TorchName:
    """Return a dtype's or device's name, checked: it can become a name in a file."""
    is_dtype = type(text) is str and isinstance(TABLE.get(text), TorchName)
    if not is_dtype and not (type(text) is str and _NAMED_DEVICE.fullmatch(text)):
        raise CheckpointError(f"{text!r:.80} is no dtype and no device.")
    return TorchName(text)


def _layout(name: Any) -> Any:
    _require(type(name) is str and len(name) <= 64, "torch.serialization._get_layout")
    return name


def _encode(text: Any = "", encoding: Any = "latin1") -> bytes:
    _require(type(text) is str and encoding == "latin1", "_codecs.encode")
    try:
        return str(text).encode("latin1")
    except UnicodeEncodeError:
        raise CheckpointError("A bytes value holds characters beyond 255.") from None


def _bytes() -> bytes:
    return b""


def _bytearray(data: Any = b"", encoding: Any = "latin-1") -> bytearray:
    if type(data) is str and encoding == "latin-1":
        data = _encode(data)
    _require(type(data) is bytes, "builtins.bytearray")
    return bytearray(data)


def _complex(real: Any, imag: Any) -> complex:
    _require(type(real) is float and type(imag) is float, "builtins.complex")
    return complex(real, imag)


_TENSOR_CLASSES = (
    "torch.Tensor",
    "torch.nn.parameter.Parameter",
    "torch.nn.parameter.Buffer",
)
_BUILDERS: dict[str, Callable[..., Any]] = {
    "torch._utils._rebuild_tensor": lambda s, o, shape, st: view(s, o, shape, st),
    "torch._utils._rebuild_tensor_v2": _tensor_v2,
    "torch._utils._rebuild_tensor_v3": _tensor_v3,
    "torch._utils._rebuild_parameter": _parameter,
    "torch._utils._rebuild_parameter_with_state": _parameter,
    "torch._tensor._rebuild_from_type_v2": _from_type,
    # Where torch._tensor was until PyTorch 1.8.
    "torch.tensor._rebuild_from_type_v2": _from_type,
    "collections.OrderedDict": _ordered_dict,
    "collections.Counter": _counter,
    "collections.defaultdict": _default_dict,
    "torch.Size": torch_size,
    "torch.device": _device,
    "torch.serialization._get_layout": _layout,
    "_codecs.encode": _encode,
    "builtins.bytes": _bytes,
    "builtins.bytearray": _bytearray,
    "builtins.complex": _complex,
}
TABLE: dict[str, Any] = {path: Name(path, build) for path, build in _BUILDERS.items()}
TABLE |= {path: Name(path) for path in _TENSOR_CLASSES}
WRAPPER = Name("torch._utils._rebuild_wrapper_subclass")
TABLE[WRAPPER.path] = WRAPPER
COUNTER = TABLE["collections.Counter"]
# Their members are checked one by one, so the reader builds these two itself.
SET, FROZENSET = Name("builtins.set"), Name("builtins.frozenset")
TABLE |= {SET.path: SET, FROZENSET.path: FROZENSET}
TABLE |= {
    f"torch.{storage}": Name(f"torch.{storage}", element=element)
    for storage, element in BY_STORAGE.items()
}
UNTYPED = Name("torch.storage.UntypedStorage")
TABLE |= {UNTYPED.path: UNTYPED, "torch.UntypedStorage": UNTYPED}
# A dtype in a file is its name as a string, e.g. "torch.float16".
TABLE |= {dtype: TorchName(dtype) for dtype in (*BY_NAME, *FOREIGN)}

# What stands for a tensor or a storage, and is none that can be read, by the first
# prefix that fits.
_REFUSED = {
    "torch._utils._rebuild_qtensor": "Dequantize the tensor and save again.",
    "torch._utils._rebuild_sparse": "Call .to_dense() and save again.",
    "torch._utils._rebuild_nested": "Save the nested tensor as a list.",
    "torch._utils._rebuild_meta": "A meta tensor has no data to read.",
    "torch._utils._rebuild": "Save it as a dense tensor.",
    "torch._tensor._rebuild": "Save it as a dense tensor.",
    "torch.storage.": "Save the tensor instead.",
}
_STORAGE = re.compile(r"torch\.(cuda\.)?\w+Storage")
_DEVICE = re.compile(r"[A-Za-z_]\w{0,63}", re.ASCII)
_NAMED_DEVICE = re.compile(r"[A-Za-z_]\w{0,63}(:\d{1,18})?", re.ASCII)
_LONGEST = 1000


def look_up(module: str, name: str) -> Any:
    """Return the table's entry for a name in a file, or a placeholder for it."""
    # "__builtin__" is how protocol 2 writes it, for Python 2's sake.
    path = f"{'builtins' if module == '__builtin__' else module}.{name}"
    if path in TABLE:
        return TABLE[path]
    advice = next((_REFUSED[start] for start in _REFUSED if path.startswith(start)), "")
    if advice or _STORAGE.fullmatch(path):
        raise CheckpointError(
            f"The file holds {_shown(path)}, which is not a dense tensor that can be "
            f"read. {advice or 'Save it as a dense tensor.'}"
        )
    if len(path) > _LONGEST or not path.isprintable() or "" in path.split("."):
        raise CheckpointError(f"The file names {_shown(path)}, which is no name.")
    return Placeholder.named(module, name)


def _shown(path: str) -> str:
    return path if len(path) <= 120 and path.isprintable() else ascii(path[:120])


def storage_of(pid: Any) -> StorageRef:
    """Return the storage that a persistent id names."""
    if type(pid) is tuple and pid and pid[0] == "module":
        raise CheckpointError(
            "The file holds a whole model with its source code; save "
            "model.state_dict() in PyTorch and load that."
        )
    if type(pid) is not tuple or len(pid) not in (5, 6) or pid[0] != "storage":
        raise CheckpointError("The file refers to something other than a storage.")
    _, kind, key, _location, numel, *rest = pid
    known = isinstance(kind, Name) and (kind is UNTYPED or kind.element is not None)
    # Keys are numbers; each tensor's text holds its own.
    known = known and type(key) is str and len(key) <= 64
    if not known or not is_count(numel):
        raise CheckpointError("The file describes a storage in an unknown way.")
    storage = StorageRef(key, kind.element, numel, 0, numel)
    if not rest or rest[0] is None:
        return storage
    return _part(storage, rest[0])


def _part(whole: StorageRef, part: Any) -> StorageRef:
    if type(part) is not tuple or len(part) != 3 or not all(map(is_count, part[1:])):
        raise CheckpointError("The file describes part of a storage in an unknown way.")
    _, start, numel = part
    if whole.element is None or start + numel > whole.numel:
        raise CheckpointError("Part of a storage reaches outside it.")
    return StorageRef(whole.key, whole.element, whole.total, start, numel)
