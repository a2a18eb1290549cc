"""Run the code of a Markdown page: Python and commands, in order, as they stand."""

import contextlib
import io
import re
import shlex
from collections.abc import Iterator
from importlib.metadata import entry_points
from importlib.util import find_spec
from itertools import takewhile
from pathlib import Path

from mlx_gradscale import __main__ as commands

ROOT = Path(__file__).parents[2]
FENCE = re.compile(r"^```(\S*)[^\n]*\n(.*?)^```$", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\]\((?!https?:|#)([^)#\s]+)[^)]*\)|(?:src|srcset)=\"([^\"]+)\"")
# MODEL or FILE in a command stands for something that the reader has.
PLACEHOLDER = re.compile(r"(?<![\w-])[A-Z]{3,}(?![\w-])")
# Other people's commands. Only the paths in their arguments are checked.
TOOLS = {"bash", "git", "mlx.launch", "pre-commit", "pytest", "python", "sphinx-build"}
TOOLS |= {".", "python3", "pip"}
NOT_RUN = {"text", "diff"}


def blocks(text: str) -> Iterator[tuple[str, str, int]]:
    """Yield language, content and line of each fenced block."""
    fences = list(FENCE.finditer(text))
    assert 2 * len(fences) == len(re.findall(r"^\s*(?:```|~~~)", text, re.MULTILINE))
    for fence in fences:
        yield fence[1], fence[2], text.count("\n", 0, fence.start(2))


def run(path: Path, namespace: dict) -> None:
    """Run the blocks of a page in the current folder, and compare output blocks."""
    printed = ""
    for language, block, line in blocks(path.read_text()):
        if language == "python":
            # The empty lines give a traceback the line numbers of the page.
            code = compile("\n" * line + block, path.name, "exec")
            with contextlib.redirect_stdout(io.StringIO()) as out:
                exec(code, namespace)
            printed = out.getvalue()
        elif language == "sh":
            printed = "".join(run_command(words) for words in split_commands(block))
        elif language == "output":
            assert printed.split() == block.split(), printed
        else:
            assert language in NOT_RUN or language.startswith("{"), language


def split_commands(block: str) -> Iterator[list[str]]:
    """Yield the words of each command."""
    for line in block.replace("\\\n", " ").splitlines():
        for command in line.split(" && "):
            if words := shlex.split(command, comments=True):
                yield words


def run_command(words: list[str]) -> str:
    """Run a command of this package, or check its flags if it has placeholders."""
    if words[0].startswith("mlx_gradscale"):
        scripts = {script.name for script in entry_points(group="console_scripts")}
        assert words[0] in scripts, words
        arguments = [*words[0].split(".")[1:], *words[1:]]
    elif words[:3] == ["python", "-m", "mlx_gradscale"]:
        arguments = words[3:]
    else:
        check_other_command(words)
        return ""
    if not PLACEHOLDER.search(" ".join(arguments)):
        return call(arguments)
    if arguments[0] == "lora" and not find_spec("mlx_lm"):
        return ""  # it needs mlx-lm to list its flags
    known = call([arguments[0], "--help"])
    # What follows the name of a script is the script's.
    for word in takewhile(lambda word: not word.endswith(".py"), arguments[1:]):
        if word.startswith("-"):
            assert re.search(rf"(?<![\w-]){word}(?![\w-])", known), (word, words)
    return ""


def call(arguments: list[str]) -> str:
    """Return the output of a command, which must succeed."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        try:
            code = commands.main(arguments)
        except SystemExit as exit:
            code = exit.code
    assert not code, arguments
    return out.getvalue()


def check_other_command(words: list[str]) -> None:
    """Check that the extras, modules, marks and paths of another command exist."""
    assert words[0] in TOOLS, words
    project = (ROOT / "pyproject.toml").read_text()
    if words[0] == "pip":
        for named in re.findall(r"\[(.*?)\]", " ".join(words)):
            extras = re.findall(r"^([\w-]+) = \[", project, re.MULTILINE)
            assert set(named.split(",")) <= {*extras}, words
    elif "-m" in words:
        name = words[words.index("-m") + 1].split()[-1]
        is_mark = words[0] == "pytest"
        assert f'"{name}: ' in project if is_mark else find_spec(name), words
    for word in words[1:]:
        is_path = re.fullmatch(r"[\w.-]+(/[\w.-]+)+", word)
        if is_path and not word.startswith(("build/", "env/")):
            assert (ROOT / word).exists(), words


def dead_links(path: Path) -> list[str]:
    """Return the relative links and pictures of a page that lead nowhere."""
    text = FENCE.sub("", path.read_text())
    links = {"".join(found) for found in LINK.findall(text)}
    return [link for link in sorted(links) if not (path.parent / link).exists()]


def dead_anchors(path: Path) -> list[str]:
    """Return the links of a page to headings that are not there."""
    text = FENCE.sub("", path.read_text())
    links = re.findall(r"\]\((?!https?:)([^)\s]*)#([^)\s]+)\)", text)
    return [
        f"{page}#{anchor}"
        for page, anchor in links
        if anchor not in headings(path.parent / page if page else path)
    ]


def headings(path: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    found = re.findall(r"^#+ (.*)$", FENCE.sub("", path.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", x.lower()).replace(" ", "-") for x in found}
