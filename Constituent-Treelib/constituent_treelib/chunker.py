# SPDX-License-Identifier: Apache-2.0
"""The built-in parser: sentences of a text, and clauses, chunks and words from marks and function words.

It needs no model and no library, accepts every string that is not blank, and takes microseconds. A tree is sentence >
clause > chunk > word. A clause begins after the marks , ; : . ! ? and before conjunctions and complementisers; a chunk
begins before prepositions, determiners, auxiliaries and opening brackets, and after pronouns. A chunk that begins with
a function word continues at least to the next content word: "over the lazy dog" is one chunk. The marks that end a
clause belong to the clause, after its last chunk; opening brackets and quotes belong to what they enclose. It knows no
abbreviations: "Dr. Smith" is two sentences.
"""

import re
import unicodedata
from collections.abc import Sequence
from functools import cache
from itertools import chain
from typing import Literal

from constituent_treelib.trees import Tree

CHUNKED = "S"  # label of a sentence's tree
# Kinds of words and marks. A word in no list is a content word; a mark's kind may depend on the characters around it.
Kind = Literal["content", "opener", "pronoun", "conjunction", "opening", "closing", "stop", "wide stop", "quote"]
# State of a clause. start: only conjunctions and brackets so far; word: after a content word; open: after a word or
# bracket that needs another word; pronoun: after a pronoun; ended: after the mark that ends it.
State = Literal["start", "word", "open", "pronoun", "ended"]
_STATE_AFTER: dict[Kind, State] = {"content": "word", "opener": "open", "pronoun": "pronoun", "conjunction": "start"}
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
_ACRONYMS = {"am", "it", "us", "who"}  # in capitals they are names or nouns: IT, US, WHO
_INNER_MARKS = ".?/@=&"  # directly before a word they join it to what stands before: www.who.int, and/or
_MARKS: dict[str, Kind] = {
    ",;:.!?": "stop",
    "…、。，．：；！？،؛؟।॥": "wide stop",
    "([{“‘«‹「『（［｛【〈《": "opening",
    ")]}”’»›」』）］｝】〉》": "closing",
    "\"'": "quote",
}
# A sentence ends after . ! or ? (with closing quotes and brackets) where blanks follow, and at every line break.
_BREAK = re.compile(r"[.!?][\"'”’)\]]*(\s+)|(\r\n|[\n\r\v\f\x1c-\x1e\x85\u2028\u2029])")
# East Asian scripts without blanks between words: every character is a word. Hangul has blanks.
_IDEOGRAPHS = (
    r"\u2e80-\u2fdf\u3005-\u3007\u3021-\u3035\u3040-\u312f\u31a0-\u31ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
    r"\uff66-\uff9f\U0001b000-\U0001b16f\U00020000-\U0003ffff"
)
_JOINERS = r"'’\u2010\u2011-"
_FLAG = r"[\U0001f1e6-\U0001f1ff]{2}"
_SKIN = r"\U0001f3fb-\U0001f3ff"
_ZERO_WIDTH_SPACE = 0x200B


def _kinds() -> dict[str, Kind]:
    """Kinds of function words, in the spellings the, The and THE, and of marks; all other words are content words."""
    words: dict[str, Kind] = dict.fromkeys(_OPENERS.split(), "opener")
    words |= dict.fromkeys(_CONJUNCTIONS.split(), "conjunction")
    words |= dict.fromkeys(_PRONOUNS.split(), "pronoun")
    for pronoun in _PERSONAL.split():
        for contraction in _CONTRACTIONS.split():
            words[pronoun + contraction] = "pronoun"
    words |= {word.replace("'", "’"): kind for word, kind in words.items()}

    kinds: dict[str, Kind] = dict(words)
    for word, kind in words.items():
        kinds[word.capitalize()] = kind
        if word not in _ACRONYMS:
            kinds[word.upper()] = kind
    for marks, kind in _MARKS.items():
        for mark in marks:
            kinds[mark] = kind
    return kinds


_KINDS = _kinds()


class Chunker:
    """The built-in backend; it also parses what another backend could not."""

    name = "chunker"
    version = "3"  # changes when a sentence gets another tree
    unit: Literal["sentence"] = "sentence"

    def parse(self, units: Sequence[str]) -> list[Tree | None]:
        """A tree per sentence, None for a blank one."""
        trees: list[Tree | None] = []
        for unit in units:
            trees.append(chunk_sentence(unit, 0, len(unit)) if unit.strip() else None)
        return trees


def chunk_sentence(text: str, start: int, end: int) -> Tree:
    """Parses the sentence text[start:end], which must not be blank; positions refer to the whole text."""
    clauses: list[Tree] = []
    parts: list[Tree] = []  # of the current clause: chunks and the marks after them
    words: list[Tree] = []  # of the current chunk
    openings = 0  # number of opening marks at the end of the current chunk
    state: State = "start"
    last = start  # end of the last word

    def end_chunk() -> None:
        if words:
            parts.append(Tree("CHUNK", words[0].start, words[-1].end, tuple(words)))
            words.clear()

    def end_clause() -> None:
        end_chunk()
        clauses.append(Tree("CLAUSE", parts[0].start, parts[-1].end, tuple(parts)))
        parts.clear()

    for match in word_pattern(text.isascii()).finditer(text, start, end):
        word_start, word_end = match.span()
        attached = word_start == last and state != "start"
        next_char = text[word_end : min(word_end + 1, end)]
        kind = _kind_of(match[0], state, text[last - 1] if attached else "", next_char)
        closes_clause = state == "ended" and kind == "closing" and word_start == last
        if kind == "stop" or closes_clause:
            end_chunk()
            parts.append(Tree("", word_start, word_end))
            state = "ended"
            last = word_end
            openings = 0
            continue
        begins = _begins(kind, state)
        if begins == "clause":
            enclosing = words[len(words) - openings :]  # opening marks before a conjunction go with it
            del words[len(words) - openings :]
            end_clause()
            words.extend(enclosing)
        elif begins == "chunk":
            end_chunk()
        state = _next_state(kind, state)
        words.append(Tree("", word_start, word_end))
        openings = openings + 1 if kind == "opening" else 0
        last = word_end
    end_clause()
    return Tree(CHUNKED, clauses[0].start, clauses[-1].end, tuple(clauses))


def _kind_of(word: str, state: State, before: str, next_char: str) -> Kind:
    """The kind of a word or mark at its place.

    Args:
        word: a word or mark.
        state: of the clause before it.
        before: the character that it directly follows; empty after a blank and at the start of a clause.
        next_char: the character after it; empty at the end.
    """
    kind = _KINDS.get(word, "content")
    if kind == "quote":
        return "closing" if before and _KINDS.get(before) != "opening" else "opening"
    if kind == "wide stop":
        return "stop"
    if kind == "stop":
        follows_stop = bool(before) and state == "ended"
        is_inner = next_char.isalnum() and next_char.isascii()  # 3.14, example.com
        return "content" if is_inner and not follows_stop else "stop"
    if before and before in _INNER_MARKS and state != "ended":
        return "content"
    return kind


def _begins(kind: Kind, state: State) -> Literal["clause", "chunk", "nothing"]:
    """Which constituent a word or mark begins, given the state of the clause before it."""
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
    """State of the clause after a word or mark."""
    if kind in _STATE_AFTER:
        return _STATE_AFTER[kind]
    if state in ("start", "ended"):  # a bracket or quotation mark before the first word
        return "start"
    if kind == "opening":
        return "open"
    return "word" if state == "open" else state


def sentence_spans(text: str) -> list[tuple[int, int]]:
    """(start, end) of the sentences in characters: in order, without blanks at either end, none of them empty."""
    breaks = [match.span(match.lastindex or 0) for match in _BREAK.finditer(text)]
    breaks.append((len(text), len(text)))
    spans = []
    start = 0
    for break_start, break_end in breaks:
        sentence = text[start:break_start].strip()
        if sentence:
            first = text.index(sentence, start)
            spans.append((first, first + len(sentence)))
        start = break_end
    return spans


@cache
def word_pattern(ascii_only: bool = False) -> re.Pattern[str]:
    """A pattern that matches one word after another; every visible character of a text belongs to exactly one.

    A word is a run of letters and digits with single apostrophes and hyphens inside, an ideograph, a flag, an emoji
    with the characters joined to it, or any other single mark. Combining marks, variation selectors and other
    zero-width characters belong to the character before them; only U+200B, the zero-width space, is a word alone.

    Args:
        ascii_only: a faster pattern with the same matches in texts of ASCII characters.
    """
    if ascii_only:
        return re.compile(r"\w+(?:['-]\w+)*|\S")
    letters = rf"[^\W{_IDEOGRAPHS}]+"
    marks = _attached_marks()
    word = rf"{letters}(?:(?:[{_JOINERS}][{marks}]*|[{marks}]+){letters})*[{marks}]*"
    other = rf"\S(?:[{marks}{_SKIN}]|(?<=\u200d)[^\w\s])*"
    return re.compile(f"{word}|{_FLAG}|{other}")


def _attached_marks() -> str:
    """Content of a character class: marks (categories Mn, Mc, Me) and format characters (Cf)."""
    # There are none outside these ranges; searching all of Unicode would take a second.
    blocks = range(0x300, 0x3100), range(0xA600, 0xAC00), range(0xFB00, 0x20000), range(0xE0000, 0xE0200)
    codes = [0xAD, *chain(*blocks)]
    runs: list[tuple[int, int]] = []  # first and last of successive codes
    for code in codes:
        if code == _ZERO_WIDTH_SPACE or not _is_attached(chr(code)):
            continue
        if runs and code == runs[-1][1] + 1:
            runs[-1] = (runs[-1][0], code)
        else:
            runs.append((code, code))
    return "".join(f"{chr(first)}-{chr(last)}" for first, last in runs)


def _is_attached(char: str) -> bool:
    category = unicodedata.category(char)
    return category[0] == "M" or category == "Cf"
