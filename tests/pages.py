"""The code of a Markdown page: Python and commands are run in order, as they stand."""

import contextlib
import io
import re
import shlex
from collections.abc import Iterator
from importlib.metadata import entry_points, metadata
from importlib.util import find_spec
from pathlib import Path

from mlx_gradscale import __main__ as commands

ROOT = Path(__file__).parents[1]
FENCE = re.compile(r"^```(\S*)[^\n]*\n(.*?)^```$", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\]\((?!https?:|#)([^)#\s]+)[^)]*\)|(?:src|srcset)=\"([^\"]+)\"")
# MODEL or PATH in a command stands for what the reader has.
PLACEHOLDER = re.compile(r"(?<![\w-])[A-Z]{3,}(?![\w-])")
# Other people's commands, of which only the paths are looked at.
TOOLS = {"git", "mlx.launch", "pre-commit", "pytest", "ruff", "sphinx-build"}
# Written later than what links to it.
TO_COME = {"ARCHITECTURE.md"}


def blocks(text: str) -> Iterator[tuple[str, str, int]]:
    """Yield language, content and line of each fenced block."""
    fences = list(FENCE.finditer(text))
    assert 2 * len(fences) == len(re.findall(r"^\s*(?:```|~~~)", text, re.MULTILINE))
    for fence in fences:
        yield fence[1], fence[2], text.count("\n", 0, fence.start(2))


def run(path: Path, namespace: dict) -> None:
    """Run the blocks of a page in the current folder; an output block must be true."""
    said = ""
    for language, block, line in blocks(path.read_text()):
        if language == "python":
            # With the page's own lines in a traceback.
            code = compile("\n" * line + block, path.name, "exec")
            with contextlib.redirect_stdout(io.StringIO()) as out:
                exec(code, namespace)
            said = out.getvalue()
        elif language == "sh":
            said = "".join(run_command(words) for words in lines_of(block))
        elif language == "output":
            assert said.split() == block.split(), said
        else:
            assert language == "text" or language.startswith("{"), language


def lines_of(block: str) -> Iterator[list[str]]:
    """Yield the words of each command."""
    for line in block.replace("\\\n", " ").splitlines():
        for command in line.split(" && "):
            if words := shlex.split(command, comments=True):
                yield words


def run_command(words: list[str]) -> str:
    """Run a command of this package, or check its flags if it has placeholders."""
    arguments = own_command(words)
    if arguments is None:
        check_other(words)
        return ""
    if not PLACEHOLDER.search(" ".join(arguments)):
        return call(arguments)
    if arguments[0] == "lora" and not find_spec("mlx_lm"):
        return ""  # its flags are mlx-lm's; CI has it
    known = call([arguments[0], "--help"])
    for flag in (word for word in arguments if word.startswith("-")):
        assert re.search(rf"(?<![\w-]){flag}(?![\w-])", known), (flag, words)
    return ""


def own_command(words: list[str]) -> list[str] | None:
    """Return what the command of this package is called with, or None."""
    if words[0].startswith("mlx_gradscale"):
        scripts = {script.name for script in entry_points(group="console_scripts")}
        assert words[0] in scripts, words
        return [*words[0].split(".")[1:], *words[1:]]
    if words[:3] == ["python", "-m", "mlx_gradscale"]:
        return words[3:]
    return None


def call(arguments: list[str]) -> str:
    """Return what a command prints; it must end well."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        try:
            code = commands.main(arguments)
        except SystemExit as exit:
            code = exit.code
    assert not code, arguments
    return out.getvalue()


def check_other(words: list[str]) -> None:
    """Check that what somebody else's command is given is there."""
    if words[:2] == ["pip", "install"]:
        extras = set(metadata("mlx_gradscale").get_all("Provides-Extra"))
        for named in re.findall(r"\[(.*?)\]", " ".join(words)):
            assert set(named.split(",")) <= extras, words
    elif words[:2] == ["python", "-m"]:
        assert find_spec(words[2]), words
    else:
        assert words[0] in TOOLS or words[0] in ("python", "bash"), words
    for word in words[1:]:
        if re.fullmatch(r"[\w.-]+(/[\w.-]+)+", word) and not word.startswith("build/"):
            assert (ROOT / word).exists(), words


def names(path: Path) -> set[str]:
    """Return the dotted names of this package that a page writes as code."""
    return set(re.findall(r"`(mlx_gradscale(?:\.\w+)+)`", path.read_text()))


def dead_links(path: Path) -> list[str]:
    """Return the relative links and pictures of a page that lead nowhere."""
    text = FENCE.sub("", path.read_text())
    links = {"".join(found) for found in LINK.findall(text)}
    return [
        link
        for link in sorted(links)
        if not (path.parent / link).exists() and Path(link).name not in TO_COME
    ]
