# SPDX-License-Identifier: Apache-2.0
"""A report: title, tables, sentences and figures, as text for a terminal, as Markdown or as one page of HTML."""

import base64
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dschat.base.atomic import reporting, write_file
from dschat.base.display import markdown_table, text_table, text_width
from dschat.base.jsonl import json_value
from dschat.base.statistics import Estimate, MeanInterval
from dschat.evaluation.macro_actions import STYLE, MacroToken, legend_html, macro_spans

logger = logging.getLogger(__name__)

TEMPLATE = Path(__file__).with_name("page.html")
REPORT_NAME = "report"  # file name of most reports, without the suffix
OUTPUT = "--output "  # flag of their folder, for messages
NONE = "–"  # text of a cell without a number


@dataclass(frozen=True)
class Table:
    """A table with its captions."""

    headers: Sequence[str]
    cells: Sequence[Sequence[object]]  # by row: text, integers, estimates, rates (written in per cent), None
    kind: str = ""  # CSS class on a page
    heading: str = ""  # before the first table of several on one subject
    caption: str = ""  # line above the table
    note: str = ""  # lines below the table

    @property
    def rows(self) -> list[list[str]]:
        """Cells as text."""
        return [list(map(cell_text, row)) for row in self.cells]


@dataclass(frozen=True)
class Figure:
    """A picture."""

    title: str  # alternative text
    png: bytes

    @property
    def address(self) -> str:
        """Data URL of the picture, so that a page needs no other file."""
        encoded = base64.b64encode(self.png).decode("ascii")
        return f"data:image/png;base64,{encoded}"


@dataclass(frozen=True)
class MacroPanel:
    """A segmented text, shown next to others."""

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
    """A part of a page above the tables."""

    title: str = ""
    intro: str = ""
    remark: str = ""  # how to read the figures
    figures: Sequence[Figure] = ()
    examples: Sequence[Example] = ()


@dataclass(frozen=True)
class Details:
    """Numbers and sentences that few readers need: below all else, and folded on a page."""

    title: str
    tables: Sequence[Table] = ()
    sentences: Sequence[str] = ()


@dataclass(frozen=True)
class Report:
    """Content of a report."""

    title: str
    tables: Sequence[Table] = ()
    remarks: Sequence[str] = ()  # how to read the tables
    lead: str = ""  # the result in one sentence
    about: Sequence[str] = ()  # paragraphs on what was done
    sections: Sequence[Section] = ()  # on a page only
    details: Sequence[Details] = ()

    def text(self) -> str:
        """Tables and sentences as plain text for a terminal."""
        return self._render(text_table)

    def markdown(self) -> str:
        """Tables and sentences as Markdown."""
        return self._render(markdown_table)

    def without_details(self) -> "Report":
        """A short report for a terminal."""
        return replace(self, details=())

    def _render(self, render_table: Callable[[Sequence[str], Sequence[Sequence[str]]], str]) -> str:
        parts = [Details(self.title, sentences=[self.lead]), Details("", sentences=self.about)]
        parts += [Details("", self.tables, self.remarks), *self.details]
        blocks = []
        for part in parts:
            blocks.append(part.title)
            for table in part.tables:
                above = [table.caption]
                if table.heading:
                    underline = "=" * text_width(table.heading)
                    above = [table.heading, underline, table.caption]
                blocks.append("\n".join(filter(None, above)))
                blocks.append(render_table(table.headers, table.rows))
                blocks.append(table.note)
            blocks.append("\n".join(part.sentences))
        text = "\n\n".join(filter(None, blocks))
        return f"{text}\n"

    def html(self) -> str:
        """A page that needs no other file; all text is escaped except our own markup."""
        from jinja2 import Environment, FileSystemLoader, StrictUndefined
        from markupsafe import Markup

        loader = FileSystemLoader(TEMPLATE.parent)
        environment = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True)
        template = environment.get_template(TEMPLATE.name)
        return template.render(
            report=self,
            style=Markup(STYLE),
            legend=Markup(legend_html()),
            spans=lambda tokens: Markup(macro_spans(tokens)),
        )


def cell_text(cell: object) -> str:
    """Text of a table's cell."""
    if cell is None:
        return NONE
    if isinstance(cell, Estimate | MeanInterval):
        return cell.text()
    return str(cell)


def write_report(
    folder: Path,
    name: str,
    content: Mapping[str, Any],
    report: Report | None = None,
    draw: Callable[[], bytes] | None = None,
    flag: str = "",
) -> str:
    """Write name.json into a folder, and name.md and name.png where there is a report and a picture.

    The picture is drawn when the numbers are in their files. If it cannot be drawn, a warning says so.

    Args:
        folder: made where it is missing.
        name: name of the files, without the suffix.
        content: content of the JSON file; estimates, rates and other dataclasses become objects of their fields.
        report: for the Markdown file.
        draw: draws the PNG.
        flag: named before the folder in messages.

    Returns:
        The text of the Markdown file.

    Raises:
        UserError: a file cannot be written.
    """
    text = "" if report is None else report.markdown()
    numbers = json.dumps(json_value(content), indent=1, allow_nan=False)
    with reporting(f"{flag}{folder}"):
        write_file(folder / f"{name}.json", f"{numbers}\n")
        if text:
            write_file(folder / f"{name}.md", text)
        if draw is not None:
            file = folder / f"{name}.png"
            picture = drawn(draw, str(file))
            if picture:
                write_file(file, picture)
            else:  # the numbers of an earlier report were others
                file.unlink(missing_ok=True)
    return text


def drawn(draw: Callable[[], bytes], name: str) -> bytes:
    """A picture as PNG; empty, with a warning that names it, if it cannot be drawn."""
    try:
        return draw()
    except Exception as error:  # matplotlib raises errors of any type, and no picture is worth the numbers
        logger.warning(
            "%s could not be drawn (%s: %s). The numbers are complete without it.", name, type(error).__name__, error
        )
        return b""
