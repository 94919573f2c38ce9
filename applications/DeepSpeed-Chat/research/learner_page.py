# SPDX-License-Identifier: Apache-2.0
"""Results of learning methods side by side: a table, a chart of gold score against KL, and a page."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from dschat.base.atomic import write_file
from dschat.base.display import markdown_table, text_table
from dschat.base.pictures import GREY
from dschat.base.statistics import mean_interval
from dschat.evaluation.chart import Chart, Curve, Look, draw_charts, look_of
from dschat.evaluation.page import NONE

HEADERS = ("learner", "gold score", "reward-model score", "KL to SFT", "length", "seconds")


@dataclass(frozen=True)
class PolicyPoint:
    """Measurements of a policy on the held-out prompts; one number per prompt in each list."""

    gold: list[float]
    score: list[float]
    kl: list[float]
    tokens: list[float]


@dataclass(frozen=True)
class Learner:
    """A learning method and its results."""

    name: str
    points: list[PolicyPoint]  # points of its policies in the order of training; the last one is the result
    seconds: float | None = None  # seconds of training; None if there was none
    bound: bool = False  # the KL is an upper bound, not measured


def learner_table(learners: Sequence[Learner], as_page: bool = False) -> str:
    """Results of each learner: a table for a terminal, or as Markdown for a page."""
    rows = []
    for learner in learners:
        end = learner.points[-1]
        if learner.bound:
            kl = f"≤ {end.kl[0]:.1f}"
        else:
            kl = mean_interval(end.kl).text(1) if any(end.kl) else "0"
        gold = mean_interval(end.gold).text()
        score = mean_interval(end.score).text(2)
        length = mean_interval(end.tokens).text(1)
        seconds = NONE if learner.seconds is None else f"{learner.seconds:.0f}"
        rows.append([learner.name, gold, score, kl, length, seconds])
    return (markdown_table if as_page else text_table)(HEADERS, rows)


def draw_learners(learners: Sequence[Learner], file: Path) -> None:
    """Draw gold score against KL, each learner a line through its points with 95 % intervals of the gold score."""
    start = mean_interval(learners[0].points[0].gold)
    lines = []
    for number, learner in enumerate(learners[1:]):
        kl = [0.0]
        gold = [start]
        for point in learner.points:
            kl.append(fmean(point.kl))
            gold.append(mean_interval(point.gold))
        label = f"{learner.name} (its KL: an upper bound)" if learner.bound else learner.name
        lines.append(Curve(kl, gold, look_of(number, label)))
    level: Look = {"color": GREY, "linestyle": "--", "linewidth": 1, "label": learners[0].name}
    chart = Chart(
        "What the gold score costs in KL",
        "KL to SFT (nats per response)",
        "gold score (mean, 95 %)",
        lines,
        levels=[(start.value, level)],
        legend="below",
    )
    picture = draw_charts([chart], (8, 6), dpi=150)
    write_file(file, picture)


def write_page(folder: Path, title: str, parts: Mapping[str, str]) -> Path:
    """Write README.md of a folder: a title, and a heading with its text for each part."""
    content = f"# {title}\n"
    for heading, text in parts.items():
        content += f"\n## {heading}\n\n{text.rstrip()}\n"
    page = folder / "README.md"
    write_file(page, content)
    return page
