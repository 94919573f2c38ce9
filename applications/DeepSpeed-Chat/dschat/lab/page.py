# SPDX-License-Identifier: Apache-2.0
"""The report: a title, tables, sentences and figures, as text for a terminal, as Markdown or as one page of HTML."""

import base64
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dschat.base.atomic import reporting, write_file
from dschat.base.display import markdown_table, text_table, text_width
from dschat.base.statistics import Estimate, MeanInterval
from dschat.lab.macro_actions import STYLE, MacroToken, legend_html, macro_spans

TEMPLATE = Path(__file__).with_name("page.html")
NAME = "report"  # of the files of most reports
OUTPUT = "--output "  # the flag of their folder, before it
NONE = "–"  # in a cell for which there is no number


@dataclass(frozen=True)
class Table:
    """Cells, and what stands around them."""

    headers: Sequence[str]
    cells: Sequence[Sequence[object]]  # text, whole numbers, estimates, rates (written in per cent), None
    kind: str = ""  # its class on a page
    heading: str = ""  # before the first table of several on one subject
    caption: str = ""  # a line above it
    note: str = ""  # lines below it

    @property
    def rows(self) -> list[list[str]]:
        """The cells as they are written."""
        return [[_written(cell) for cell in row] for row in self.cells]


@dataclass(frozen=True)
class Figure:
    """A picture."""

    title: str  # what is said in its place where it cannot be seen
    png: bytes

    @property
    def address(self) -> str:
        """The picture itself as an address, so that a page needs no file beside it."""
        return f"data:image/png;base64,{base64.b64encode(self.png).decode('ascii')}"


@dataclass(frozen=True)
class Key:
    """What one kind of line in the figures means."""

    symbol: str
    name: str
    colour: str = "inherit"


@dataclass(frozen=True)
class MacroPanel:
    """One of several segmented texts to compare."""

    title: str
    tokens: Sequence[MacroToken]
    caption: str


@dataclass(frozen=True)
class Example:
    """Responses to one prompt, side by side."""

    title: str
    prompt: str
    panels: Sequence[MacroPanel]


@dataclass(frozen=True)
class Section:
    """A part of a page below the results."""

    title: str = ""
    intro: str = ""
    keys: Sequence[Key] = ()
    remark: str = ""  # how to read the figures
    figures: Sequence[Figure] = ()
    examples: Sequence[Example] = ()
    numbers: bool = True  # whether the tokens of the examples have values, rewards and advantages
    folded: Table | None = None  # shown on demand, below its caption
    marked: frozenset[int] = frozenset()  # rows of this table that stand out


@dataclass(frozen=True)
class Report:
    """What was measured, in reading order; a terminal shows the tables first, a page the findings."""

    title: str
    tables: Sequence[Table] = ()
    findings: Sequence[str] = ()  # sentences: what came out
    remarks: Sequence[str] = ()  # how to read the numbers
    notes: Sequence[str] = ()  # of the caller
    sections: Sequence[Section] = ()  # of a page alone

    def text(self) -> str:
        """Tables and sentences as plain text for a terminal."""
        return self._drawn(text_table)

    def markdown(self) -> str:
        """The same with tables of Markdown."""
        return self._drawn(markdown_table)

    def _drawn(self, drawn: Callable[[Sequence[str], Sequence[Sequence[str]]], str]) -> str:
        parts = [self.title]
        for table in self.tables:
            heading = f"{table.heading}\n{'=' * text_width(table.heading)}" if table.heading else ""
            above = "\n".join(filter(None, [heading, table.caption]))
            parts += [above, drawn(table.headers, table.rows), table.note]
        parts += ["\n".join(lines) for lines in (self.findings, self.remarks, self.notes)]
        return "\n\n".join(filter(None, parts)) + "\n"

    def html(self) -> str:
        """One page that needs nothing from outside; every text that is not ours is escaped."""
        from jinja2 import Environment, FileSystemLoader, StrictUndefined
        from markupsafe import Markup

        loader = FileSystemLoader(TEMPLATE.parent)
        environment = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True)
        drawn = {"legend": lambda numbers: Markup(legend_html(numbers)), "spans": lambda t: Markup(macro_spans(t))}
        return environment.get_template(TEMPLATE.name).render(report=self, style=Markup(STYLE), **drawn)


def _written(cell: object) -> str:
    return NONE if cell is None else cell.text() if isinstance(cell, Estimate | MeanInterval) else str(cell)


def write_report(
    folder: Path,
    name: str,
    content: Mapping[str, Any],
    report: Report | None = None,
    picture: bytes = b"",
    flag: str = "",
) -> str:
    """Writes name.json into a folder, name.md and name.png where there is something for them; returns the second.

    Raises UserError, which begins with the flag, where that is not possible.
    """
    numbers, text = json.dumps(content, indent=1, allow_nan=False) + "\n", "" if report is None else report.markdown()
    files: dict[str, str | bytes] = {"json": numbers, "md": text, "png": picture}
    with reporting(f"{flag}{folder}"):
        for ending, inside in files.items():
            if inside:
                write_file(folder / f"{name}.{ending}", inside)
    return text
