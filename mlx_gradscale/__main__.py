"""The command line of the package: ``mlx_gradscale COMMAND``."""

import importlib
import sys
from collections.abc import Sequence
from importlib.metadata import version

from ._version import __version__
from .commands import run_command

# command: (module whose main() runs it, description)
COMMANDS = {
    "convert": ("convert.command", "convert a training run between PyTorch and MLX"),
    "float32-layers": ("float32.command", "find layers that must compute in float32"),
    "inspect": ("inspect", "list the contents of a checkpoint"),
    "lora": ("trainers.lora", "fine-tune with mlx-lm as well as in float32"),
    "plot": ("plot", "plot the history of a run"),
}
_HELP = ["usage: mlx_gradscale COMMAND [--help] ..."]
_HELP += [f"  {name:16}{text}" for name, (_, text) in COMMANDS.items()]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command named by the first argument.

    Args:
        argv (list, optional): A command and its arguments, ``--help`` or ``--version``.
            Default: the arguments of the process.

    Returns:
        int: The exit code, which is 2 if the command is missing or unknown.
    """
    name, *arguments = [*(sys.argv[1:] if argv is None else argv), ""]
    if name in COMMANDS:
        module = importlib.import_module(f"mlx_gradscale.{COMMANDS[name][0]}")
        return int(module.main(arguments[:-1]))
    texts = {
        "--version": f"mlx_gradscale {__version__}, MLX {version('mlx')}",
        "--help": "\n".join(_HELP),
        "-h": "\n".join(_HELP),
    }
    if name in texts:
        return run_command(lambda: print(texts[name]))
    problem = [f"{name!r} is not a command."] if name else []
    print("\n".join([*problem, *_HELP]), file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
