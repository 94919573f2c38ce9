# SPDX-License-Identifier: Apache-2.0
"""One row of data, whatever format it came in, and the checks that every format shares."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias

from dschat.base.errors import UserError

Split = Literal["all", "eval", "train"]  # rows of a source that a command without training reads
ResponseColumn = Literal["chosen", "rejected"]
SkipReason: TypeAlias = str  # why nothing can be made of a row, as it is counted and shown
BOTH_RESPONSES: Sequence[ResponseColumn] = ("chosen", "rejected")
COLUMNAR = (".parquet", ".arrow")  # suffixes of files that hold columns, not rows


@dataclass(frozen=True)
class Row:
    """One row of data. Exactly one of `prompt` and `messages` is set."""

    prompt: str | None  # prompt text, used as it is
    # The conversation before the response, for the chat template: role, content and other fields of each message.
    messages: list[dict[str, Any]] | None
    chosen: str | None  # text of the preferred (or only) response; None if the row has none
    rejected: str | None  # text of the other response; None if the row has none
    extra: dict[str, Any] = field(repr=False)  # the row as it was read, for reward functions
    # Where the row comes from, for messages: "file.jsonl:12", "file.parquet row 12", "owner/name train row 12".
    origin: str
    # Why a valid row has no response (`chosen` is None): step 1 drops and counts it. None if it should have one.
    no_response: str | None = None
    # The responses as messages, if they have other fields than role and content.
    chosen_message: dict[str, Any] | None = None
    rejected_message: dict[str, Any] | None = None
    # Further variables of the chat template: tools, documents and those of column chat_template_kwargs.
    template_arguments: dict[str, Any] = field(default_factory=dict)

    def reply(self, column: ResponseColumn) -> dict[str, Any] | None:
        """A response as a message of the assistant; None if the row has none."""
        if column == "chosen":
            message = self.chosen_message
            text = self.chosen
        else:
            message = self.rejected_message
            text = self.rejected
        if message is None and text is not None:
            return {"role": "assistant", "content": text}
        return message

    def replies(self, columns: Sequence[ResponseColumn]) -> list[dict[str, Any]]:
        """The responses of columns as messages, without those that the row lacks."""
        replies = [self.reply(column) for column in columns]
        return [reply for reply in replies if reply is not None]


@dataclass(frozen=True)
class RawSource:
    """A source whose rows are not parsed yet: pairs of an origin and the columns."""

    name: str  # name of the folder, of the file without its suffix, or of the data set on the hub
    train: Iterable[tuple[str, Any]] | None  # training rows; None if the source has only evaluation rows
    eval: Iterable[tuple[str, Any]] | None  # evaluation rows; None if the source has no split for them
    files: tuple[Path, ...] = ()  # local files, in order; empty for data of the hub
    hub: dict[str, Any] | None = None  # data of the hub: id, revision, and rows and fingerprint of every split
    splits: tuple[str, ...] = ()  # names of the training and evaluation split, if they have names
    unread: tuple[str, ...] = ()  # names of other training and evaluation splits, which are not read

    @property
    def fills_nulls(self) -> bool:
        """Whether rows come from columns (parquet, Arrow, the hub), where null fills the fields of other rows."""
        return self.hub is not None or any(file.suffix in COLUMNAR for file in self.files)


def check_text(value: Any, what: str, origin: str, remedy: str = "correct the row") -> None:
    """Raises UserError, which names the row, unless a value is text that UTF-8 can encode."""
    if not isinstance(value, str):
        raise UserError(f"{origin}: {what} must be text, not {kind_of(value)}; {remedy}.")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise UserError(
            f"{origin}: {what} holds half of a character (a lone surrogate) at position {error.start}; {remedy}."
        ) from error


def check_texts_in(value: object, what: str, origin: str) -> None:
    """Raises UserError, which names the row, unless UTF-8 can encode every text in a value, names of fields too."""
    try:
        json.dumps(value, ensure_ascii=False, default=str).encode()  # much quicker than a look at each text
    except UnicodeEncodeError as error:
        raise UserError(f"{origin}: {what} holds half of a character (a lone surrogate); correct the row.") from error


def is_plain(value: object) -> bool:
    """Whether JSON keeps a value as it is."""
    if value is None or type(value) in (str, bool, int, float):
        return True
    if type(value) is list:
        return all(map(is_plain, value))
    if type(value) is dict:
        return all(type(name) is str and is_plain(item) for name, item in value.items())
    return False


def in_words(counts: Mapping[str, int]) -> str:
    """Counts as text: "too long: 3, too short: 1"."""
    return ", ".join(f"{reason}: {count}" for reason, count in counts.items())


def kind_of(value: Any) -> str:
    """The type of a value in words, such as "an object" or "null"."""
    names = {type(None): "null", dict: "an object", list: "a list", str: "text", bool: "true or false"}
    return names.get(type(value), f"a value of type {type(value).__name__}")
