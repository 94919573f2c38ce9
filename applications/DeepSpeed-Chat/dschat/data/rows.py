# SPDX-License-Identifier: Apache-2.0
"""One row of data, whatever format it came in, and the checks that every format shares."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from dschat.base.errors import UserError

COLUMNAR = (".parquet", ".arrow")  # suffixes of files that hold columns, not rows


@dataclass(frozen=True)
class Row:
    """One row of data. Exactly one of `prompt` and `messages` is set."""

    prompt: str | None  # prompt text, used as is
    # The conversation before the response, each with role, content and further fields; for the chat template.
    messages: list[dict[str, Any]] | None
    chosen: str | None  # preferred (or only) response text; None if the row has none
    rejected: str | None  # the other response text; None if the row has none
    extra: dict[str, Any] = field(repr=False)  # the row as it was read, given to reward functions
    # Where the row stands, for messages: "file.jsonl:12", "file.parquet row 12", "owner/name train row 12".
    origin: str
    # Why `chosen` is None in a row that is in order all the same: step 1 drops and counts it. None where a response is
    # to be expected.
    no_response: str | None = None
    # The preferred and the other response as messages, where they have more fields than role and content.
    chosen_message: dict[str, Any] | None = None
    rejected_message: dict[str, Any] | None = None
    # Variables of the chat template beside the messages: tools, documents, those of column chat_template_kwargs.
    template_arguments: dict[str, Any] = field(default_factory=dict)

    def reply(self, column: Literal["chosen", "rejected"]) -> dict[str, Any] | None:
        """A response as the assistant's message; None if the row has none."""
        message = self.chosen_message if column == "chosen" else self.rejected_message
        text = self.chosen if column == "chosen" else self.rejected
        if message is not None or text is None:
            return message
        return {"role": "assistant", "content": text}


@dataclass(frozen=True)
class RawSource:
    """A source whose rows are not parsed yet: pairs of an origin and what stands there."""

    name: str  # name of the folder, of the file without its suffix, or of the data set on the hub
    train: Iterable[tuple[str, Any]]  # training rows
    eval: Iterable[tuple[str, Any]] | None  # evaluation rows; None where the source has none of its own
    files: tuple[Path, ...] = ()  # the local files, in order; none where the rows come from the hub
    # Where rows of the hub come from: id, revision, and per split rows and fingerprint.
    hub: dict[str, Any] | None = None

    @property
    def fills_nulls(self) -> bool:
        """Whether rows come from columns (parquet, Arrow, the hub), where null fills the fields of other rows."""
        return self.hub is not None or any(file.suffix in COLUMNAR for file in self.files)


def check_text(value: Any, what: str, origin: str, remedy: str = "correct the row") -> None:
    """Raises UserError, which names the row, unless a value is text that UTF-8 can express."""
    if not isinstance(value, str):
        raise UserError(f"{origin}: {what} must be text, not {kind_of(value)}; {remedy}.")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise UserError(
            f"{origin}: {what} holds half of a character (a lone surrogate) at position {error.start}; {remedy}."
        ) from error


def is_plain(value: object) -> bool:
    """Whether JSON keeps a value as it is."""
    if value is None or type(value) in (str, bool, int, float):
        return True
    if type(value) is list:
        return all(map(is_plain, value))
    return type(value) is dict and all(type(name) is str and is_plain(item) for name, item in value.items())


def in_words(counts: Mapping[str, int]) -> str:
    """Names with their numbers."""
    return ", ".join(f"{reason}: {count}" for reason, count in counts.items())


def kind_of(value: Any) -> str:
    """A value's type, in words."""
    names = {type(None): "null", dict: "an object", list: "a list", str: "text", bool: "true or false"}
    return names.get(type(value), f"a value of type {type(value).__name__}")
