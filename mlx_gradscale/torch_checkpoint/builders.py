"""The closed table of functions that a pickle may call; others are only recorded.

Nothing is imported or looked up. A name in a file is a key of ``BUILDERS``, becomes a
``Placeholder``, or raises an error if it is a tensor that cannot be read.
"""

import re
from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Any

import mlx.core as mx

from .foreign import DefaultDict, Placeholder, TensorShape, TorchName, TorchSize, flag
from .limits import check, is_count, require
from .tensors import BY_NAME, BY_STORAGE, UNTYPED, TensorReader

# The name used to write a TensorShape.
TENSOR_SHAPE = ("mlx_gradscale.torch_checkpoint", "TensorShape")
_MAX_NAME = 1000
_TENSOR_CLASSES = (
    "torch.Tensor",
    "torch.nn.parameter.Parameter",
    "torch.nn.parameter.Buffer",
)
_KNOWN = {*UNTYPED, *(f"torch.{name}" for name in BY_STORAGE)}
# Non-dense tensors: sparse, quantized, nested, meta, DTensors.
_TENSORS = (
    r"torch\.(_utils|_tensor)\._rebuild.*|torch\.storage\..*|"
    r"torch\.(cuda\.)?\w+Storage"
)
_GATHER = (
    "If it is a DTensor, gather the full state dict in PyTorch, on all ranks, and save "
    "what rank 0 gets: torch.distributed.checkpoint.state_dict.get_state_dict(model, "
    "optimizer, options=StateDictOptions(full_state_dict=True, cpu_offload=True))."
)


def look_up(module: str, name: str) -> Any:
    """Return the placeholder for a name in a file, or a ``TorchName`` for a dtype."""
    found = Placeholder.named(module, name)
    path = found.path
    if path in BUILDERS or path in _KNOWN:
        return found
    if module == "torch" and name in BY_NAME:
        return TorchName(path)
    advice = "Save it as a dense tensor (.to_dense(), .dequantize())."
    check(
        not re.fullmatch(_TENSORS, path),
        f"the file holds {path[:120]!a}, which is not a dense tensor that can be read. "
        f"{_GATHER if name == '_rebuild_wrapper_subclass' else advice}",
    )
    is_name = len(path) <= _MAX_NAME and path.isprintable()
    check(is_name and "" not in path.split("."), f"{path[:120]!a} is not a name.")
    return found


# A builder takes the file's tensor reader and the arguments of the call. It raises
# TypeError for unexpected arguments.


def _tensor_v3(t: TensorReader, *args: Any) -> Any:
    require(len(args) in (7, 8))
    return t.tensor(*args[:6], *args[7:], dtype=args[6])


def _parameter(
    _: TensorReader, data: Any, grad: Any = True, _hooks: Any = None, _state: Any = None
) -> Any:
    require(isinstance(data, (mx.array, TensorShape)))
    return flag(data, grad is True, True)


def _from_type(t: TensorReader, function: Any, kind: Any, args: Any, state: Any) -> Any:
    # A tensor with Python attributes, which an array cannot hold.
    path = function.path if type(function) is Placeholder else ""
    require(path.startswith("torch._utils.") and path in BUILDERS)
    require(type(kind) is Placeholder and kind.path in _TENSOR_CLASSES)
    return BUILDERS[path](t, *args)


def _tensor_shape(
    _: TensorReader, shape: Any, dtype: Any, grad: Any = False, parameter: Any = False
) -> TensorShape:
    require(type(shape) is tuple and len(shape) <= 64 and all(map(is_count, shape)))
    require(type(dtype) is str and dtype in BY_NAME)
    require(type(grad) is bool and type(parameter) is bool)
    return TensorShape(shape, dtype, grad, parameter)


def _default_dict(_: TensorReader, factory: Any = None) -> DefaultDict:
    require(factory is None or isinstance(factory, Placeholder))
    return DefaultDict(factory=factory)


def _counter(_: TensorReader, counts: Any) -> Counter[Any]:
    require(type(counts) is dict and all(type(n) is int for n in counts.values()))
    return Counter(counts)


def _size(_: TensorReader, sizes: Any) -> TorchSize:
    require(type(sizes) is tuple and all(map(is_count, sizes)))
    return TorchSize(sizes)


def _device(_: TensorReader, kind: Any, index: Any = None) -> TorchName:
    require(type(kind) is str and re.fullmatch(r"[A-Za-z_]\w{0,63}", kind, re.ASCII))
    require(index is None or is_count(index))
    return TorchName(kind if index is None else f"{kind}:{index}")


def _encode(_: TensorReader, text: Any, encoding: Any) -> bytes:
    require(type(text) is str and encoding in ("latin1", "latin-1"))
    check(max(text, default="") <= "\xff", "a bytes value has characters beyond 255.")
    return text.encode("latin1")  # type: ignore[no-any-return]


def _bytearray(t: TensorReader, data: Any = b"", *encoding: Any) -> bytearray:
    data = _encode(t, data, *encoding) if encoding else data
    require(type(data) is bytes)
    return bytearray(data)


def _complex(_: TensorReader, real: Any, imag: Any) -> complex:
    require(type(real) is float and type(imag) is float)
    return complex(real, imag)


BUILDERS: dict[str, Callable[..., Any]] = {
    "torch._utils._rebuild_tensor": TensorReader.tensor,
    "torch._utils._rebuild_tensor_v2": TensorReader.tensor,
    "torch._utils._rebuild_tensor_v3": _tensor_v3,
    "torch._utils._rebuild_parameter": _parameter,
    "torch._utils._rebuild_parameter_with_state": _parameter,
    "torch._tensor._rebuild_from_type_v2": _from_type,
    # The location of torch._tensor up to PyTorch 1.8.
    "torch.tensor._rebuild_from_type_v2": _from_type,
    "collections.OrderedDict": lambda _: OrderedDict(),
    "collections.Counter": _counter,
    "collections.defaultdict": _default_dict,
    "torch.Size": _size,
    "torch.device": _device,
    "_codecs.encode": _encode,
    "builtins.bytes": lambda _: b"",
    "builtins.bytearray": _bytearray,
    "builtins.complex": _complex,
    ".".join(TENSOR_SHAPE): _tensor_shape,
}
