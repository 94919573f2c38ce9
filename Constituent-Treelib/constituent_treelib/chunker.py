# SPDX-License-Identifier: Apache-2.0
"""The built-in parser: words, chunks and clauses of a sentence, found from marks and English function words.

It needs no model and no library, is defined on every string that is not blank, and takes microseconds. A tree is
sentence > clause > chunk > word. A clause begins after the marks , ; : . ! ? and before conjunctions and
complementisers; a chunk begins before prepositions, determiners, auxiliaries and opening brackets, and after pronouns.
What begins with a function word goes on at least to the next word: "over the lazy dog" is one chunk. The marks that
end a clause stand in the clause, behind its last chunk.
"""

from collections.abc import Sequence
from typing import Literal

from constituent_treelib.trees import Tree
from constituent_treelib.words import word_pattern

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
