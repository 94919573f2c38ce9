# SPDX-License-Identifier: Apache-2.0
"""The built-in parser: sentences of a text, and words, chunks and clauses of each, from marks and function words.

It needs no model and no library, is defined on every string that is not blank, and takes microseconds. A tree is
sentence > clause > chunk > word. A clause begins after the marks , ; : . ! ? and before conjunctions and
complementisers; a chunk begins before prepositions, determiners, auxiliaries and opening brackets, and after pronouns.
What begins with a function word goes on at least to the next word: "over the lazy dog" is one chunk. The marks that
end a clause stand in the clause, behind its last chunk.
"""

import re
import unicodedata
from collections.abc import Sequence
from functools import cache
from itertools import chain, groupby
from typing import Literal

from constituent_treelib.trees import Tree

CHUNKED = "S"  # label of a sentence's tree
# What a word or mark is. A word in no list has content; a mark's kind may depend on what stands around it.
Kind = Literal["content", "opener", "pronoun", "conjunction", "opening", "closing", "stop", "wide stop", "quote"]
# How far a clause is: at its start, where only conjunctions and brackets stand; behind a word with content; behind a
# word or bracket that wants another word; behind a pronoun; behind the mark that ends it.
State = Literal["start", "word", "goes on", "pronoun", "ended"]
_STATE_AFTER: dict[Kind, State] = {
    "content": "word",
    "opener": "goes on",
    "pronoun": "pronoun",
    "conjunction": "start",
}
_PERSONAL = "i you he she it we they"
_PRONOUNS = f"{_PERSONAL} me him us them myself yourself himself herself itself ourselves yourselves themselves"
_OPENERS = """
    about above across after against along amid among around as at before behind below beneath beside besides between
    beyond by despite down during except for from in inside into like near of off on onto out outside over past per
    through throughout to toward towards under underneath up upon via with within without
    a an the this these those my your his her its our their some any no every each all both either neither another
    am is are was were be been being has have had having do does did
    will would shall should can cannot could may might must
    isn't aren't wasn't weren't hasn't haven't hadn't don't doesn't didn't
    won't wouldn't shan't shouldn't can't couldn't mustn't ain't
"""
_CONJUNCTIONS = """
    and or but nor so yet because although though while whereas if unless until till since when whenever where wherever
    that which who whom whose what whether why how lest
"""
_CONTRACTIONS = "'m 're 's 've 'll 'd"
_MARKS: dict[str, Kind] = {
    ",;:.!?": "stop",
    "…、。，．：；！？،؛؟।॥": "wide stop",
    "([{“‘«‹「『（［｛【〈《": "opening",
    ")]}”’»›」』）］｝】〉》": "closing",
    "\"'": "quote",
}
# A sentence ends after . ! or ? (with closing quotes and brackets) where blanks follow, and at every line break.
_BREAK = re.compile(r"[.!?][\"'”’)\]]*(\s+)|(\r\n|[\n\r\v\f\x1c-\x1e\x85\u2028\u2029])")
# Scripts of the Far East that put no blanks between words: every character is a word. Hangul has blanks.
_IDEOGRAPHS = (
    r"\u2e80-\u2fdf\u3005-\u3007\u3021-\u3035\u3040-\u312f\u31a0-\u31ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
    r"\uff66-\uff9f\U0001b000-\U0001b16f\U00020000-\U0003ffff"
)
_JOINERS = r"'’\u2010\u2011-"
_FLAG = r"[\U0001f1e6-\U0001f1ff]{2}"
_SKIN = r"\U0001f3fb-\U0001f3ff"
_ZERO_WIDTH_SPACE = 0x200B


def _kinds() -> dict[str, Kind]:
    """Word or mark → kind, words in the spellings the, The and THE; what is not in it has content."""
    words: dict[str, Kind] = dict.fromkeys(_OPENERS.split(), "opener")
    words |= dict.fromkeys(_CONJUNCTIONS.split(), "conjunction")
    words |= dict.fromkeys(_PRONOUNS.split(), "pronoun")
    words |= {word + rest: "pronoun" for word in _PERSONAL.split() for rest in _CONTRACTIONS.split()}
    words |= {word.replace("'", "’"): kind for word, kind in words.items()}
    words |= {spelt: kind for word, kind in words.items() for spelt in (word.capitalize(), word.upper())}
    return words | {mark: kind for marks, kind in _MARKS.items() for mark in marks}


_KINDS = _kinds()


class Chunker:
    """The built-in backend, chosen by name or for what another backend could not parse."""

    name = "chunker"
    version = "1"
    unit: Literal["sentence"] = "sentence"

    def parse(self, units: Sequence[str]) -> list[Tree | None]:
        """A tree per sentence; None for a blank one."""
        return [None if not unit or unit.isspace() else chunk_sentence(unit, 0, len(unit)) for unit in units]


def chunk_sentence(text: str, start: int, end: int) -> Tree:
    """The chunker's tree of the sentence text[start:end], which is not blank; positions count in the whole text."""
    clauses: list[Tree] = []
    parts: list[Tree] = []  # of the clause: chunks and the marks behind them
    words: list[Tree] = []  # of the chunk
    state: State = "start"
    last = start  # the character after the last word

    def end_chunk() -> None:
        if words:
            parts.append(Tree("CHUNK", words[0].start, last, tuple(words)))
            words.clear()

    def end_clause() -> None:
        end_chunk()
        clauses.append(Tree("CLAUSE", parts[0].start, last, tuple(parts)))
        parts.clear()

    for found in word_pattern(text.isascii()).finditer(text, start, end):
        first, stop = found.span()
        kind = _KINDS.get(found[0], "content")
        attached = first == last and state != "start"
        if kind in ("stop", "wide stop", "quote"):
            kind = _kind_of_mark(kind, attached, text[stop : min(stop + 1, end)])
        if kind == "stop" or (state == "ended" and kind == "closing" and first == last):
            end_chunk()
            parts.append(Tree("", first, stop))
            state, last = "ended", stop
            continue
        begins = _begins(kind, state)
        if begins == "clause":
            end_clause()
        elif begins == "chunk":
            end_chunk()
        state = _next_state(kind, state)
        words.append(Tree("", first, stop))
        last = stop
    end_clause()
    return Tree(CHUNKED, clauses[0].start, last, tuple(clauses))


def _kind_of_mark(kind: Kind, attached: bool, follows: str) -> Kind:
    """A stop or quotation mark as it is used: right behind a word or not, and before which character, if any."""
    if kind == "quote":
        return "closing" if attached else "opening"
    if kind == "stop" and follows.isalnum() and follows.isascii():  # 3.14, example.com
        return "content"
    return "stop"


def _begins(kind: Kind, state: State) -> Literal["clause", "chunk", "nothing"]:
    """What begins with a word or mark, given how far the clause before it is."""
    if state == "ended":
        return "clause"
    if state == "start" or kind == "closing":
        return "nothing"
    if kind == "conjunction":
        return "clause"
    if state == "pronoun" or (state == "word" and kind in ("opener", "opening")):
        return "chunk"
    return "nothing"


def _next_state(kind: Kind, state: State) -> State:
    """How far the clause is behind a word or mark."""
    if kind in _STATE_AFTER:
        return _STATE_AFTER[kind]
    if state in ("start", "ended"):  # a bracket or quotation mark before the first word
        return "start"
    if kind == "opening":
        return "goes on"
    return "word" if state == "goes on" else state


def sentence_spans(text: str) -> list[tuple[int, int]]:
    """Sentences as (start, end) in characters: in order, without blanks at either end, none of them empty."""
    breaks = [found.span(found.lastindex or 0) for found in _BREAK.finditer(text)]
    starts, ends = [0, *(end for _, end in breaks)], [*(start for start, _ in breaks), len(text)]
    spans = []
    for start, end in zip(starts, ends, strict=True):
        sentence = text[start:end].strip()
        if sentence:
            first = text.index(sentence, start)
            spans.append((first, first + len(sentence)))
    return spans


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
