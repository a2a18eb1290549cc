"""The small changes that mutation testing makes to a source file, one at a time."""

import ast
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass

_SWAPS = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.And: ast.Or,
    ast.Or: ast.And,
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Mult,
    ast.Pow: ast.Mult,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
}


@dataclass(frozen=True)
class Mutant:
    """A whole source with one change, and the line where that is."""

    line: int
    before: str
    after: str
    source: str


def mutants(source: str) -> list[Mutant]:
    """List every mutant of a source: comparisons, operators, constants, statements."""
    found = [_spliced(source, *change) for change in _changes(ast.parse(source))]
    # What a change to a default value and a deleted statement have in common.
    return list({m.source: m for m in found if m.source != source}.values())


def _changes(node: ast.AST) -> Iterator[tuple[ast.AST, ast.AST]]:
    """Yield each node that can be changed, with what comes in its place."""
    yield from ((node, new) for new in _instead(node))
    for field, value in ast.iter_fields(node):
        # Annotations do nothing, and the places inside f-strings are not exact.
        if field in ("annotation", "returns") or isinstance(value, ast.JoinedStr):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and not isinstance(child, ast.JoinedStr):
                yield from _changes(child)


def _instead(node: ast.AST) -> Iterator[ast.AST]:
    match node:
        case ast.Compare():
            for i, operator in enumerate(node.ops):
                new = deepcopy(node)
                new.ops[i] = _SWAPS[type(operator)]()
                yield new
        case ast.BoolOp() | ast.BinOp() if type(node.op) in _SWAPS:
            new = deepcopy(node)
            new.op = _SWAPS[type(node.op)]()
            yield new
        case ast.UnaryOp(op=ast.Not()):
            yield node.operand
        case ast.Constant(value=bool()):
            yield ast.Constant(not node.value)
        case ast.Constant(value=int() | float()):
            yield ast.Constant(node.value + 1)
            yield ast.Constant(node.value - 1)
        case ast.Return(value=ast.AST()) if not _is_none(node.value):
            yield ast.Return(ast.Constant(None))
        case ast.Raise() | ast.Continue() | ast.Break() | ast.AugAssign():
            yield ast.Pass()
        case ast.Expr(value=ast.Call()):
            yield ast.Pass()
        # A name that is never assigned raises: no test would have to look.
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
            yield ast.Pass()


def _is_none(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def _spliced(source: str, old: ast.AST, new: ast.AST) -> Mutant:
    # In the text, so that everything else stays as it is. Columns count bytes.
    lines = source.encode().splitlines(keepends=True)
    text = ast.unparse(ast.fix_missing_locations(new))
    if isinstance(old, ast.expr):
        text = f"({text})"
    first, last = old.lineno - 1, old.end_lineno - 1
    before = lines[first][: old.col_offset]
    after = lines[last][old.end_col_offset :]
    changed = before + text.encode() + after
    lines[first : last + 1] = [changed]
    original = " ".join(source.splitlines()[first : last + 1])
    return Mutant(
        old.lineno,
        " ".join(original.split()),
        " ".join(changed.decode().split()),
        b"".join(lines).decode(),
    )
