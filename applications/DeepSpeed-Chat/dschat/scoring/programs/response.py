# SPDX-License-Identifier: Apache-2.0
"""The program in a response."""

import re

# A fenced block that names Python or nothing; one that is never closed goes to the end.
BLOCK = re.compile(r"^```[ \t]*(?:python3?|py)?[ \t]*\r?\n(.*?)(?:^```|\Z)", re.MULTILINE | re.DOTALL | re.IGNORECASE)


def program_of(response: str) -> str:
    """The first fenced block of a response; the whole response where there is none."""
    found = BLOCK.search(response)
    return found[1] if found else response
