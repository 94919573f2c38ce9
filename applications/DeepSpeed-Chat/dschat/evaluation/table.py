# SPDX-License-Identifier: Apache-2.0
"""Tables of results as pandas DataFrames, which reports are made from."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pandas as pd

# Arrow strings refuse half of a surrogate pair, which a model's text may hold.
pd.set_option("mode.string_storage", "python")


def result_table(rows: Iterable[Mapping[str, Any]]) -> pd.DataFrame:
    """Table of results by row; estimates, numbers and None stay the Python objects that they are."""
    return pd.DataFrame(list(rows), dtype=object)


def object_column(table: pd.DataFrame, values: Sequence[object]) -> "pd.Series[Any]":
    """Column of a table, (N,), whose values are objects such as tuples and dictionaries."""
    return pd.Series(list(values), index=table.index, dtype=object)
