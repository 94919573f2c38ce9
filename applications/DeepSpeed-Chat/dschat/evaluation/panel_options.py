# SPDX-License-Identifier: Apache-2.0
"""Flags of `dschat macro-actions`, which shows where termination conditions end macro actions."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

from dschat.settings.common import SEED, OptimisationFlags
from dschat.settings.conditions import CONDITIONS, FixedFlags, ParsingFlags, groups_of_conditions, read_ngram
from dschat.settings.config import Config
from dschat.settings.flags import ABOVE_0, AT_LEAST_0, NOT_EMPTY, default_of, flag, flags_of, parts
from dschat.settings.macro_actions import TerminationFlags
from dschat.settings.rules import Rule, Rules

PANEL_AXES = ("ngram", "parser", "parser_model")  # flags whose every value gets a panel
SHOWN_ROWS = 8  # of --jsonl, by default


def _help_of(group: type, name: str) -> str:
    """The help line of a flag of step 3."""
    return flags_of(group)[name].help


@dataclass(kw_only=True)
class PanelFlags:
    """Responses to cut, and the panels that show where; a panel for each value of some flags."""

    model: str = flag("model whose tokenizer is used: folder or hub id", path=True)
    text: list[str] | None = flag("responses to divide into macro actions", None)
    jsonl: Path | None = flag("file of rows with prompt and response, as `dschat generate` writes", None)
    prompt: str = flag("with --text: prompt of all responses; matters for ppl and surprise", "")
    limit: int = flag("with --jsonl: number of rows to show; 0 = all", SHOWN_ROWS, AT_LEAST_0)
    html: Path | None = flag("also write an HTML page with the conditions side by side", None)
    colour: bool = flag("print colours even if the output is not a terminal", False)
    temperature: float = flag("ppl: temperature of the log-probabilities", 1.0, ABOVE_0)
    seed: int = flag("randomized: random seed of the run", default_of(OptimisationFlags, "seed"), SEED)
    isolate_last_token: bool = flag(_help_of(TerminationFlags, "isolate_last_token"), False)
    termination_condition: list[str] = flag(
        _help_of(TerminationFlags, "termination_condition"), factory=lambda: ["fixed"]
    )
    ngram: list[Annotated[float, read_ngram]] = flag(_help_of(FixedFlags, "ngram"), factory=lambda: [5])
    parser: list[str] = flag(_help_of(ParsingFlags, "parser"), factory=lambda: ["benepar"])
    parser_model: list[str] | None = flag(
        "parsing: model of each --parser, in the same order; - = its default", None, NOT_EMPTY, path=True
    )
    parsing_cutoff: int = flag(
        _help_of(ParsingFlags, "parsing_cutoff"),
        default_of(ParsingFlags, "parsing_cutoff"),
        flags_of(ParsingFlags)["parsing_cutoff"].range,
        aliases=["--parser_cutoff"],
    )
    parser_device: str = flag(_help_of(ParsingFlags, "parser_device"), "cpu", NOT_EMPTY)


def _groups_of_conditions() -> dict[str, type]:
    """Condition → its group of flags, but for groups whose flags `PanelFlags` declares."""
    declared = flags_of(PanelFlags).keys()
    independent: dict[str, type] = {}
    for name, group in groups_of_conditions().items():
        if not flags_of(group).keys() <= declared:
            independent[name] = group
    return independent


@dataclass(kw_only=True, frozen=True)
class ConditionFlags:
    """Flags of termination conditions that have one value for all panels."""

    conditions: dict[str, Any] = parts(_groups_of_conditions)  # condition → its flags


class MacroActionsOptions(Config):
    """Show where termination conditions cut responses, side by side; the conditions' flags are those of step 3."""

    rules: ClassVar[Rules] = (
        Rule(
            lambda options: (options.panels.text is None) == (options.panels.jsonl is None),
            "give either --text or --jsonl: the responses to cut.",
        ),
        Rule(
            lambda options: options.panels.jsonl is not None and options.panels.prompt != "",
            "--prompt belongs to --text: rows of --jsonl have prompts of their own. Drop it.",
        ),
        Rule(
            lambda options: options.panels.text is not None and options.panels.limit != SHOWN_ROWS,
            "--limit belongs to --jsonl: every --text is shown. Drop it.",
        ),
    )

    panels: PanelFlags
    conditions: ConditionFlags

    def values_of(self, condition: str) -> dict[str, Any]:
        """The flags of a condition that have one value for all panels."""
        if condition not in CONDITIONS:
            return {}
        names = flags_of(CONDITIONS[condition].flags).keys() - PANEL_AXES
        return {name: value for name, value in self.flat().items() if name in names}
