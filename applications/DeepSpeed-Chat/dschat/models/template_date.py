# SPDX-License-Identifier: Apache-2.0
"""The date in chat templates: the same for a whole run, on every process and after a resume.

Some templates write today's date into every conversation with the function `strftime_now` (Llama 3.2, Granite). Here
that function returns midnight of the date in RUN_VARIABLE, which is set when a run starts and inherited by worker
processes. Without it, the date is that of DATE_VARIABLE, which users set, or today.
"""

from __future__ import annotations

import json
import os
from datetime import date, datetime, tzinfo
from typing import TYPE_CHECKING, Self

from dschat.base.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

DATE_VARIABLE = "MA_RLHF_DATE"
RUN_VARIABLE = "MA_RLHF_RUN_DATE"
CLOCK = "strftime_now"  # the function that templates call
SETTING = "template-date"  # among the settings of a journal


class TemplateClock(datetime):
    """Replaces the system's clock in `strftime_now`."""

    @classmethod
    def now(cls, tz: tzinfo | None = None) -> Self:
        """Midnight of `template_date`."""
        return cls.fromisoformat(template_date()).replace(tzinfo=tz)


def fix_template_clock() -> None:
    """Makes `strftime_now` in chat templates read `TemplateClock`."""
    from transformers.utils import chat_template_utils

    vars(chat_template_utils)["datetime"] = TemplateClock


def template_date() -> str:
    """The date in chat templates, as in 2026-11-26; fixed by the first call in a process."""
    chosen = os.environ.get(RUN_VARIABLE)
    return begin_date() if chosen is None else chosen


def begin_date(earlier: str | None = None) -> str:
    """Fixes the date of a run, for this process and those that it starts; returns it.

    Args:
        earlier: date of the run that is resumed; None for a new run.

    Raises:
        UserError: $MA_RLHF_DATE is not a date.
    """
    user_date = os.environ.get(DATE_VARIABLE)
    chosen = earlier or user_date or date.today().isoformat()
    try:
        chosen = date.fromisoformat(chosen).isoformat()  # 20261126 is a date, too
    except ValueError as error:
        raise UserError(f"{DATE_VARIABLE} {chosen}: give a date as in 2026-11-26, or unset it.") from error
    os.environ[RUN_VARIABLE] = chosen
    return chosen


def reads_clock(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the tokenizer's chat template, or one of several, writes the date."""
    return tokenizer.chat_template is not None and CLOCK in json.dumps(tokenizer.chat_template)


def date_read_by(tokenizer: PreTrainedTokenizerBase) -> str | None:
    """The date that the tokenizer's chat template writes; None if it writes none."""
    return template_date() if reads_clock(tokenizer) else None


def date_note(tokenizer: PreTrainedTokenizerBase) -> str | None:
    """A note for users about a template that writes the date; None for other templates."""
    if not reads_clock(tokenizer):
        return None
    return (
        f"the chat template writes the date ({CLOCK}): {template_date()} now. A run keeps the date of its start, also "
        f"when it continues; {DATE_VARIABLE}=YYYY-MM-DD before a command sets another"
    )
