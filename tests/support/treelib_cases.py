# SPDX-License-Identifier: Apache-2.0
"""Texts of every kind for parsers, tokens without a tokenizer, and what must hold of every parse."""

import re
from collections.abc import Sequence
from itertools import accumulate

from constituent_treelib import Tree
from macro_actions.constituents import macro_action_lengths

Span = tuple[int, int]  # first character and the one behind the last
SALAD = " ".join("seven over the cat blue not is of run and if who that".split() * 5)[:-3]  # 60 words and more
TEXTS = {
    "nothing": "",
    "blank": " \t \u00a0\n \r\n",
    "a letter": "a",
    "a mark": ".",
    "words": "The quick fox jumped over the lazy dog.",
    "sentences": "One fox. Two dogs!  Three?\nFour\n\nFive: six",
    "no end": "and then she went to the",
    "crlf": "First line\r\nsecond line.\r\n\r\nThird\rline",
    "tabs": "a\tb\t\tc\n\td",
    "cjk": "我爱北京。你呢？東京タワーは、とても高い！ 한국어 문장입니다.",
    "thai": "สวัสดีชาวโลก ฉันรักภาษาไทย",
    "hindi": "मैं हिन्दी बोलता हूँ। क्या आप?",
    "arabic": "مرحبا بالعالم، كيف حالك؟",
    "emoji": "Nice 😀👍🏽 work 👩‍👩‍👧‍👦! ❤️‍🔥🇩🇪🇫🇷 1️⃣",
    "combining": "e\u0301a\u0308 cafe\u0301, n\u0303o \u0301 alone",
    "brackets": "(a [b] {c}) f(x) = y[0] )( -LRB- (",
    "quotes": '"He said \'go\'," “she” ‘it’ ``that\'\' """',
    "nbsp": "one\u00a0two \u00a0 three\u00a0",
    "zero width": "one\u200btwo \u200b three\u200b \u200d \ufeff",
    "replacement": "\ufffd\ufffd ab\ufffdc \ufffd.",
    "nul": "\0 a\0b. \0\0 c\0",
    "controls": "a\x01b \x7f \x1b[0m \x85 c\x0b\x0c d \u2028e",
    "surrogates": "x \ud800 y\udfff. \udc00\ud800",
    "salad": SALAD,
    "one long word": "x" * 1000,
    "marks": "!?!... --- ;;; $$$ *** ___",
    "digits": "3.14 1,000,000 12:30 192.168.0.1 50% $5",
    "markup": "<b>bold</b> &amp; <script>alert('x')</script>",
    "python": "def f(x):\n    '''Says hello to you.'''\n    return x + 1  # one more\n\n\nprint(f(2))\n",
    "broken python": 'def f(x:\n  return (x +\n\nprint("a b\n  )) else:\n\tif',
    "fenced": "Here is the code:\n```python\nx = [1, 2\n```\nThat is all.",
    "json": '{"a": [1, 2, {"b": null}], "c": "d e f"}',
}


def flat_tree(spans: Sequence[Span], label: str = "S") -> Tree:
    """Words, (start, end) of each, under one root."""
    return Tree(label, spans[0][0], spans[-1][1], tuple(Tree("", start, end) for start, end in spans))


def word_tokens(text: str) -> list[Span]:
    """(start, end) of one token per run of letters or mark, with the blanks before it; blanks at the end are one."""
    return [found.span() for found in re.finditer(r"\s*(?:\w+|[^\w\s])|\s+", text)]


def cuts_of(trees: Sequence[Tree], text: str, cutoff: int) -> list[int]:
    """Where the macro actions of a text begin and end, in tokens."""
    return [0, *accumulate(macro_action_lengths(trees, text, word_tokens(text), 0, cutoff))]


def check_trees(trees: Sequence[Tree], text: str) -> None:
    """The words of a text's trees lie in it, in order, without overlap, and none is blank."""
    position = 0
    for tree in trees:
        for leaf in tree.leaves():
            assert position <= leaf.start < leaf.end <= len(text)
            assert text[leaf.start : leaf.end].strip()
            position = leaf.end
