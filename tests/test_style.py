# SPDX-License-Identifier: Apache-2.0
"""How densely the code is written, measured on all code but tests; the limits may be lowered, never raised."""

import ast
import io
import re
import subprocess
import tokenize
from collections import Counter
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[1]
COUNTED = {tokenize.NAME, tokenize.OP, tokenize.NUMBER, tokenize.STRING}
DENSE = 25  # tokens on one line
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
VAGUE_NAMES = set("found place places own one each known kept given told those way ways said".split())
# measure → the figure of the day
LIMITS = {
    "tokens per line": 8.7,
    "dense lines, percent": 2.1,
    "comprehensions per 1,000 lines": 24.7,
    "tuple assignments, percent": 0.1,
    "vague names": 0,
    "docstrings that lean on another": 0,
}


def source_files() -> list[Path]:
    """Python files known to git, without tests."""
    listing = subprocess.run(["git", "ls-files", "*.py"], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    names = [name for name in listing.stdout.split() if not name.startswith("tests/")]
    return [REPOSITORY / name for name in names]


def docstrings_of(tree: ast.Module) -> list[ast.Constant]:
    """Constants that are docstrings of the module, its classes and its functions."""
    docstrings = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        first = node.body[0] if node.body else None
        if (
            isinstance(first, ast.Expr)
            and isinstance(first.value, ast.Constant)
            and isinstance(first.value.value, str)
        ):
            docstrings.append(first.value)
    return docstrings


def tokens_per_line(source: str, skipped_lines: set[int]) -> Counter[int]:
    """Line number → names, operators, numbers and strings on it; comments and docstrings are not counted."""
    counts: Counter[int] = Counter()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type in COUNTED and token.start[0] not in skipped_lines:
            counts[token.start[0]] += 1
    return counts


def assigned_names(assignment: ast.Assign) -> list[str]:
    """Names that an assignment binds."""
    names = []
    for target in assignment.targets:
        names += [node.id for node in ast.walk(target) if isinstance(node, ast.Name)]
    return names


@pytest.fixture(scope="module")
def measures() -> dict[str, float]:
    """The measures of `LIMITS`, over all source files."""
    totals: Counter[str] = Counter()
    for path in source_files():
        source = path.read_text(encoding="utf-8")
        tree = ast.parse(source)
        docstrings = docstrings_of(tree)
        docstring_lines = {line for text in docstrings for line in range(text.lineno, text.end_lineno + 1)}
        counts = tokens_per_line(source, docstring_lines)
        totals["tokens"] += sum(counts.values())
        totals["lines"] += len(counts)
        totals["dense"] += sum(count >= DENSE for count in counts.values())
        totals["leaning"] += sum(bool(re.match(r"\s*(The same|Of)\b", text.value)) for text in docstrings)
        for node in ast.walk(tree):
            totals["comprehensions"] += isinstance(node, COMPREHENSIONS)
            if isinstance(node, ast.Assign):
                totals["assignments"] += 1
                totals["tuples"] += isinstance(node.targets[0], ast.Tuple) and isinstance(node.value, ast.Tuple)
                totals["vague"] += sum(name in VAGUE_NAMES for name in assigned_names(node))
    return {
        "tokens per line": totals["tokens"] / totals["lines"],
        "dense lines, percent": 100 * totals["dense"] / totals["lines"],
        "comprehensions per 1,000 lines": 1000 * totals["comprehensions"] / totals["lines"],
        "tuple assignments, percent": 100 * totals["tuples"] / totals["assignments"],
        "vague names": totals["vague"],
        "docstrings that lean on another": totals["leaning"],
    }


@pytest.mark.xdist_group("style")
@pytest.mark.parametrize("measure", LIMITS)
def test_the_code_is_no_denser_than_it_was(measure, measures) -> None:
    assert measures[measure] <= LIMITS[measure]
