# SPDX-License-Identifier: Apache-2.0
"""The flags of where a macro action ends, and of the command that shows it."""

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

from dschat.base.errors import UserError
from dschat.settings.common import SEED, OptimisationFlags
from dschat.settings.conditions import (
    CONDITIONS,
    Condition,
    FixedFlags,
    ParsingFlags,
    groups_of_conditions,
    names_with_notes,
    parse_ngram,
)
from dschat.settings.config import Config
from dschat.settings.flags import (
    ABOVE_0,
    AT_LEAST_0,
    NOT_EMPTY,
    check_values,
    default_of,
    flag,
    flags_of,
    make_group,
    parts,
)
from dschat.settings.rules import Rule, Rules, check_function_path

logger = logging.getLogger(__name__)


@dataclass(kw_only=True, frozen=True)
class TerminationFlags:
    """Where a macro action ends: the condition, and the flags of each."""

    section = "macro actions"

    termination_condition: str = flag(
        f"where macro actions end: {names_with_notes()}, or module.py:function with (trajectory, tokenizer) -> ends",
        "fixed",
    )
    isolate_last_token: bool = flag("make the last token of a response (usually EOS) a macro action of its own", False)
    conditions: dict[str, Any] = parts(groups_of_conditions)  # condition → its flags

    @property
    def condition(self) -> Condition | None:
        """The condition; None if it is a function of the user's."""
        return CONDITIONS.get(self.termination_condition)

    @property
    def title(self) -> str:
        """Title of a panel of the comparison."""
        condition = self.condition
        title = "" if condition is None else condition.title(self.conditions[condition.name])
        return title or self.termination_condition

    @property
    def ngram(self) -> float:
        """Tokens in a macro action of the condition `fixed`."""
        fixed: FixedFlags = self.conditions["fixed"]
        return fixed.ngram

    @property
    def reads_logprobs(self) -> bool:
        """Whether the condition reads log-probs, the reference's or the policy's; a user's function may."""
        return self.condition is None or self.condition.logprobs is not None

    @property
    def reads_policy(self) -> bool:
        """Whether the condition reads the policy's log-probs; a user's function may."""
        return self.condition is None or self.condition.logprobs == "policy"

    @property
    def has_single_tokens(self) -> bool:
        """Whether every token is a macro action."""
        return self.termination_condition == "fixed" and self.ngram == 1

    def check_termination(self) -> None:
        """Check these flags, alone and against each other, and warn of those without effect. Raises UserError."""
        check_values(self)
        for name, condition in CONDITIONS.items():
            condition.check(self.conditions[name])
        chosen = self.termination_condition
        if ":" in chosen:
            check_function_path("termination_condition", chosen)
        elif chosen not in CONDITIONS:
            names = ", ".join(CONDITIONS)
            raise UserError(f"--termination_condition {chosen} is unknown: use {names} or module.py:function.")
        for name in CONDITIONS:
            changed = [f"--{flag}" for flag in changed_flags(self.conditions[name])]
            if changed and chosen != name:
                logger.warning("%s: of no effect without --termination_condition %s.", ", ".join(changed), name)
        parsing: ParsingFlags = self.conditions["parsing"]
        device = parsing.parser_device
        if chosen == "parsing" and parsing.parser != "benepar" and device != default_of(ParsingFlags, "parser_device"):
            logger.warning("--parser_device %s: of no effect, only benepar uses it.", device)


def termination_of(**values: Any) -> TerminationFlags:
    """The group with other values of some flags, by name."""
    group: TerminationFlags = make_group(TerminationFlags, values)
    return group


def changed_flags(group: Any) -> list[str]:
    """The flags of a group whose value is not the default."""
    changed: list[str] = []
    for name, declared in flags_of(type(group)).items():
        if getattr(group, name) != declared.default:
            changed.append(name)
    return changed


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
    ngram: list[Annotated[float, parse_ngram]] = flag(_help_of(FixedFlags, "ngram"), factory=lambda: [5])
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
    """Condition → its group of flags, but for groups whose flags `PanelFlags` declares.

    Raises:
        ValueError: `PanelFlags` declares some of a group's flags, so that the others would be missing.
    """
    declared = flags_of(PanelFlags).keys()
    independent: dict[str, type] = {}
    for name, group in groups_of_conditions().items():
        missing = flags_of(group).keys() - declared
        if not missing:
            continue
        if len(missing) < len(flags_of(group)):
            raise ValueError(f"PanelFlags lacks {', '.join(sorted(missing))} of the condition {name}")
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
        values = self.flat()
        names = []
        for name in flags_of(CONDITIONS[condition].flags):
            if name not in PANEL_AXES:
                names.append(name)
        return {name: values[name] for name in names}
