# SPDX-License-Identifier: Apache-2.0
"""Thoughts of reasoning models, which come before an answer and are none of it."""

import re

THOUGHT = r"think|thinking|thought|thoughts|reasoning"
THOUGHT_START = re.compile(rf"<(?:{THOUGHT})>|\[THINK\]")
THOUGHT_END = re.compile(rf"</(?:{THOUGHT})>|\[/THINK\]|<\|channel\|>final<\|message\|>")


def without_thoughts(text: str) -> str:
    """Answer of a reasoning model: the text after its last block of thoughts, empty if the block is not closed.

    Text that begins with an object, in a code block or not, is returned unchanged: its strings may hold these marks.
    """
    if text.lstrip().startswith(("{", "```")):
        return text
    ends = [end.end() for end in THOUGHT_END.finditer(text)]
    return THOUGHT_START.split(text[max(ends, default=0) :])[0]
