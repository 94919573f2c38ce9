# SPDX-License-Identifier: Apache-2.0
"""Tests in the form of APPS's column `input_output`: inputs of a program, and whether its output is right.

The column has `inputs` and `outputs`, lists of equal length, and for functions `fn_name`; or it is a list of such
objects, one for each function of the program. Its quirks:

- texts may be lists of lines;
- the result of a call may be wrapped in a list;
- tuples are lists;
- keys of objects are texts, so an argument whose keys are all whole numbers gets integer keys;
- integers may have thousands of digits.

Nothing here runs any part of a program.
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

MAX_DIGITS = 100_000
WHOLE = re.compile(r"-?\d{1,4000}")
# Digits match in one way only: otherwise a printed text of a million digits would take hours to refuse.
NUMBER = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d{1,4})?", re.ASCII)
TOLERANCE = 1e-6  # for a printed or returned number: absolute, and relative to the expected number


@dataclass(frozen=True)
class Case:
    """One test; `expected` never enters a sandbox."""

    text: str  # on standard input
    function: str | None  # function to call; None for a program that reads standard input and prints
    arguments: tuple[object, ...]  # of the function
    expected: object  # a text, or a JSON value


@dataclass(frozen=True)
class Problem:
    """The tests of a problem."""

    cases: tuple[Case, ...]


def parse_problem(tests: str | Mapping[str, object] | list[object], origin: str, most: int | None = None) -> Problem:
    """Parses a column `input_output`.

    Args:
        tests: its JSON text, or the decoded content.
        origin: origin of the row, for messages.
        most: maximum number of tests, of each function; the first ones are taken.

    Returns:
        The problem; without cases if the column is empty.

    Raises:
        UserError: it has another form; the message names the row.
    """
    content = _decode(tests, origin) if isinstance(tests, str) else tests
    if not content:
        return Problem(())
    if not isinstance(content, list):
        return Problem(tuple(_cases(content, origin, most)))
    cases: list[Case] = []
    for function_tests in content:
        if not isinstance(function_tests, Mapping):
            raise UserError(f"{origin}: column 'input_output' holds a list, but not of objects; correct the row.")
        if function_tests:
            cases += _cases(function_tests, origin, most)
    return Problem(tuple(cases))


def _cases(content: object, origin: str, most: int | None) -> list[Case]:
    """The tests of one function or program."""
    columns = content if isinstance(content, Mapping) else {}
    inputs = columns.get("inputs")
    outputs = columns.get("outputs")
    if not isinstance(inputs, list) or not isinstance(outputs, list) or len(inputs) != len(outputs):
        raise UserError(
            f"{origin}: column 'input_output' must hold lists `inputs` and `outputs` of equal length; correct the row."
        )
    function = columns.get("fn_name") or None
    cases: list[Case] = []
    for case_input, output in list(zip(inputs, outputs, strict=True))[:most]:
        if function is None:
            cases.append(Case(_text(case_input), None, (), _text(output)))
        elif isinstance(case_input, list):
            cases.append(Case("", str(function), _arguments(case_input, origin), output))
        else:
            raise UserError(
                f"{origin}: inputs of the function {function} must be lists of arguments; correct the row."
            )
    return cases


def exact_int(digits: str) -> int:
    """Converts an integer of up to MAX_DIGITS digits, more than `int` takes; raises ValueError for more digits."""
    if len(digits) > MAX_DIGITS:
        raise ValueError(f"a number of {len(digits):,} digits")
    return int(Decimal(digits))


def _decode(text: str, origin: str) -> object:
    """Decodes the column; integers of programs without function, which read and print texts, become texts."""
    if not text.strip():
        return None
    parse_int = exact_int if '"fn_name"' in text else str
    try:
        return json.loads(text, parse_int=parse_int)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{origin}: column 'input_output' is not valid JSON ({error}); correct the row.") from error


def _text(value: object) -> str:
    """Standard input or output from a text or a list of lines."""
    if isinstance(value, list | tuple):
        return "\n".join(map(_text, value))
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{Decimal(value):f}"
    return str(value)


def _arguments(values: Sequence[object], origin: str) -> tuple[object, ...]:
    arguments = tuple(map(_with_integer_keys, values))
    try:
        marshal.dumps(arguments)  # type: ignore[arg-type]  # the format in which they enter a sandbox
    except ValueError as error:
        raise UserError(f"{origin}: the arguments in column 'input_output' cannot be handed on: {error}.") from error
    return arguments


def _with_integer_keys(value: object) -> object:
    """Converts the keys of a dictionary to integers if all of them are whole numbers."""
    if not isinstance(value, dict) or not value:
        return value
    if not all(isinstance(key, str) and WHOLE.fullmatch(key) for key in value):
        return value
    return {int(key): element for key, element in value.items()}


def is_right(case: Case, output: bytes) -> bool:
    """Whether the output of one test is the expected one.

    Args:
        case: the test.
        output: printed text, or the JSON of the function's result.
    """
    if case.function is None:
        return same_text(output.decode(errors="replace"), str(case.expected))
    # A result that is much longer than the expected one is wrong, and might take long to parse.
    if len(output) > 1000 + 32 * len(marshal.dumps(case.expected)):  # type: ignore[arg-type]
        return False
    try:
        value = json.loads(output, parse_int=exact_int)
        expected_values = [case.expected]
        if isinstance(case.expected, list) and len(case.expected) == 1:
            expected_values += case.expected
        return any(same_value(value, expected) for expected in expected_values)
    except (ValueError, RecursionError):
        return False


def same_text(text: str, expected: str) -> bool:
    """Whether texts have equal words, with a tolerance for floating-point numbers."""
    expected_words = expected.split()
    words = text.split(None, len(expected_words))
    return len(words) == len(expected_words) and all(map(_same_word, words, expected_words))


def same_value(value: object, expected: object) -> bool:
    """Whether values are equal, with a tolerance for floating-point numbers; lists and tuples are the same.

    Args:
        value: a function's result, converted by `dschat.programs.inside.values.plain`.
        expected: a JSON value. It alone determines how the two are compared.
    """
    if isinstance(expected, list | tuple):
        if not isinstance(value, list) or len(value) != len(expected):
            return False
        return all(map(same_value, value, expected))
    if isinstance(expected, dict):
        expected = {str(key): element for key, element in expected.items()}
        if not isinstance(value, dict) or value.keys() != expected.keys():
            return False
        return all(same_value(value[key], expected[key]) for key in expected)
    if isinstance(expected, float):
        return isinstance(value, int | float) and not isinstance(value, bool) and _close(value, expected)
    if isinstance(value, float):
        return isinstance(expected, int) and value == expected
    return type(value) in (type(expected), bool, int) and bool(value == expected)


def _same_word(word: str, expected: str) -> bool:
    """Whether words are equal or equal numbers: fractions within the tolerance, whole numbers exactly (3.0 for 3)."""
    if word == expected:
        return True
    if not NUMBER.fullmatch(word) or not NUMBER.fullmatch(expected):
        return False
    if any(mark in expected for mark in ".eE"):
        return _close(float(word), float(expected))
    return any(mark in word for mark in ".eE") and Decimal(word) == Decimal(expected)


def _close(number: float, expected: float) -> bool:
    try:
        return math.isfinite(expected) and math.isclose(number, expected, rel_tol=TOLERANCE, abs_tol=TOLERANCE)
    except OverflowError:  # an integer beyond the largest float
        return False
