# SPDX-License-Identifier: Apache-2.0
"""Progress bars: on a terminal a bar that log lines do not break, elsewhere one line a minute; repeated log lines."""

from __future__ import annotations

import logging
import re
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from tqdm import tqdm

Bar: TypeAlias = "tqdm[Any]"
LINE_SECONDS = 60.0  # between two lines where standard error is not a terminal
LINE = "{desc}{percentage:.0f}% ({n_fmt}/{total_fmt}), {elapsed} gone, {remaining} left, {rate_fmt}{postfix}"
LINE_WITHOUT_TOTAL = "{desc}{n_fmt} {unit}, {elapsed} gone, {rate_fmt}{postfix}"


_is_plain = False  # set by --log plain


def log_plainly() -> None:
    """From now on, writes lines with time stamps as in a file, and no bars, also on a terminal."""
    global _is_plain
    _is_plain = True


def is_interactive() -> bool:
    """Whether a person watches standard error on a terminal, where bars and tables can be shown."""
    return sys.stderr.isatty() and not _is_plain


class LineFile:
    """Standard error for one bar: a line after every minute and, if the bar takes longer, one at its end.

    All other renderings of the bar are dropped.
    """

    encoding = "utf-8"

    def __init__(self) -> None:
        self._last = time.monotonic()
        self._shown = ""  # the last line that was written
        self._rendered = ""  # the last rendering of the bar
        self._is_long = False

    def write(self, text: str) -> None:
        """Writes one rendering of the bar, or the line end that closes it."""
        is_end = text == "\n"
        self._rendered = text.strip() or self._rendered
        if time.monotonic() - self._last < LINE_SECONDS and not (is_end and self._is_long):
            return
        if self._rendered.split(",")[0] != self._shown.split(",")[0]:  # the count has changed
            sys.stderr.write(self._rendered + "\n")
            sys.stderr.flush()
        self._last = time.monotonic()
        self._shown = self._rendered
        self._is_long = True

    def flush(self) -> None:
        """Every line is flushed as it is written."""


class RepeatedLines:
    """Log lines that many requests cause in several threads, as a server that is busy does.

    A line is written at its first time, and with its count at the tenth, hundredth and so on. Lines that differ in
    numbers and identifiers alone count as one.
    """

    def __init__(self, write: Callable[[str], None]) -> None:
        """Takes what writes a line, such as `logger.info`."""
        self._write = write
        self._counts: Counter[str] = Counter()
        self._lock = threading.Lock()

    def add(self, line: str) -> None:
        """Counts a line, and writes it if its count is a power of 10."""
        with self._lock:
            kind = re.sub(r"\w*\d\w*", "#", line)
            self._counts[kind] += 1
            count = self._counts[kind]
        if re.fullmatch("10*", str(count)):
            self._write(f"{line} ({count} times so far)" if count > 1 else line)


class LinesAboveBars(logging.StreamHandler):
    """Writes log lines to standard error; a progress bar is cleared before a line and shown again below it."""

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

    On a terminal it is tqdm's. In a file or a pipe it is a line after every minute and one at the end, and nothing if
    it takes less than a minute.

    Args:
        total: number of items; by default the length of `iterable`, if it has one.
        desc: title, before the numbers.
        initial: number of items that are finished already.
        disable: show nothing, as on all ranks but the first.
        unit: name of an item.
        iterable: to iterate over with the bar; without it, call `update`.
    """
    from tqdm import tqdm

    if is_interactive():
        return tqdm(iterable, desc or None, total, initial=initial, disable=disable, unit=unit)
    has_total = total is not None or hasattr(iterable, "__len__")
    return tqdm(
        iterable,
        f"{desc}: " if desc else None,
        total,
        file=LineFile(),
        mininterval=1.0,
        miniters=1,  # every update looks at the clock
        bar_format=LINE if has_total else LINE_WITHOUT_TOTAL,
        initial=initial,
        disable=disable,
        unit=unit,
        position=0,
    )
