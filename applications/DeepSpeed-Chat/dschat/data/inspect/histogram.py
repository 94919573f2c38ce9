# SPDX-License-Identifier: Apache-2.0
"""Numbers as a bar chart of text."""

from collections import Counter
from collections.abc import Sequence
from itertools import count

MAX_BINS = 12
BAR_WIDTH = 40  # characters of the longest bar


def bin_width(largest: int) -> int:
    """Width of the bins: the smallest of 1, 2, 5, 10, 20, 50, ... that needs at most MAX_BINS from 0 to `largest`."""
    widths = (factor * 10**zeros for zeros in count() for factor in (1, 2, 5))
    return next(width for width in widths if largest // width < MAX_BINS)


def text_histogram(lengths: Sequence[int]) -> list[str]:
    """Bars of how many numbers, each 0 or more, fall into bins of equal width.

    One line per bin, from the one of the smallest number to the one of the largest: "20 - 29  12 ##########". A bar of
    a bin that is not empty has at least one mark.
    """
    width = bin_width(max(lengths))
    counts = Counter(length // width for length in lengths)
    most, last = max(counts.values()), max(counts)
    digits = len(str((last + 1) * width - 1))
    lines = []
    for number in range(min(counts), last + 1):
        bar = "#" * -(-counts[number] * BAR_WIDTH // most)  # rounded up
        bounds = f"{number * width:{digits}d} - {(number + 1) * width - 1:{digits}d}"
        lines.append(f"{bounds}  {counts[number]:{len(str(most))}d} {bar}".rstrip())
    return lines


def summary(lengths: Sequence[int]) -> str:
    """Smallest, median, mean, 95th and 99th percentile (nearest rank) and largest of at least one number."""
    ordered = sorted(lengths)

    def percentile(percent: int) -> int:
        return ordered[max(0, -(-percent * len(ordered) // 100) - 1)]

    return (
        f"min {ordered[0]}, median {percentile(50)}, mean {sum(ordered) / len(ordered):.1f}, "
        f"95 % {percentile(95)}, 99 % {percentile(99)}, max {ordered[-1]}"
    )
