# MLX's mlx.utils, more exactly than MLX itself says it: tree_flatten returns a list
# unless it is given another destination.
from collections.abc import Callable
from typing import Any, TypeVar, overload

_Destination = TypeVar("_Destination", list[tuple[str, Any]], dict[str, Any])

def tree_map(
    fn: Callable[..., Any],
    tree: Any,
    *rest: Any,
    is_leaf: Callable[[Any], bool] | None = None,
) -> Any: ...
def tree_map_with_path(
    fn: Callable[..., Any],
    tree: Any,
    *rest: Any,
    is_leaf: Callable[[Any], bool] | None = None,
    path: Any = None,
) -> Any: ...
@overload
def tree_flatten(
    tree: Any,
    prefix: str = "",
    is_leaf: Callable[[Any], bool] | None = None,
    destination: None = None,
) -> list[tuple[str, Any]]: ...
@overload
def tree_flatten(
    tree: Any,
    prefix: str = "",
    is_leaf: Callable[[Any], bool] | None = None,
    *,
    destination: _Destination,
) -> _Destination: ...
def tree_unflatten(tree: list[tuple[str, Any]] | dict[str, Any]) -> Any: ...
def tree_reduce(
    fn: Callable[[Any, Any], Any],
    tree: Any,
    initializer: Any = None,
    is_leaf: Callable[[Any], bool] | None = None,
) -> Any: ...
def tree_merge(
    tree_a: Any, tree_b: Any, merge_fn: Callable[[Any, Any], Any] | None = None
) -> Any: ...
