# SPDX-License-Identifier: Apache-2.0
"""What a function returned, as JSON, for the parent to compare.

Tuples, generators, ranges, dict views and other iterables are lists. Exact fractions and decimals are numbers. A set,
which has no order, is an object with the one key `SET`, whose value lists its elements. Anything else that JSON does
not know is an object with the one key `UNKNOWN`, which equals nothing that can be expected.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, KeysView, Mapping
from collections.abc import Set as AbstractSet

# No text of a test holds a zero byte.
SET, UNKNOWN = "\0set", "\0type"


def json_of(value: object) -> bytes:
    """JSON of a value. Raises what the value's own iterators raise."""
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
        return {_key(key): plain(content) for key, content in value.items()}
    if isinstance(value, bytes | bytearray | memoryview):
        return {UNKNOWN: type(value).__name__}
    if isinstance(value, AbstractSet) and not isinstance(value, KeysView):  # keys have the order of the dictionary
        return {SET: [plain(element) for element in value]}
    if isinstance(value, Iterable):
        return [plain(element) for element in value]
    return _number(value)


def _number(value: object) -> object:
    from decimal import Decimal  # here, so that a program without a function starts sooner
    from fractions import Fraction

    if not isinstance(value, Fraction | Decimal):
        return {UNKNOWN: type(value).__name__}
    is_whole = math.isfinite(value) and value == int(value)
    return int(value) if is_whole else float(value)


def _key(key: object) -> str | int | float | None:
    return key if key is None or isinstance(key, str | int | float) else str(key)
