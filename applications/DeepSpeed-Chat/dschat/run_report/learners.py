# SPDX-License-Identifier: Apache-2.0
"""Learners side by side: a table of where each ends, and a plot of what a score costs in KL."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib.figure import Figure

from dschat.common.statistics import mean_estimate
from dschat.common.tables import text_table
from dschat.run_report.plots import COLOURS, MARKERS, SFT_COLOUR, png

Z95 = 1.959964  # half of a 95 % interval in standard errors
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


def interval(values: Sequence[float], digits: int = 3) -> str:
    """`mean [low, high]` with 95 %, by the normal distribution."""
    estimate = mean_estimate(values)
    half = Z95 * (estimate.error or 0.0)
    mean, low, high = (f"{x:.{digits}f}" for x in (estimate.mean, estimate.mean - half, estimate.mean + half))
    return mean if low == high else f"{mean} [{low}, {high}]"


def learner_rows(learners: Sequence[Learner]) -> list[list[str]]:
    """Rows of the table under HEADERS."""
    rows = []
    for learner in learners:
        end = learner.points[-1]
        kl = interval(end.kl, 1) if any(end.kl) else "0"
        rows.append(
            [
                learner.name,
                interval(end.gold),
                interval(end.score, 2),
                f"≤ {end.kl[0]:.1f}" if learner.bound else kl,
                interval(end.tokens, 1),
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


def markdown_table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown."""
    lines = [headers, ["---"] * len(headers), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines) + "\n"


def draw_learners(learners: Sequence[Learner], file: Path) -> None:
    """Gold score against KL, each learner a line through its points with 95 % intervals of the gold score."""
    figure = Figure(figsize=(8, 5), dpi=150, layout="constrained")
    ax = figure.subplots()
    start = mean_estimate(learners[0].points[0].gold).mean
    ax.axhline(start, color=SFT_COLOUR, linestyle="--", linewidth=1, label=learners[0].name)
    for number, learner in enumerate(learners[1:]):
        kl = [mean_estimate(point.kl).mean for point in learner.points]
        gold = [mean_estimate(point.gold) for point in learner.points]
        ax.errorbar(
            [0.0, *kl],
            [start, *(estimate.mean for estimate in gold)],
            yerr=[0.0, *(Z95 * (estimate.error or math.nan) for estimate in gold)],
            color=COLOURS[number % len(COLOURS)],
            marker=list(MARKERS)[number % len(MARKERS)],
            markersize=6,
            capsize=2,
            linewidth=1.6,
            linestyle=":" if learner.bound else "-",
            label=f"{learner.name} (KL: upper bound)" if learner.bound else learner.name,
        )
    ax.set_xlabel("KL to SFT (nats per response)")
    ax.set_ylabel("gold score (mean, 95 %)")
    ax.grid(color="#e3e3e3", linewidth=0.8)
    ax.set_axisbelow(True)
    ax.spines[["top", "right"]].set_visible(False)
    ax.legend(frameon=False)
    file.write_bytes(png(figure))


def write_page(folder: Path, title: str, parts: Mapping[str, str]) -> Path:
    """Writes README.md of a folder: a title, and a heading with its text for each part."""
    body = "".join(f"\n## {heading}\n\n{text.rstrip()}\n" for heading, text in parts.items())
    page = folder / "README.md"
    page.write_text(f"# {title}\n{body}", encoding="utf-8")
    return page
