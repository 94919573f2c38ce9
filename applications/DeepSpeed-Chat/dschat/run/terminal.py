# SPDX-License-Identifier: Apache-2.0
"""What a run shows on the terminal: evaluations as one line each, and lines that leave a progress bar whole."""

import logging
import math
from collections.abc import Mapping

from dschat.common.glossary import HEADLINES

PREFIX = "eval/"


class LinesAboveBars(logging.StreamHandler):  # type: ignore[type-arg]
    """Writes to standard error; a progress bar is wiped before a line and drawn anew below it."""

    def emit(self, record: logging.LogRecord) -> None:
        """Writes one record."""
        from tqdm import tqdm

        with tqdm.external_write_mode(file=self.stream):
            super().emit(record)


def evaluation_line(update: int, metrics: Mapping[str, float], before: Mapping[str, float]) -> str:
    """An evaluation in one line: every metric, and how far it has moved since the one before.

    Args:
        update: optimiser updates until then.
        metrics: name → number, as in metrics.jsonl.
        before: those of the evaluation before; empty at the first.
    """
    names = sorted(metrics, key=lambda name: _place(name.removeprefix(PREFIX)))
    parts = []
    for name in names:
        finite = name in before and math.isfinite(metrics[name] - before[name])
        moved = f" ({_signed(metrics[name] - before[name])})" if finite else ""
        parts.append(f"{name.removeprefix(PREFIX).replace('_', ' ')} {_shown(metrics[name])}{moved}")
    return f"{after(update)}: {', '.join(parts)}"


def after(updates: int) -> str:
    """When something was: "after 1 update", "after 12 updates"."""
    return f"after {updates} update{'' if updates == 1 else 's'}"


def _place(name: str) -> int:
    return HEADLINES.index(name) if name in HEADLINES else len(HEADLINES)


def _shown(number: float) -> str:
    """Four digits that count; none behind the point of large numbers."""
    return f"{number:.0f}" if 1000 <= abs(number) < 1e6 else f"{number:#.4g}"


def _signed(number: float) -> str:
    return ("+" if number >= 0 else "−") + (f"{abs(number):.2g}" if abs(number) < 100 else _shown(abs(number)))
