# SPDX-License-Identifier: Apache-2.0
"""Progress bars: a bar on a terminal, which lines leave whole; one line a minute elsewhere."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from tqdm import tqdm

Bar: TypeAlias = "tqdm[Any]"
LINE_SECONDS = 60.0  # between two lines where standard error is no terminal
LINE = "{desc}{percentage:.0f}% ({n_fmt}/{total_fmt}), {elapsed} gone, {remaining} left, {rate_fmt}{postfix}"
LINE_WITHOUT_TOTAL = "{desc}{n_fmt} {unit}, {elapsed} gone, {rate_fmt}{postfix}"


class LineFile:
    """Standard error as one bar writes to it: a line after every minute and, of a longer bar, one at its end.

    However often the bar is drawn, what is drawn in between is left out.
    """

    encoding = "utf-8"

    def __init__(self) -> None:
        self._last = time.monotonic()
        self._shown = self._drawn = ""
        self._is_long = False

    def write(self, text: str) -> None:
        """Takes one drawing of the bar, or the line end that closes it."""
        ends = text == "\n"
        self._drawn = text.strip() or self._drawn
        if time.monotonic() - self._last < LINE_SECONDS and not (ends and self._is_long):
            return
        if self._drawn.split(",")[0] != self._shown.split(",")[0]:  # it got further
            sys.stderr.write(self._drawn + "\n")
            sys.stderr.flush()
        self._last, self._shown, self._is_long = time.monotonic(), self._drawn, True

    def flush(self) -> None:
        """Every line is flushed as it is written."""


class LinesAboveBars(logging.StreamHandler):
    """Writes to standard error; a progress bar is wiped before a line and drawn anew below it."""

    def emit(self, record: logging.LogRecord) -> None:
        """Writes one record."""
        from tqdm import tqdm

        with tqdm.external_write_mode(file=self.stream):
            super().emit(record)


def progress(
    total: int | None = None,
    desc: str = "",
    initial: int = 0,
    disable: bool = False,
    unit: str = "it",
    iterable: Iterable[Any] | None = None,
) -> Bar:
    """A progress bar on standard error.

    On a terminal it is tqdm's. In a file or a pipe it is a line after every minute and one at the end, and nothing at
    all for what takes less than a minute.

    Args:
        total: how many there will be; of `iterable` its length, if it has one.
        desc: what is counted, before the numbers.
        initial: how many there were before.
        disable: show nothing, as on all ranks but the first.
        unit: what one is called.
        iterable: to go over with the bar; without it, call `update`.
    """
    from tqdm import tqdm

    if sys.stderr.isatty():
        return tqdm(iterable, desc or None, total, initial=initial, disable=disable, unit=unit)
    known = total is not None or hasattr(iterable, "__len__")
    return tqdm(
        iterable,
        f"{desc}: " if desc else None,
        total,
        file=LineFile(),
        mininterval=1.0,
        miniters=1,  # every update looks at the clock
        bar_format=LINE if known else LINE_WITHOUT_TOTAL,
        initial=initial,
        disable=disable,
        unit=unit,
        position=0,
    )
