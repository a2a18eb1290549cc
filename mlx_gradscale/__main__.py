"""``python -m mlx_gradscale <command>``: one line per command in a table."""

import importlib
import sys
from collections.abc import Sequence

# command -> (the module whose main runs it, what it does)
COMMANDS = {
    "convert": ("convert", "convert a training run between PyTorch and MLX"),
    "float16": ("float16", "find the layers that must be float32, and draw headroom"),
    "inspect": ("inspect", "print what is in a checkpoint"),
    "lora": ("lora", "fine-tune with mlx-lm, with loss scaling"),
    "plot": ("plot", "draw the history of a run"),
    "run": ("everywhere.command", "run a training script with loss scaling"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command that the first argument names.

    Args:
        argv: the arguments; by default those of the process.

    Returns:
        int: the command's exit code; 2 if there is no such command.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    name = arguments[0] if arguments else None
    if name not in COMMANDS:
        asked = name in ("-h", "--help")
        lines = [f"  {each:10}{text}" for each, (_, text) in COMMANDS.items()]
        usage = "usage: mlx_gradscale COMMAND ...; COMMAND --help tells more"
        print("\n".join([usage, *lines]), file=sys.stdout if asked else sys.stderr)
        return 0 if asked else 2
    module = importlib.import_module(f"mlx_gradscale.{COMMANDS[name][0]}")
    return int(module.main(arguments[1:]))


if __name__ == "__main__":
    sys.exit(main())
