# SPDX-License-Identifier: Apache-2.0
"""Style of all charts: colours, markers, axes, legends and PNG, without a display or matplotlib's global state."""

import io
from collections.abc import Iterable, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Text

# Okabe-Ito colours dark enough for thin lines; the markers tell lines apart without colour.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#7a6f00")
MARKERS = ("o", "s", "^", "D", "v", "P")
MAX_NAME_LENGTH = 40  # characters


def plain_axes(ax: Axes, title: str, x: str, y: str) -> None:
    """Give a chart its title, the labels of its axes and a light grid."""
    ax.set_title(title, fontsize=12, fontweight="bold", loc="left", parse_math=False)
    ax.set_xlabel(x, parse_math=False)
    ax.set_ylabel(y, parse_math=False)
    ax.grid(color="#e3e3e3", linewidth=0.8)
    ax.set_axisbelow(True)
    ax.spines[["top", "right"]].set_visible(False)


def plain_legend(ax: Axes, below: bool = False) -> None:
    """Add a legend of everything that has a label, without a frame, inside or below the chart."""
    position: dict[str, Any] = {}
    if below:
        position = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.13), "ncols": 2}
    legend = ax.legend(frameon=False, fontsize=9, **position)
    show_as_it_is(legend.get_texts())


def show_as_it_is(texts: Iterable[Text]) -> None:
    """Turn off the typesetting of formulas, so that names may hold any character."""
    for text in texts:
        text.set_parse_math(False)


def short(name: str) -> str:
    """Name for a chart: without lone surrogates, cut to MAX_NAME_LENGTH."""
    drawable = name.encode("utf-8", "replace").decode("utf-8")
    if len(drawable) <= MAX_NAME_LENGTH:
        return drawable
    return drawable[: MAX_NAME_LENGTH - 1] + "…"


def legend_labels(names: Sequence[str]) -> list[str]:
    """Short names for a legend, which leaves out labels that begin with an underscore; numbered if two are alike."""
    labels = [short(name.lstrip("_") or name.replace("_", "-")) for name in names]
    if len(set(labels)) == len(labels):
        return labels
    return [f"{number}: {label}" for number, label in enumerate(labels, start=1)]


def png(figure: Figure) -> bytes:
    """PNG of a figure; the same bytes for the same picture."""
    buffer = io.BytesIO()
    FigureCanvasAgg(figure)
    figure.savefig(buffer, format="png", metadata={"Software": None})
    return buffer.getvalue()
