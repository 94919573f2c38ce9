# SPDX-License-Identifier: Apache-2.0
"""Learners side by side: a table of where each ends, and a plot of what a score costs in KL."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from matplotlib.figure import Figure

from dschat.common.display import markdown_table, text_table
from dschat.common.pictures import COLOURS, GREY, MARKERS, interval_line, plain_axes, plain_legend, png
from dschat.common.statistics import mean_interval

HEADERS = ("learner", "gold score", "reward-model score", "KL to SFT", "length", "seconds")


@dataclass(frozen=True)
class Point:
    """What a policy is measured to be on the held-out prompts; one number per prompt in each list."""

    gold: list[float]
    score: list[float]
    kl: list[float]
    tokens: list[float]


@dataclass(frozen=True)
class Learner:
    """A way to learn, and where it came to.

    Attributes:
        name: as the table calls it.
        points: on the way, in order; the last one is its end.
        seconds: of training; None where there was none.
        bound: the KL is an upper bound, not measured.
    """

    name: str
    points: list[Point]
    seconds: float | None = None
    bound: bool = False


def learner_rows(learners: Sequence[Learner]) -> list[list[str]]:
    """Rows of the table under HEADERS."""
    rows = []
    for learner in learners:
        end = learner.points[-1]
        kl = mean_interval(end.kl).text(1) if any(end.kl) else "0"
        rows.append(
            [
                learner.name,
                mean_interval(end.gold).text(),
                mean_interval(end.score).text(2),
                f"≤ {end.kl[0]:.1f}" if learner.bound else kl,
                mean_interval(end.tokens).text(1),
                "–" if learner.seconds is None else f"{learner.seconds:.0f}",
            ]
        )
    return rows


def learner_text(learners: Sequence[Learner]) -> str:
    """The table for a terminal."""
    return text_table(HEADERS, learner_rows(learners))


def learner_markdown(learners: Sequence[Learner]) -> str:
    """The table for a page."""
    return markdown_table(HEADERS, learner_rows(learners))


def draw_learners(learners: Sequence[Learner], file: Path) -> None:
    """Gold score against KL, each learner a line through its points with 95 % intervals of the gold score."""
    figure = Figure(figsize=(8, 5), dpi=150, layout="constrained")
    ax = figure.subplots()
    start = mean_interval(learners[0].points[0].gold)
    ax.axhline(start.value, color=GREY, linestyle="--", linewidth=1, label=learners[0].name)
    for number, learner in enumerate(learners[1:]):
        kl = [fmean(point.kl) for point in learner.points]
        gold = [mean_interval(point.gold) for point in learner.points]
        colour, marker = COLOURS[number % len(COLOURS)], MARKERS[number % len(MARKERS)]
        label = f"{learner.name} (its KL: an upper bound)" if learner.bound else learner.name
        interval_line(ax, [0.0, *kl], [start, *gold], label, colour, marker)
    plain_axes(ax, "What the gold score costs in KL", "KL to SFT (nats per response)", "gold score (mean, 95 %)")
    plain_legend(ax)
    file.write_bytes(png(figure))


def write_page(folder: Path, title: str, parts: Mapping[str, str]) -> Path:
    """Writes README.md of a folder: a title, and a heading with its text for each part."""
    body = "".join(f"\n## {heading}\n\n{text.rstrip()}\n" for heading, text in parts.items())
    page = folder / "README.md"
    page.write_text(f"# {title}\n{body}", encoding="utf-8")
    return page
