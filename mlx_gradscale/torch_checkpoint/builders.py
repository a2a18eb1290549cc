"""The closed table of functions that a pickle may call; all others are only noted.

Nothing is imported or looked up. A name in a file is a key of ``BUILDERS``, or it stays
a ``Placeholder``, or it is an error where it is a tensor that cannot be read.
"""

import re
from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Any

import mlx.core as mx

from .foreign import (
    DefaultDict,
    Placeholder,
    TensorShape,
    TorchName,
    TorchSize,
    is_count,
)
from .limits import CheckpointError
from .tensors import BY_NAME, BY_STORAGE, TensorReader

# The name under which a TensorShape is written.
TENSOR_SHAPE = ("mlx_gradscale.torch_checkpoint", "TensorShape")
_MAX_NAME = 1000
_WRAPPER = "torch._utils._rebuild_wrapper_subclass"
_TENSOR_CLASSES = (
    "torch.Tensor",
    "torch.nn.parameter.Parameter",
    "torch.nn.parameter.Buffer",
)
_KNOWN = {_WRAPPER, "torch.storage.UntypedStorage", "torch.UntypedStorage"}
_KNOWN |= {f"torch.{name}" for name in BY_STORAGE}
# Tensor types that cannot be read, by prefix, with advice.
_REFUSED = {
    "torch._utils._rebuild_qtensor": "Dequantize the tensor and save again.",
    "torch._utils._rebuild_sparse": "Call .to_dense() and save again.",
    "torch._utils._rebuild_nested": "Save the nested tensor as a list.",
    "torch._utils._rebuild_meta": "A meta tensor has no data to read.",
    "torch._utils._rebuild": "Save it as a dense tensor.",
    "torch._tensor._rebuild": "Save it as a dense tensor.",
    "torch.storage.": "Save the tensor instead.",
}


def look_up(module: str, name: str) -> Any:
    """Return the placeholder of a name in a file; a dtype as a ``TorchName``."""
    found = Placeholder.named(module, name)
    path = found.path
    if path in BUILDERS or path in _KNOWN:
        return found
    if module == "torch" and name in BY_NAME:
        return TorchName(path)
    advice = next((_REFUSED[start] for start in _REFUSED if path.startswith(start)), "")
    if advice or re.fullmatch(r"torch\.(cuda\.)?\w+Storage", path):
        raise CheckpointError(
            f"the file holds {_shown(path)}, which is not a dense tensor that can be "
            f"read. {advice or 'Save it as a dense tensor.'}"
        )
    if len(path) > _MAX_NAME or not path.isprintable() or "" in path.split("."):
        raise CheckpointError(f"the file names {_shown(path)}, which is no name.")
    return found


def _shown(path: str) -> str:
    return path if len(path) <= 120 and path.isprintable() else ascii(path[:120])


def _require(condition: object) -> None:
    if not condition:
        raise TypeError


# A builder takes the reader of the file's tensors and the arguments of the call. It
# raises TypeError if there are others than it takes.


def _tensor(t: TensorReader, storage: Any, offset: Any, shape: Any, steps: Any) -> Any:
    return t.tensor(storage, offset, shape, steps)


def _tensor_v2(
    t: TensorReader,
    storage: Any,
    offset: Any,
    shape: Any,
    strides: Any,
    grad: Any,
    _hooks: Any,
    metadata: Any = None,
) -> Any:
    return t.tensor(storage, offset, shape, strides, grad, metadata=metadata)


def _tensor_v3(
    t: TensorReader,
    storage: Any,
    offset: Any,
    shape: Any,
    strides: Any,
    grad: Any,
    _hooks: Any,
    dtype: Any,
    metadata: Any = None,
) -> Any:
    return t.tensor(storage, offset, shape, strides, grad, dtype, metadata)


def _parameter(
    t: TensorReader, data: Any, grad: Any = True, _hooks: Any = None, _state: Any = None
) -> Any:
    _require(isinstance(data, (mx.array, TensorShape)))
    return t.flag(data, grad is True, True)


def _from_type(t: TensorReader, function: Any, kind: Any, args: Any, state: Any) -> Any:
    _require(type(function) is Placeholder and function.args is None)
    if function.path == _WRAPPER:
        return _local_tensor(kind, args, state)
    # A tensor with Python attributes, which an array has no place for.
    plain = function.path.startswith("torch._utils.") and function.path in BUILDERS
    known = type(kind) is Placeholder and kind.path in _TENSOR_CLASSES
    _require(plain and known and type(args) is tuple)
    return BUILDERS[function.path](t, *args)


def _local_tensor(kind: Any, args: Any, state: Any) -> Any:
    """Return the tensor of FSDP2's DTensor, if this rank holds all of it."""
    known = type(kind) is Placeholder and kind.name == "DTensor"
    _require(known and type(args) is tuple and len(args) > 2)
    _require(type(state) is tuple and state and type(state[-1]) is dict)
    local, spec = state[-1].get("_local_tensor"), state[-1].get("_spec")
    _require(isinstance(local, (mx.array, TensorShape)))
    described = spec.state if isinstance(spec, Placeholder) else None
    placements = described.get("placements") if type(described) is dict else ()
    is_whole = type(placements) is tuple and not any(
        isinstance(how, Placeholder) and "Partial" in how.name for how in placements
    )
    if not is_whole or local.shape != args[2]:
        raise CheckpointError(
            f"the file holds one rank's part, of shape {local.shape}, of a DTensor. In "
            "PyTorch, gather the full state dict on all ranks and save what rank 0 "
            "gets: torch.distributed.checkpoint.state_dict.get_state_dict(model, "
            "optimizer, options=StateDictOptions(full_state_dict=True, "
            "cpu_offload=True))."
        )
    return local


def _tensor_shape(
    _: TensorReader, shape: Any, dtype: Any, grad: Any = False, parameter: Any = False
) -> TensorShape:
    _require(type(shape) is tuple and len(shape) <= 64 and all(map(is_count, shape)))
    _require(type(dtype) is str and dtype in BY_NAME)
    _require(type(grad) is bool and type(parameter) is bool)
    return TensorShape(shape, dtype, grad, parameter)


def _ordered_dict(_: TensorReader) -> OrderedDict[Any, Any]:
    return OrderedDict()


def _default_dict(_: TensorReader, factory: Any = None) -> DefaultDict:
    _require(factory is None or isinstance(factory, Placeholder))
    return DefaultDict(factory=factory)


def _counter(_: TensorReader, counts: Any) -> Counter[Any]:
    _require(type(counts) is dict and all(type(n) is int for n in counts.values()))
    return Counter(counts)


def _size(_: TensorReader, sizes: Any = ()) -> TorchSize:
    _require(type(sizes) is tuple and all(map(is_count, sizes)))
    return TorchSize(sizes)


def _device(_: TensorReader, kind: Any, index: Any = None) -> TorchName:
    _require(type(kind) is str and re.fullmatch(r"[A-Za-z_]\w{0,63}", kind, re.ASCII))
    _require(index is None or is_count(index))
    return TorchName(kind if index is None else f"{kind}:{index}")


def _encode(_: TensorReader, text: Any = "", encoding: Any = "latin1") -> bytes:
    _require(type(text) is str and encoding == "latin1")
    try:
        return str(text).encode("latin1")
    except UnicodeEncodeError:
        raise CheckpointError("a bytes value has characters beyond 255.") from None


def _bytearray(
    t: TensorReader, data: Any = b"", encoding: Any = "latin-1"
) -> bytearray:
    if type(data) is str and encoding == "latin-1":
        data = _encode(t, data)
    _require(type(data) is bytes)
    return bytearray(data)


def _complex(_: TensorReader, real: Any, imag: Any) -> complex:
    _require(type(real) is float and type(imag) is float)
    return complex(real, imag)


BUILDERS: dict[str, Callable[..., Any]] = {
    "torch._utils._rebuild_tensor": _tensor,
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
    "torch.Size": _size,
    "torch.device": _device,
    "_codecs.encode": _encode,
    "builtins.bytes": lambda _: b"",
    "builtins.bytearray": _bytearray,
    "builtins.complex": _complex,
    ".".join(TENSOR_SHAPE): _tensor_shape,
}
