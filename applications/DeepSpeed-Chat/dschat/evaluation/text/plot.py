# SPDX-License-Identifier: Apache-2.0
"""The picture: by optimiser updates where they are known, else by model."""

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dschat.common.pictures import COLOURS, MARKERS, Interval, interval_line, plain_axes, plain_legend, png, short
from dschat.evaluation.text.results import PolicyResult, RewardResult

Line = tuple[str, Sequence[Interval]]  # label → an estimate for each model
TITLES = {"rouge1": "ROUGE-1", "rouge2": "ROUGE-2", "rougeL": "ROUGE-L"}


def draw_results(policies: Sequence[PolicyResult], rewards: Sequence[RewardResult]) -> bytes:
    """Perplexity and ROUGE of policies, loss and accuracy of reward models, a chart each, as PNG."""
    charts: list[tuple[str, str, Sequence[PolicyResult] | Sequence[RewardResult], list[Line]]] = []
    if policies:
        charts.append(("Perplexity", "exp(nats per token)", policies, [("", [each.perplexity for each in policies])]))
    if policies and policies[0].rouge:
        lines: list[Line] = [(TITLES[name], [each.rouge[name] for each in policies]) for name in policies[0].rouge]
        charts.append(("ROUGE against the data's responses", "F1", policies, lines))
    if rewards:
        charts.append(("Loss of the reward model", "nats per pair", rewards, [("", [each.loss for each in rewards])]))
        accuracy = [each.accuracy.per_cent for each in rewards]
        charts.append(("Accuracy of the reward model", "%", rewards, [("", accuracy)]))
    figure = Figure(figsize=(5.2 * len(charts), 4.2), dpi=120, layout="constrained")
    for ax, (title, y, results, lines) in zip(figure.subplots(1, len(charts), squeeze=False)[0], charts, strict=True):
        _draw(ax, title, y, [(each.model, each.update) for each in results], lines)
    return png(figure)


def _draw(ax: Axes, title: str, y: str, models: Sequence[tuple[str, int | None]], lines: Sequence[Line]) -> None:
    updates = [update for _, update in models if update is not None]
    along = len(updates) == len(models)
    places = [float(update) for update in updates] if along else [float(number) for number in range(len(models))]
    for number, (label, estimates) in enumerate(lines):
        interval_line(ax, places, estimates, label, COLOURS[number], MARKERS[number])
        if not along:  # models in no order: points, no line
            ax.containers[-1][0].set_linestyle("none")
    plain_axes(ax, title, "optimiser updates" if along else "", f"{y}, 95 % interval over texts")
    if not along:
        ax.set_xticks(places, [short(name) for name, _ in models], rotation=20, ha="right", parse_math=False)
        ax.margins(x=0.2)
    if len(lines) > 1:
        plain_legend(ax)
