# SPDX-License-Identifier: Apache-2.0
"""The flags of where a macro action ends."""

from collections.abc import Collection
from dataclasses import dataclass
from functools import partial
from typing import Any

from dschat.settings.conditions import (
    CONDITIONS,
    Condition,
    FixedFlags,
    ParsingFlags,
    groups_of_conditions,
    names_with_notes,
)
from dschat.settings.flags import check_values, flag, flags_of, make_group, parts
from dschat.settings.rules import Unread, check_choice_or_function


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
        check_choice_or_function("termination_condition", chosen, CONDITIONS)
        for name in CONDITIONS:
            unread = Unread(
                partial(_flags_of_condition, name=name), f"of no effect without --termination_condition {name}."
            )
            unread.check(self)
        Unread(_unread_device, "of no effect, only benepar uses it.").check(self)


def termination_of(**values: Any) -> TerminationFlags:
    """The group with other values of some flags, by name."""
    group: TerminationFlags = make_group(TerminationFlags, values)
    return group


def _flags_of_condition(flags: TerminationFlags, name: str) -> Collection[str]:
    """The flags of a condition that is not chosen."""
    return () if name == flags.termination_condition else flags_of(CONDITIONS[name].flags)


def _unread_device(flags: TerminationFlags) -> Collection[str]:
    parsing: ParsingFlags = flags.conditions["parsing"]
    is_read = flags.termination_condition != "parsing" or parsing.parser == "benepar"
    return () if is_read else ("parser_device",)
