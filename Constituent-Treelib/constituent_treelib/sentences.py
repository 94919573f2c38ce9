# SPDX-License-Identifier: Apache-2.0
"""Where the sentences of a text are."""

import re

# A sentence ends after . ! or ? (with closing quotes and brackets) where blanks follow, and at every line break.
_BREAK = re.compile(r"[.!?][\"'”’)\]]*(\s+)|(\r\n|[\n\r\v\f\x1c-\x1e\x85\u2028\u2029])")


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
