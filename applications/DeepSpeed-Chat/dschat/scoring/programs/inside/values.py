# SPDX-License-Identifier: Apache-2.0
"""Converts a function's result to JSON, for the parent to compare.

Tuples, generators, ranges, dict views and other iterables become lists, fractions and decimals numbers. A set, which
has no order, becomes an object with the single key `SET` and the list of its elements. Anything else that JSON does
not support becomes an object with the single key `UNKNOWN`, which equals no expected value.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, KeysView, Mapping
from collections.abc import Set as AbstractSet

# No text of a test contains a zero byte.
SET = "\0set"
UNKNOWN = "\0type"


def json_of(value: object) -> bytes:
    """JSON of a value. Raises any exception of the value's own iterators."""
    return json.dumps(plain(value)).encode()


def plain(value: object) -> object:
    """The value as lists, dictionaries, texts, numbers, booleans and None.

    Example:
        >>> plain({"a": (1, 2), "b": range(2), "c": Fraction(1, 2)})
        {'a': [1, 2], 'b': [0, 1], 'c': 0.5}
    """
    if value is None or isinstance(value, str | int | float):
        return value
    if isinstance(value, Mapping):
        return {_key(key): plain(element) for key, element in value.items()}
    if isinstance(value, bytes | bytearray | memoryview):
        return {UNKNOWN: type(value).__name__}
    if isinstance(value, AbstractSet) and not isinstance(value, KeysView):  # keys are ordered
        return {SET: [plain(element) for element in value]}
    if isinstance(value, Iterable):
        return [plain(element) for element in value]
    return _number(value)


def _number(value: object) -> object:
    from decimal import Decimal  # imported late, so that programs without function start sooner
    from fractions import Fraction

    if not isinstance(value, Fraction | Decimal):
        return {UNKNOWN: type(value).__name__}
    is_whole = math.isfinite(value) and value == int(value)
    return int(value) if is_whole else float(value)


def _key(key: object) -> str | int | float | None:
    if key is None or isinstance(key, str | int | float):
        return key
    return str(key)
