# SPDX-License-Identifier: Apache-2.0
"""Every mutant can be made of the package as it is now; and, on request, the tests notice each of them."""

import ast
import subprocess
import sys
import textwrap

import pytest

import mutants
from support.syntax_patterns import filled, parse, places, replaced


def test_every_mutant_can_be_made() -> None:
    names = [mutant.name for mutant in mutants.MUTANTS]
    assert len(set(names)) == len(names) >= 470
    for mutant in mutants.MUTANTS:
        assert mutant.made() and mutant.test_ids()


@pytest.mark.parametrize(
    ("function", "old", "new", "message"),
    [
        ("no_such", "_a", "_b", "the package has no no_such"),
        ("gae", "_a * _b", "_a", "gae holds '_a [*] _b' 3 times"),
        ("gae", "_a - _b", "_a - renamed", "gae does not know renamed"),
        ("gae", "_a - _b", "_a - _b", "gae stays as it is"),
    ],
)
def test_a_mutant_that_cannot_be_made_says_why(function: str, old: str, new: str, message: str) -> None:
    with pytest.raises(ValueError, match=f"mutant 'a name': {message}"):
        mutants.Mutant("a name", function, old, new, "").made()


@pytest.mark.parametrize(("test", "number"), [("test_no_such", 0), ("test_by_hand", 2), ("test_gae::test_by_hand", 0)])
def test_a_mutant_whose_test_is_missing_or_one_of_several_is_named(test: str, number: int) -> None:
    with pytest.raises(ValueError, match=f"mutant 'a name': {number} tests are called {test}"):
        mutants.Mutant("a name", "gae", "_a - _b", "_a", test).test_ids()


@pytest.mark.parametrize(
    ("code", "old", "new", "changed"),
    [
        ("x = a * a + a * b", "_a * _a", "_a", "x = a + a * b"),
        ("f(1, 2, k=3)", "f(*_a, k=_b)", "f(0, *_a)", "f(0, 1, 2)"),
        ("f(j=1, k=2)", "k=_a", "k=-_a", "f(j=1, k=-2)"),
        ("a()\nb()", "_a(); _b()", "_b(); _a()", "b()\na()"),
        ("if a:\n    b()", "b()", "pass", "if a:\n    pass"),
    ],
)
def test_patterns(code: str, old: str, new: str, changed: str) -> None:
    pattern, instead = parse(old, new)
    source, expected = ("def f():\n" + textwrap.indent(text, "    ") for text in (code, changed))
    scope = ast.parse(source).body[0]
    [(nodes, found)] = places(scope, pattern)
    assert replaced(source, scope, nodes, filled(instead, found)) == expected


@pytest.mark.mutants
def test_every_mutant_is_killed(capfd: pytest.CaptureFixture[str]) -> None:
    with capfd.disabled():
        assert subprocess.run([sys.executable, mutants.__file__]).returncode == 0
