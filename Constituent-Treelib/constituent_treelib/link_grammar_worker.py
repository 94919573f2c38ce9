# SPDX-License-Identifier: Apache-2.0
"""The process in which link-grammar runs: it may hang, or abort, without harm to who asked.

It reads one JSON value per line, a sentence, and answers each with a line: `{"words": [[start, end], …], "tree":
"(S …)"}`, positions in characters, or null. Its first line is `{"version": …}` or `{"error": …}`. It ends with its
input, or when a sentence takes a second longer than the limit. The file is run by its path and imports nothing but the
standard library.

    python link_grammar_worker.py LANGUAGE SECONDS
"""

import ctypes
import ctypes.util
import json
import os
import signal
import sys

LINKAGE_LIMIT = 100
_SINGLE_LINE = 3  # of linkage_print_constituent_tree
_pointer, _int, _size, _text = ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t, ctypes.c_char_p
_FUNCTIONS = {  # name: (result, arguments)
    "linkgrammar_get_version": (_text, []),
    "dictionary_create_lang": (_pointer, [_text]),
    "parse_options_create": (_pointer, []),
    "parse_options_set_verbosity": (None, [_pointer, _int]),
    "parse_options_set_linkage_limit": (None, [_pointer, _int]),
    "parse_options_set_min_null_count": (None, [_pointer, _int]),
    "parse_options_set_max_null_count": (None, [_pointer, _int]),
    "sentence_create": (_pointer, [_text, _pointer]),
    "sentence_split": (_int, [_pointer, _pointer]),
    "sentence_length": (_int, [_pointer]),
    "sentence_parse": (_int, [_pointer, _pointer]),
    "sentence_num_valid_linkages": (_int, [_pointer]),
    "sentence_delete": (None, [_pointer]),
    "linkage_create": (_pointer, [_size, _pointer, _pointer]),
    "linkage_delete": (None, [_pointer]),
    "linkage_get_num_words": (_size, [_pointer]),
    "linkage_get_word": (_text, [_pointer, _size]),
    "linkage_get_word_byte_start": (_size, [_pointer, _size]),
    "linkage_get_word_byte_end": (_size, [_pointer, _size]),
    "linkage_print_constituent_tree": (_pointer, [_pointer, _int]),
    "linkage_free_constituent_tree_str": (None, [_pointer]),
}


class Parser:
    """link-grammar's dictionary and options."""

    def __init__(self, language: str) -> None:
        self._lib = ctypes.CDLL(ctypes.util.find_library("link-grammar") or "liblink-grammar.so.5")
        for name, (result, arguments) in _FUNCTIONS.items():
            function = getattr(self._lib, name)
            function.restype, function.argtypes = result, arguments
        self.version = self._lib.linkgrammar_get_version().decode().removeprefix("link-grammar-")
        self._dictionary = self._lib.dictionary_create_lang(language.encode())
        if not self._dictionary:
            raise OSError(f"there is no dictionary of the language {language!r}")
        self._options = self._lib.parse_options_create()
        self._lib.parse_options_set_verbosity(self._options, 0)
        self._lib.parse_options_set_linkage_limit(self._options, LINKAGE_LIMIT)

    def parse(self, sentence: str) -> dict | None:
        """Words and tree of a sentence; None where there are none."""
        content = sentence.encode("utf-8")
        handle = self._lib.sentence_create(content, self._dictionary)
        try:
            return self._best_linkage(handle, content) if self._has_linkages(handle) else None
        except UnicodeDecodeError:  # a word that begins or ends inside of a character
            return None
        finally:
            self._lib.sentence_delete(handle)

    def _has_linkages(self, handle: int) -> bool:
        """Parses, at first with every word linked, then with as few left out as possible."""
        if self._lib.sentence_split(handle, self._options) < 0:
            return False
        for least, most in ((0, 0), (1, self._lib.sentence_length(handle))):
            self._lib.parse_options_set_min_null_count(self._options, least)
            self._lib.parse_options_set_max_null_count(self._options, most)
            if self._lib.sentence_parse(handle, self._options) > 0:
                return self._lib.sentence_num_valid_linkages(handle) > 0
        return False

    def _best_linkage(self, handle: int, content: bytes) -> dict | None:
        linkage = self._lib.linkage_create(0, handle, self._options)
        if not linkage:
            return None
        try:
            words = []
            for index in range(self._lib.linkage_get_num_words(linkage)):
                start = self._lib.linkage_get_word_byte_start(linkage, index)
                end = self._lib.linkage_get_word_byte_end(linkage, index)
                if start < end:  # not so of the walls, at the beginning and the end
                    words.append([len(content[:start].decode("utf-8")), len(content[:end].decode("utf-8"))])
            found = self._lib.linkage_print_constituent_tree(linkage, _SINGLE_LINE)
            if not found:
                return None
            tree = ctypes.string_at(found).decode("utf-8", "replace")
            self._lib.linkage_free_constituent_tree_str(found)
            return {"words": words, "tree": tree}
        finally:
            self._lib.linkage_delete(linkage)


def main(language: str, seconds: float) -> None:
    """Answers until the input ends."""
    for number in (signal.SIGINT, signal.SIGTERM):  # these are for the one who asks, and who wants the answer still
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # ends the process, wherever it is, if nobody else does
    # The library may write to the standard output; answers go where it does not know of.
    answers = os.fdopen(os.dup(1), "w", encoding="ascii", buffering=1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    try:
        parser = Parser(language)
    except (OSError, AttributeError) as error:
        print(json.dumps({"error": str(error)}), file=answers)
        return
    print(json.dumps({"version": parser.version}), file=answers)
    for line in sys.stdin.buffer:
        signal.setitimer(signal.ITIMER_REAL, seconds + 1)
        answer = parser.parse(json.loads(line))
        signal.setitimer(signal.ITIMER_REAL, 0)
        print(json.dumps(answer), file=answers)


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]))
