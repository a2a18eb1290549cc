"""One style of docstrings, MLX's: imperative, and ``name (type): Sentence.``

The API reference of the documentation is made from them.
"""

import ast
import re
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "mlx_gradscale"
# How a docstring of a function begins that says what it is, not what it does.
NO_VERB = {
    *("A", "An", "The", "One", "Those", "All", "What", "Which", "How", "Where"),
    *("Whether", "Without", "By", "As", "Equal"),
}
# A class may begin with a plural ("Counts by power of two"), but not with these.
VERBS = {"Checks", "Makes", "Puts", "Reads", "Returns", "Stands", "Walks", "Writes"}
# Names that are written with a small letter wherever they stand.
LOWER = {"mlx-lm", "mlx-lm's", "numpy", "numpy's", "flodl", "flodl's"}
SECTIONS = ("Args", "Attributes", "Returns", "Yields", "Raises", "Example", "Examples")
ENTRY = re.compile(r"    (\*{0,2}\w+) \(([^()]+)\): (.+)")

Node = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def definitions(tree, outer="", is_public=True):
    """Yield (name, node, whether it is public) of functions, classes and methods."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, Node):
            name = f"{outer}{node.name}"
            public = is_public and not node.name.startswith("_")
            yield name, node, public
            if isinstance(node, ast.ClassDef):
                yield from definitions(node, f"{name}.", public)


def decorators(node):
    return {ast.unparse(each).rpartition(".")[2] for each in node.decorator_list}


def is_value(node):
    """Tell whether it reads as a thing: a class or a property."""
    return isinstance(node, ast.ClassDef) or bool(
        decorators(node) & {"property", "cached_property"}
    )


def sections(text):
    """Return the lines of each section, without their heading."""
    found, name = {}, None
    for line in text.splitlines():
        if line.rstrip(":") in SECTIONS and line.endswith(":"):
            name = line.rstrip(":")
            found[name] = []
        elif name and (not line or line.startswith("    ")):
            found[name].append(line)
        else:
            name = None
    return found


def entries(lines):
    """Return the entries of a section, each in one line."""
    found = []
    for line in lines:
        if line.startswith("     ") and found:
            found[-1] += " " + line.strip()
        elif line:
            found.append(line)
    return found


def parameters(node):
    """Return the parameters of a function as they are written, and of a class."""
    if isinstance(node, ast.ClassDef):
        inits = [x for x in node.body if getattr(x, "name", "") == "__init__"]
        if inits:
            return parameters(inits[0])
        fields = [x.target.id for x in node.body if isinstance(x, ast.AnnAssign)]
        return [name for name in fields if not name.startswith("_")]
    given = node.args
    names = [x.arg for x in given.posonlyargs + given.args]
    names += [f"*{given.vararg.arg}"] if given.vararg else []
    names += [x.arg for x in given.kwonlyargs]
    names += [f"**{given.kwarg.arg}"] if given.kwarg else []
    return [name for name in names if name not in ("self", "cls")]


def first_word(text):
    return text.split()[0].rstrip(",.:;")


def begins_small(sentence):
    return sentence[:1].islower() and first_word(sentence) not in LOWER


def faults(source):
    """Yield what is wrong with the docstrings of a file, in a line each."""
    for name, node, public in definitions(ast.parse(source)):
        text = ast.get_docstring(node)
        where = f"line {node.lineno}, {name}"
        if text is None:
            # A setter has the docstring of its property.
            if public and "setter" not in decorators(node):
                yield f"{where}: no docstring"
            continue
        yield from (f"{where}: {said}" for said in wrong_start(node, text))
        yield from (f"{where}: {said}" for said in wrong_sections(node, text))


def wrong_start(node, text):
    word = first_word(text)
    # "Pass" and "Process" are no third persons.
    has_s = re.fullmatch(r"[A-Z][a-z]*[^s]s", word)
    if word in VERBS or (has_s and not is_value(node)):
        yield f"begins in the third person, {word!r}"
    elif word in NO_VERB and not is_value(node):
        yield f"begins with {word!r}, and should say what it does"
    summary = text.partition("\n\n")[0]
    if not summary.endswith("."):
        yield f"no full stop ends {summary[-20:]!r}"


def wrong_sections(node, text):
    found = sections(text)
    known = parameters(node)
    said = []
    for section in ("Args", "Attributes"):
        for entry in entries(found.get(section, [])):
            match = ENTRY.fullmatch(entry)
            if not match:
                yield f"{section} has {entry.strip()!r}, not name (type): Sentence."
                continue
            name, _, sentence = match.groups()
            if begins_small(sentence):
                yield f"{section}, {name}: a small letter begins {sentence!r}"
            if not sentence.endswith("."):
                yield f"{section}, {name}: no full stop ends {sentence!r}"
            if section == "Args":
                said.append(name)
    # A ** may be there only to refuse what is given.
    if said and said not in (known, [x for x in known if not x.startswith("**")]):
        yield f"Args has {said}, the signature {known}"
    for section in ("Returns", "Raises", "Yields"):
        for entry in entries(found.get(section, []))[:1]:
            sentence = re.sub(r"^\s+([\w. \[\],]+: )?", "", entry)
            if begins_small(sentence):
                yield f"{section}: a small letter begins {sentence!r}"


@pytest.mark.parametrize(
    "path", sorted(PACKAGE.rglob("*.py")), ids=lambda p: str(p.relative_to(PACKAGE))
)
def test_docstrings_are_in_one_style(path):
    found = list(faults(path.read_text()))
    assert not found, "\n".join(found)


def test_what_is_not_in_this_style_is_told():
    source = """
class Reader:
    '''Reads a file.'''

    def size(self): ...

    @property
    def name(self):
        '''The name of the file.'''

    @name.setter
    def name(self, name): ...

    def _seek(self, place, *, wait):
        '''Go to a place

        Args:
            place (int): where it is.
            wait: Whether to wait.

        Returns:
            bool: whether it is there.
        '''

def size(path):
    '''The size of a file.

    Args:
        file (str): Its path.
    '''

def closes(): '''Closes all files.'''

def _helper(): ...
"""
    assert list(faults(source)) == [
        "line 2, Reader: begins in the third person, 'Reads'",
        "line 5, Reader.size: no docstring",
        "line 14, Reader._seek: no full stop ends 'Go to a place'",
        "line 14, Reader._seek: Args, place: a small letter begins 'where it is.'",
        "line 14, Reader._seek: Args has 'wait: Whether to wait.', "
        "not name (type): Sentence.",
        "line 14, Reader._seek: Args has ['place'], the signature ['place', 'wait']",
        "line 14, Reader._seek: Returns: a small letter begins 'whether it is there.'",
        "line 25, size: begins with 'The', and should say what it does",
        "line 25, size: Args has ['file'], the signature ['path']",
        "line 32, closes: begins in the third person, 'Closes'",
    ]
