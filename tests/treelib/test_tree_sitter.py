# SPDX-License-Identifier: Apache-2.0
"""Programs: statements and expressions against hand-worked cuts and against Python's own parser; broken source."""

import ast
from itertools import accumulate

import pytest

pytest.importorskip("tree_sitter")
pytest.importorskip("tree_sitter_python")

from constituent_treelib.parsing import parse_texts
from constituent_treelib.tree_sitter_backend import TreeSitterBackend
from treelib_cases import check_trees, cuts_of, word_tokens

PROGRAM = """x = 1
y = f(a, b) + g(c)
if y > 2:
    print(y)
else:
    y = 0"""
CODES = [
    PROGRAM,
    "@dec(1)\nasync def f(a, *b, c: int = 2, **d) -> None:\n    '''Text, of words.'''\n    await g(a)\n    return\n",
    "class A(B, metaclass=C):\n    x: int\n\n    def f(self):\n        pass\n    y = 2; z = 3\n",
    "try:\n    a()\nexcept (B, C) as e:\n    raise D from e\nelse:\n    e()\nfinally:\n    f()\n",
    "with a as b, c:\n    while True:\n        break\nfor i, j in k:\n    continue\nelse:\n    del i\n",
    "match x:\n    case [1, y]:\n        pass\n    case _:\n        z = lambda a: a + 1\n",
    "x = [a for b in c if d]\ny = {**e, 'f': g}\nz = f'{h!r:>{i}} words here'\nassert x, y\n",
    "if a: b = 1\nelif c: d = 2\nimport os, sys\nfrom x import (y,\n    z)\n",
    "x = (1 +\n     2)\n# a comment of words\ny = 'a\\nb' 'c'  # and another\n\n\nprint(x)",
]


@pytest.fixture(scope="module")
def backend():
    return TreeSitterBackend()


def brackets(backend, text):
    trees, _ = parse_texts([text], backend)
    return [tree.bracket_string(text) for tree in trees[0]]


def starts_of(trees, text, cutoff):
    """Where macro actions begin, in characters, without the blanks before their first token."""
    spans = word_tokens(text)
    cuts = cuts_of(trees, text, cutoff)[:-1]
    return {spans[cut][1] - len(text[slice(*spans[cut])].lstrip()) for cut in cuts}


@pytest.mark.parametrize(
    ("cutoff", "lengths"),
    [
        # y = f(a, b) + g(c): f(…) has 6 tokens, its arguments 5, g(c) 4. "if" is a word alone, y > 2 has 3 tokens.
        (5, [3, 9, 4, 1, 4, 4, 2, 3]),
        (8, [3, 2, 7, 4, 5, 4, 2, 3]),
        (100, [3, 13, 5, 4, 2, 3]),
    ],
)
def test_macro_actions_by_hand(backend, cutoff, lengths):
    trees, counts = parse_texts([PROGRAM], backend)
    cuts = cuts_of(trees[0], PROGRAM, cutoff)
    assert [end - start for start, end in zip(cuts[:-1], cuts[1:], strict=True)] == lengths
    assert (counts.sentences, counts.parsed) == (1, 1)


def test_statements_and_heads_of_statements(backend):
    text = 'def f(a):\n    """Adds one."""\n    return a + 1; b()\n'
    assert brackets(backend, text) == [
        "(function_definition (def def) (identifier f) (parameters (-LRB- -LRB-) (identifier a) (-RRB- -RRB-)) (: :))",
        '(expression_statement (string (string_start """) '
        '(string_content (S (CLAUSE (CHUNK Adds one) .))) (string_end """)))',
        "(return_statement (return_statement (return return) "
        "(binary_operator (identifier a) (+ +) (integer 1))) (; ;))",
        "(expression_statement (call (identifier b) (argument_list (-LRB- -LRB-) (-RRB- -RRB-))))",
    ]


def test_strings_and_comments_are_words(backend):
    assert brackets(backend, "x = 'a\\nb c'\n# It is (red)") == [
        "(expression_statement (assignment (identifier x) (= =) (string (string_start ') "
        "(string_content a (escape_sequence \\n) (S (CLAUSE (CHUNK b c)))) (string_end '))))",
        "(comment (S (CLAUSE (CHUNK # It) (CHUNK is -LRB- red -RRB-))))",
    ]


def test_the_tree_of_the_grammar(backend):
    text = "if a:\n    b"
    assert backend.syntax_tree(text).bracket_string(text) == (
        "(module (if_statement (if if) (identifier a) (: :) (block (expression_statement (identifier b)))))"
    )


def line_starts(text):
    return [0, *accumulate(map(len, text.splitlines(keepends=True)))]


def statement_starts(text):
    """Where Python's own parser sees statements begin, in characters."""
    lines = line_starts(text)
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.stmt):
            line = text[lines[node.lineno - 1] : lines[node.lineno]]
            yield lines[node.lineno - 1] + len(line.encode()[: node.col_offset].decode())


@pytest.mark.parametrize("text", CODES, ids=str.split)
def test_every_statement_begins_a_macro_action(backend, text):
    trees, counts = parse_texts([text], backend)
    assert counts.parsed == 1
    check_trees(trees[0], text)
    expected = set(statement_starts(text))
    assert expected
    for cutoff in (3, 5, 10, 1000):
        assert expected <= starts_of(trees[0], text, cutoff)


@pytest.mark.parametrize(
    ("text", "starts"),
    [
        ("x = 1\ny = 2\nz = foo(a,", {0, 6, 12}),
        ("def f(a):\n    b = 1\n    return (b +\n\nx = 2\n", {0, 14, 24}),
        ("x = = 1\ny = 2\n", {0, 8}),
        ("for i in range(3)\n    print(i)\n", {0}),
        ("x = 'no end\ny = 2", {0}),
    ],
)
def test_broken_source(backend, text, starts):
    """What stands before the fault is cut as ever."""
    trees, counts = parse_texts([text], backend)
    assert counts.parsed == 1
    check_trees(trees[0], text)
    assert starts <= starts_of(trees[0], text, 5)


def test_every_beginning_of_a_program(backend):
    """Responses are cut off anywhere."""
    text = CODES[1] + CODES[2]
    for end in range(len(text)):
        trees, _ = parse_texts([text[:end]], backend)
        check_trees(trees[0], text[:end])


@pytest.mark.parametrize(
    "text",
    [
        "The quick brown fox jumps over the lazy dog. It is lazy, of course.",
        "$ ? $ ?\n! ! !",
        "Dear all,\n\nI would like to thank you for the flowers.\nYours",
    ],
)
def test_what_is_no_program_is_left_to_the_chunker(backend, text):
    trees, counts = parse_texts([text], backend)
    assert (counts.parsed, counts.fell_back, dict(counts.reasons)) == (0, 1, {"not parsed": 1})
    assert {tree.label for tree in trees[0]} == {"S"}


@pytest.mark.parametrize(
    "text",
    [
        "(" * 4_000 + ")" * 4_000,
        "".join(" " * depth + "if x:\n" for depth in range(300)),
        '"' * 2_001,
        "x = 1\0y = '\0'\n" * 100,
        "x = '\ud800é\udfff'\n# \udc80 日本\n",
        "\ufeffx = 1\r\ny = 2\r\n",
        "\x0c\x1a\x00",
    ],
    ids=lambda text: repr(text[:12]),
)
def test_anything_gives_a_sound_tree_or_none(backend, text):
    trees, counts = parse_texts([text], backend)
    assert set(counts.reasons) <= {"not parsed"}
    check_trees(trees[0], text)


def test_positions_are_characters(backend):
    text = "é = '日本' + 😀(x)"
    (tree,) = backend.parse([text])
    words = [text[leaf.start : leaf.end] for leaf in tree.leaves()]
    assert words[:6] == ["é", "=", "'", "日本", "'", "+"]
    assert words[-3:] == ["(", "x", ")"]
