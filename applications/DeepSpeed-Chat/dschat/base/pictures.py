# SPDX-License-Identifier: Apache-2.0
"""What charts share: colours, markers, plain axes and a file's bytes. Drawn without a display or global state."""

import io
from collections.abc import Iterable
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Text

# Okabe-Ito colours dark enough for thin lines; the markers tell lines apart without colour.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#7a6f00")
MARKERS = ("o", "s", "^", "D", "v", "P")
GREY = "#666666"
LONGEST = 40  # characters of a name


def plain_axes(ax: Axes, title: str, x: str, y: str) -> None:
    """A chart with a title, the names of its axes and a light grid."""
    ax.set_title(title, fontsize=12, fontweight="bold", loc="left", parse_math=False)
    ax.set_xlabel(x, parse_math=False)
    ax.set_ylabel(y, parse_math=False)
    ax.grid(color="#e3e3e3", linewidth=0.8)
    ax.set_axisbelow(True)
    ax.spines[["top", "right"]].set_visible(False)


def plain_legend(ax: Axes, below: bool = False) -> None:
    """A legend without a frame of what has a label, whose texts are shown as they are; inside or below the chart."""
    place: dict[str, Any] = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.13), "ncols": 2} if below else {}
    show_as_it_is(ax.legend(frameon=False, fontsize=9, **place).get_texts())


def show_as_it_is(texts: Iterable[Text]) -> None:
    """Texts of a chart are no formulas, whatever they hold."""
    for text in texts:
        text.set_parse_math(False)


def short(name: str) -> str:
    """A name that can be drawn: no halves of characters, not too long."""
    drawable = name.encode("utf-8", "replace").decode("utf-8")
    return drawable if len(drawable) <= LONGEST else drawable[: LONGEST - 1] + "…"


def legend_label(name: str) -> str:
    """A short name that legends show: they leave out what begins with an underscore."""
    return short(name.lstrip("_") or name.replace("_", "-"))


def png(figure: Figure) -> bytes:
    """The figure as PNG, the same bytes for the same picture."""
    buffer = io.BytesIO()
    FigureCanvasAgg(figure)
    figure.savefig(buffer, format="png", metadata={"Software": None})
    return buffer.getvalue()
