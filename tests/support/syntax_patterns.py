# SPDX-License-Identifier: Apache-2.0
"""Patterns of Python code, found by syntax tree: names of variables, files and line breaks do not matter.

A pattern is Python: an expression, statements, or `name=value` for an argument of a call. In it `_a`, `_b` … stand for
any expression, the same letter for the same one; `*_a` and `**_a` for the rest of what is given to a call.
"""

import ast
import builtins
import copy
import re
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

Nodes = list[ast.AST]
Found = dict[str, Nodes]  # what each wildcard stands for
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def parsed(source: str, name: str = "<unknown>") -> ast.Module:
    """The syntax tree of a file.

    Python 3.11 confuses two threads that parse, as that of another test's server does for a traceback: it is tried
    again then.
    """
    for _ in range(4):
        with suppress(SystemError):
            return ast.parse(source, name)
    return ast.parse(source, name)


def definitions(package: Path) -> dict[str, list[tuple[Path, str]]]:
    """Name → files below the package and names in them; each name with and without (parts of) its module before it."""
    found: dict[str, dict[tuple[Path, str], None]] = {}
    for path in sorted(package.rglob("*.py")):
        file = path.relative_to(package)
        modules = file.with_suffix("").parts
        for name, _ in defined(parsed(path.read_text(encoding="utf-8"))):
            for first in range(len(modules) + 1):
                found.setdefault(".".join((*modules[first:], name)), {})[file, name] = None
    return {name: list(places) for name, places in found.items()}


def defined(node: ast.AST, within: str = "", constants: bool = True) -> Iterator[tuple[str, ast.stmt]]:
    """(name, tree) of functions, classes, methods, of constants of modules and classes, and of what modules call."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (*FUNCTIONS, ast.ClassDef)):
            yield f"{within}{child.name}", child
            yield from defined(child, f"{within}{child.name}.", isinstance(child, ast.ClassDef))
        elif constants and isinstance(child, (ast.Assign, ast.AnnAssign)):
            for target in child.targets if isinstance(child, ast.Assign) else [child.target]:
                yield f"{within}{ast.unparse(target)}", child
        elif constants and isinstance(child, ast.Expr) and isinstance(child.value, ast.Call):
            yield f"{within}{ast.unparse(child.value.func)}", child
        elif isinstance(child, (ast.stmt, ast.ExceptHandler, ast.match_case)):
            yield from defined(child, within, constants)


def parse(*texts: str) -> list[Nodes]:
    """Patterns of one kind: all expressions, all arguments, or all statements."""
    for before, behind in (("", ""), ("_(", ")")):
        try:
            trees = [ast.parse(f"{before}{text}{behind}", mode="eval").body for text in texts]
        except SyntaxError:
            continue
        if not before:
            return [[tree] for tree in trees]
        arguments = [tree.keywords for tree in trees if isinstance(tree, ast.Call)]
        if not any(wildcard(ast.Name(node.arg or "")) for nodes in arguments for node in nodes):
            return [list(nodes) for nodes in arguments]
    return [list(ast.parse(text).body) for text in texts]


def wildcard(node: object) -> str:
    """The wildcard that a node of a pattern is; empty if it is none."""
    if isinstance(node, ast.Starred) or (isinstance(node, ast.keyword) and node.arg is None):
        node = node.value
    return node.id if isinstance(node, ast.Name) and re.fullmatch("_[a-z]", node.id) else ""


def places(scope: ast.AST, pattern: Nodes) -> list[tuple[Nodes, Found]]:
    """Every place that fits, in the order of the text: its nodes (of statements, as many), and what wildcards are."""
    windows: list[Nodes] = [[scope]]
    for node in ast.walk(scope):
        if isinstance(pattern[0], ast.stmt):
            for _, value in ast.iter_fields(node):
                if isinstance(value, list):
                    windows += [value[at : at + len(pattern)] for at in range(len(value) - len(pattern) + 1)]
        elif isinstance(node, (ast.expr, ast.keyword)):
            windows.append([node])
    fitting = [(nodes, found) for nodes in windows if fits(pattern, nodes, found := Found())]
    return sorted(fitting, key=lambda place: _position(place[0][0]))


def _position(node: ast.AST) -> tuple[int, int]:
    return (node.lineno, node.col_offset) if isinstance(node, (ast.expr, ast.keyword, ast.stmt)) else (0, 0)


def fits(pattern: object, node: object, found: Found) -> bool:
    """Whether a tree is that of the pattern; notes what its wildcards are."""
    if isinstance(pattern, ast.Name) and (name := wildcard(pattern)):
        return isinstance(node, ast.expr) and same(found.setdefault(name, [node]), [node])
    if isinstance(pattern, list) and isinstance(node, list):
        rest = next((at for at, part in enumerate(pattern) if not isinstance(part, ast.Name) and wildcard(part)), None)
        if rest is not None and len(node) >= len(pattern) - 1:
            end = len(node) - (len(pattern) - rest - 1)
            held = node[rest:end]
            if not same(found.setdefault(wildcard(pattern[rest]), held), held):
                return False
            pattern, node = pattern[:rest] + pattern[rest + 1 :], node[:rest] + node[end:]
        return len(pattern) == len(node) and all(fits(*both, found) for both in zip(pattern, node, strict=True))
    if isinstance(pattern, ast.AST) and type(pattern) is type(node):
        fields = [field for field in pattern._fields if field not in ("ctx", "kind", "type_comment")]
        return all(fits(getattr(pattern, field), getattr(node, field), found) for field in fields)
    return type(pattern) is type(node) and pattern == node


def same(one: Sequence[ast.AST], other: Sequence[ast.AST]) -> bool:
    """Whether two pieces of code are the same."""
    texts = [[re.sub(r", ctx=\w+\(\)", "", ast.dump(node)) for node in nodes] for nodes in (one, other)]
    return texts[0] == texts[1]


def filled(pattern: Nodes, found: Found) -> Nodes:
    """The pattern with what its wildcards stand for."""
    trees = [_Filled(found).visit(copy.deepcopy(node)) for node in pattern]
    return [node for tree in trees for node in (tree if isinstance(tree, list) else [tree])]


class _Filled(ast.NodeTransformer):
    def __init__(self, found: Found) -> None:
        self._found = found

    def visit(self, node: ast.AST) -> ast.AST | Nodes:
        if not (name := wildcard(node)):
            return self.generic_visit(node)
        nodes = copy.deepcopy(self._found[name])
        return nodes[0] if isinstance(node, ast.Name) else nodes


def replaced(source: str, scope: ast.stmt, old: Nodes, new: Nodes) -> str:
    """The source with other nodes for some of a definition, whose comments are lost; old nodes follow each other."""
    decorators = getattr(scope, "decorator_list", [])
    first = min(node.lineno for node in [scope, *decorators])
    changed = _Replaced(old, new).visit(scope)
    statements = changed if isinstance(changed, list) else [changed or ast.Pass()]
    text = "\n".join(ast.unparse(ast.fix_missing_locations(statement)) for statement in statements)
    lines = source.splitlines()
    return "\n".join([*lines[: first - 1], textwrap.indent(text, " " * scope.col_offset), *lines[scope.end_lineno :]])


class _Replaced(ast.NodeTransformer):
    def __init__(self, old: Nodes, new: Nodes) -> None:
        self._old, self._new = old, new

    def visit(self, node: ast.AST) -> ast.AST | Nodes | None:
        if node is self._old[0]:
            return self._new[0] if len(self._new) == 1 else self._new
        return None if any(node is old for old in self._old) else self.generic_visit(node)


def unknown_names(new: Nodes, tree: ast.Module, scope: ast.AST) -> set[str]:
    """Names in code for a place that neither the place's function nor its module nor Python knows."""
    names = [node for part in new for node in ast.walk(part) if isinstance(node, ast.Name) and not wildcard(node)]
    known = {*vars(builtins), *(name.id for name in names if isinstance(name.ctx, ast.Store))}
    for node in (*ast.walk(scope), *(part for top in tree.body for part in (top, *_names_made(top)))):
        if isinstance(node, ast.Name):
            known.add(node.id)
        elif isinstance(node, ast.arg):
            known.add(node.arg)
        elif isinstance(node, ast.alias):
            known.add((node.asname or node.name).partition(".")[0])
        elif isinstance(node, (*FUNCTIONS, ast.ClassDef)):
            known.add(node.name)
    return {name.id for name in names} - known


def _names_made(top: ast.stmt) -> Iterator[ast.AST]:
    """Of a statement of a module, the names that it defines or imports, but nothing of what is inside."""
    return iter(()) if isinstance(top, (*FUNCTIONS, ast.ClassDef)) else ast.walk(top)
