"""Import a module of the user's from the current folder, and nothing else from it."""

import importlib
import os
import sys
from importlib.machinery import PathFinder
from importlib.util import module_from_spec
from types import ModuleType


def import_here(name: str) -> ModuleType:
    """Import a module, from the current folder if it is there.

    The folder comes last in ``sys.path``, so that nothing in it is taken for a module
    of the standard library, or an installed one, that this or any other module asks
    for. Only the module that was asked for by name is looked for there first.

    Args:
        name (str): The module, as in an import statement.

    Example:

        >>> import_here("json").__name__
        'json'
    """
    here = os.getcwd()
    if here not in sys.path:
        sys.path.append(here)
    top = name.partition(".")[0]
    if top not in sys.modules and top not in sys.stdlib_module_names:
        spec = PathFinder.find_spec(top, [here])
        if spec is not None and spec.loader is not None:
            module = sys.modules[top] = module_from_spec(spec)
            try:
                spec.loader.exec_module(module)
            except BaseException:
                del sys.modules[top]
                raise
    return importlib.import_module(name)
