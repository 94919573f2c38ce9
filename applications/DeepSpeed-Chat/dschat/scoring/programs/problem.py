# SPDX-License-Identifier: Apache-2.0
"""Tests in the form of APPS's column `input_output`: what goes into a sandbox, and whether the right thing came out.

The column holds `inputs` and `outputs`, lists of equal length, and for functions `fn_name`; or a list of such objects,
one for each function of the program. Its quirks: texts may be
lists of lines; a call's result may stand in a list of its own; tuples are lists; keys of objects are always texts, so
that an argument whose keys are all whole numbers gets these; integers may have thousands of digits. Nothing here runs
anything of a program.
"""

from __future__ import annotations

import json
import marshal
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal

from dschat.base.errors import UserError
from dschat.scoring.programs.inside.values import SET

CHUNK = 4000  # digits that Python converts at once
MAX_DIGITS = 100_000
WHOLE = re.compile(r"-?\d{1,4000}")
NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d{1,4})?", re.ASCII)
TOLERANCE = 1e-6  # of a printed or returned number: absolute, and relative to what is expected


@dataclass(frozen=True)
class Case:
    """One test; `expected` never enters a sandbox."""

    text: str  # on standard input
    function: str | None  # to call; None for a program that reads standard input and prints
    arguments: tuple[object, ...]  # of the function
    expected: object  # a text, or a value as JSON knows them


@dataclass(frozen=True)
class Problem:
    """The tests of a problem."""

    cases: tuple[Case, ...]


def parse_problem(tests: str | Mapping[str, object] | list[object], origin: str, most: int | None = None) -> Problem:
    """Reads a column `input_output`.

    Args:
        tests: its JSON text, or what that holds.
        origin: of the row, for messages.
        most: only so many tests, the first; of several functions, of each.

    Returns:
        The problem; without cases where the column is empty.

    Raises:
        UserError: it holds something else; names the row.
    """
    content = _decode(tests, origin) if isinstance(tests, str) else tests
    if isinstance(content, list) and content:
        cases = tuple(case for one in content for case in parse_problem(_object(one, origin), origin, most).cases)
        return Problem(cases)
    if not content:
        return Problem(())
    known = content if isinstance(content, Mapping) else {}
    inputs, outputs = known.get("inputs"), known.get("outputs")
    if not isinstance(inputs, list) or not isinstance(outputs, list) or len(inputs) != len(outputs):
        raise UserError(
            f"{origin}: column 'input_output' must hold lists `inputs` and `outputs` of equal length; correct the row."
        )
    function = known.get("fn_name") or None
    pairs = list(zip(inputs, outputs, strict=True))[:most]
    if function is None:
        return Problem(tuple(Case(_text(given), None, (), _text(wanted)) for given, wanted in pairs))
    if not all(isinstance(given, list) for given, _ in pairs):
        raise UserError(f"{origin}: inputs of the function {function} must be lists of arguments; correct the row.")
    return Problem(tuple(Case("", str(function), _arguments(given, origin), wanted) for given, wanted in pairs))


def _object(content: object, origin: str) -> Mapping[str, object]:
    if not isinstance(content, Mapping):
        raise UserError(f"{origin}: column 'input_output' holds a list, but not of objects; correct the row.")
    return content


def exact_int(digits: str) -> int:
    """A whole number of up to 100,000 digits, of which Python converts 4,300 at once; raises ValueError beyond."""
    if len(digits) <= CHUNK:
        return int(digits)
    if len(digits) > MAX_DIGITS:
        raise ValueError(f"a number of {len(digits):,} digits")
    sign, digits = (-1, digits[1:]) if digits[0] == "-" else (1, digits)
    value = 0
    for start in range(0, len(digits), CHUNK):
        chunk = digits[start : start + CHUNK]
        value = value * 10 ** len(chunk) + int(chunk)
    return sign * value


def _decode(text: str, origin: str) -> object:
    """What the column holds; integers stay text where they are only to be read and printed."""
    if not text.strip():
        return None
    try:
        return json.loads(text, parse_int=exact_int if '"fn_name"' in text else str)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{origin}: column 'input_output' holds no valid JSON ({error}); correct the row.") from error


def _text(value: object) -> str:
    """Standard input or output: a text, or its lines."""
    if isinstance(value, list | tuple):
        return "\n".join(map(_text, value))
    return f"{Decimal(value):f}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def _arguments(given: Sequence[object], origin: str) -> tuple[object, ...]:
    arguments = tuple(_with_whole_keys(argument) for argument in given)
    try:
        marshal.dumps(arguments)  # type: ignore[arg-type]  # as they enter a sandbox, where that is possible
    except ValueError as error:
        raise UserError(f"{origin}: the arguments in column 'input_output' cannot be handed on: {error}.") from error
    return arguments


def _with_whole_keys(value: object) -> object:
    if isinstance(value, dict) and value and all(isinstance(key, str) and WHOLE.fullmatch(key) for key in value):
        return {int(key): of_key for key, of_key in value.items()}
    return value


def is_right(case: Case, output: bytes) -> bool:
    """Whether the output of one test is the expected one.

    Args:
        case: the test.
        output: what was printed, or the JSON of what the function returned.
    """
    if case.function is None:
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
    """Equal values, floating-point numbers up to a tolerance; a list and a tuple are the same.

    Args:
        value: what a function returned, as `dschat.scoring.programs.inside.values.plain` hands it out. A set equals a
            list of its elements in any order.
        expected: as JSON knows it.
    """
    if isinstance(expected, list | tuple):
        if isinstance(value, dict) and value.keys() == {SET}:
            return same_value(_in_order(value[SET]), _in_order(expected))
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


def _in_order(elements: object) -> object:
    """The elements of a set, sorted: numbers by size, then everything else by its JSON."""
    if not isinstance(elements, list | tuple):
        return elements

    def place(element: object) -> tuple[bool, int | float, str]:
        if isinstance(element, int | float):
            return False, element, ""
        return True, 0, json.dumps(element, sort_keys=True)

    return sorted(elements, key=place)


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
