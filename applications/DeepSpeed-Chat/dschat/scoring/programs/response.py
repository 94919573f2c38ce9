# SPDX-License-Identifier: Apache-2.0
"""The program in a response."""

import re

# Fenced blocks, each with the first word behind its fence; one that is never closed goes to the end.
BLOCK = re.compile(r"^```[ \t]*([^\s`]*)[^\n]*\n(.*?)(?:^```[ \t]*\r?$|\Z)", re.MULTILINE | re.DOTALL)
PYTHON = re.compile(r"(python|py)?[\d.]*", re.IGNORECASE)


def program_of(response: str) -> str:
    """The first fenced block that names Python or nothing; the whole response where there is none."""
    for tag, block in BLOCK.findall(response):
        if PYTHON.fullmatch(tag):
            return str(block)
    return response
