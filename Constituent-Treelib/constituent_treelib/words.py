# SPDX-License-Identifier: Apache-2.0
"""Where the words of a text are, in any script."""

import re
import unicodedata
from functools import cache
from itertools import chain, groupby

# Scripts of the Far East that put no blanks between words: every character is a word. Hangul has blanks.
_IDEOGRAPHS = (
    r"\u2e80-\u2fdf\u3005-\u3007\u3021-\u3035\u3040-\u312f\u31a0-\u31ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
    r"\uff66-\uff9f\U0001b000-\U0001b16f\U00020000-\U0003ffff"
)
_JOINERS = r"'’\u2010\u2011-"
_FLAG = r"[\U0001f1e6-\U0001f1ff]{2}"
_SKIN = r"\U0001f3fb-\U0001f3ff"
_ZERO_WIDTH_SPACE = 0x200B


@cache
def word_pattern(ascii_only: bool = False) -> re.Pattern[str]:
    """Matches one word after another; every visible character of a text belongs to exactly one.

    A word is a run of letters and digits with single apostrophes and hyphens inside, an ideograph, a flag, an emoji
    with what is joined to it, or any other single mark. Combining marks, variation selectors and other characters
    without a width stay with the character before them; only U+200B, a place to break, stands alone.

    Args:
        ascii_only: a quicker pattern that finds the same words in texts of ASCII characters.
    """
    if ascii_only:
        return re.compile(r"\w+(?:['-]\w+)*|\S")
    letters = rf"[^\W{_IDEOGRAPHS}]+"
    marks = _attached_marks()
    word = rf"{letters}(?:(?:[{_JOINERS}][{marks}]*|[{marks}]+){letters})*[{marks}]*"
    other = rf"\S(?:[{marks}{_SKIN}]|(?<=\u200d)[^\w\s])*"
    return re.compile(f"{word}|{_FLAG}|{other}")


def _attached_marks() -> str:
    """Inside of a character class: marks (categories Mn, Mc, Me) and format characters (Cf)."""
    # Beyond the ranges looked at there are none; to look at all of Unicode would take a second.
    blocks = range(0x300, 0x3100), range(0xA600, 0xAC00), range(0xFB00, 0x20000), range(0xE0000, 0xE0200)
    looked_at = [0xAD, *chain(*blocks)]
    marks = [code for code in looked_at if code != _ZERO_WIDTH_SPACE and _is_attached(chr(code))]
    runs = [list(run) for _, run in groupby(enumerate(marks), lambda pair: pair[1] - pair[0])]  # codes without gaps
    return "".join(f"{chr(run[0][1])}-{chr(run[-1][1])}" for run in runs)


def _is_attached(char: str) -> bool:
    category = unicodedata.category(char)
    return category[0] == "M" or category == "Cf"
