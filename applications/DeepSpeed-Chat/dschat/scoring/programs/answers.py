# SPDX-License-Identifier: Apache-2.0
"""Is what a program printed or returned what was expected? Nothing here runs anything of the program."""

from __future__ import annotations

import json
import marshal
import math
import re
from decimal import Decimal

from dschat.scoring.programs.problem import Case, exact_int

TOLERANCE = 1e-6  # absolute, and relative to what is expected
NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d{1,4})?", re.ASCII)


def is_right(case: Case, output: bytes, of_function: bool) -> bool:
    """Whether the output of one test is the expected one.

    Args:
        case: the test.
        output: what was printed, or the JSON of what the function returned.
        of_function: which of the two.
    """
    if not of_function:
        return same_text(output.decode(errors="replace"), str(case.expected))
    # What is much longer than the right answer is not worth reading, which may take long.
    if len(output) > 1000 + 32 * len(marshal.dumps(case.expected)):  # type: ignore[arg-type]
        return False
    try:
        value = json.loads(output, parse_int=exact_int)
        forms = [case.expected]
        if isinstance(case.expected, list) and len(case.expected) == 1:
            forms += case.expected
        return any(same_value(value, form) for form in forms)
    except (ValueError, RecursionError):
        return False


def same_text(text: str, expected: str) -> bool:
    """Equal words between whitespace, floating-point numbers up to a tolerance."""
    wanted = expected.split()
    words = text.split(None, len(wanted))
    return len(words) == len(wanted) and all(map(_same_word, words, wanted))


def same_value(value: object, expected: object) -> bool:
    """Equal values, floating-point numbers up to a tolerance; a list and a tuple are the same."""
    if isinstance(expected, list | tuple):
        if not isinstance(value, list) or len(value) != len(expected):
            return False
        return all(same_value(*pair) for pair in zip(value, expected, strict=True))
    if isinstance(expected, dict):
        expected = {str(key): of_key for key, of_key in expected.items()}
        if not isinstance(value, dict) or value.keys() != expected.keys():
            return False
        return all(same_value(value[key], expected[key]) for key in expected)
    if isinstance(expected, float):
        return isinstance(value, int | float) and not isinstance(value, bool) and _close(value, expected)
    if isinstance(value, float):
        return isinstance(expected, int) and value == expected
    return type(value) in (type(expected), bool, int) and bool(value == expected)


def _same_word(word: str, wanted: str) -> bool:
    """Equal, or numbers: within the tolerance of a fraction, exactly a whole one (3.0 for 3)."""
    if word == wanted:
        return True
    if not NUMBER.fullmatch(word) or not NUMBER.fullmatch(wanted):
        return False
    if any(mark in wanted for mark in ".eE"):
        return _close(float(word), float(wanted))
    return any(mark in word for mark in ".eE") and Decimal(word) == Decimal(wanted)


def _close(number: float, wanted: float) -> bool:
    try:
        return math.isfinite(wanted) and math.isclose(number, wanted, rel_tol=TOLERANCE, abs_tol=TOLERANCE)
    except OverflowError:  # a whole number beyond the largest float
        return False
