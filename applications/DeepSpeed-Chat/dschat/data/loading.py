# SPDX-License-Identifier: Apache-2.0
"""The examples of a training step: read and encoded, or taken from the cache.

Small data are read anew every time. Large ones are encoded once, by worker processes, and kept: see
`dschat.data.tokenised`.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import cached_property, partial
from itertools import chain
from pathlib import Path
from typing import Any, Generic, TypeVar

from dschat.base.errors import UserError
from dschat.base.fingerprints import file_hash, template_fingerprint, tokenizer_fingerprint
from dschat.data.cache import cache_folder, finish_entry, key_of, new_entry, open_entry
from dschat.data.examples import PromptExample, SFTExample, empty_responses
from dschat.data.plain_prompts import warn_of_plain_prompts
from dschat.data.prepared.folder import find_prepared
from dschat.data.prepared.read import check_folder, from_prepared, prepared_share
from dschat.data.rows import RawSource
from dschat.data.sources import Share, load_share, open_source, split_for
from dschat.data.tokenised import Examples, NotStorable, encode_rows, workers_for
from dschat.models.template_date import date_note, date_read_by
from dschat.settings.common import CommonConfig

logger = logging.getLogger(__name__)

LARGE = 16_000_000  # bytes of text, from which on data are kept; a fast tokenizer takes some 7 seconds for them
COMPRESSED = 4  # times as much text as bytes in a file of another suffix than these
PLAIN_SUFFIXES = (".jsonl", ".json", ".csv")
HUB_ROW = 2000  # bytes of text in a row of the hub
SLOWER = 10  # times as long takes a slow tokenizer

E = TypeVar("E")
Validate = partial[None]
Make = partial[tuple[list[E], Counter[str]]]


@dataclass(frozen=True)
class StepData(Generic[E]):
    """The examples of a step, and what run.json says of them."""

    train: Sequence[E] = field(repr=False)
    eval: Sequence[E] = field(repr=False)
    sources: list[dict[str, Any]]  # see `dschat.data.sources.described`
    files: tuple[Path, ...]  # local files, in order
    dropped: dict[str, Counter[str]]  # by split, reason → number of rows that encoding left out


class ExampleLoader(Generic[E]):
    """Makes the examples of a step, or finds those that were made before."""

    def __init__(
        self,
        config: CommonConfig,
        kind: type[E],
        make: Make[E],
        validate: Validate | None = None,
        on_prompt: bool | None = None,
    ) -> None:
        """Finds which files there are; reads the data of none.

        Args:
            config: the flags that say which rows the step reads.
            kind: of the examples.
            make: one of `dschat.data.examples` with everything but the rows and `held_out`, by name: the tokenizer
                as `tokenizer`, and settings that are numbers or texts.
            validate: is given the training rows, to warn of what is odd in them; its settings by name.
            on_prompt: in step 1, whether prompts are learnt from, too.

        Raises:
            UserError: there is nothing to read, or a prepared folder is of another tokenizer.
        """
        self._config, self._kind, self._make, self._validate = config, kind, make, validate
        self._tokenizer = make.keywords["tokenizer"]
        self._prepared = find_prepared(config.data.data_path)
        for folder in self._prepared:
            check_folder(folder, self._tokenizer, make.keywords.get("eos_id"), on_prompt, kind)
            if config.columns.apply_chat_template and not folder.applied_chat_template:
                raise UserError(
                    f"--apply_chat_template: the rows of {folder.path} were prepared without it and are encoded "
                    "already. Drop the flag, or give it to `dschat data prepare`."
                )
        if self._prepared:
            self._make = from_prepared(make, kind)
            self._sources = [
                RawSource(str(folder.path), (), None, tuple(chain.from_iterable(folder.files.values())))
                for folder in self._prepared
            ]
        else:
            self._sources = [open_source(path, config.columns) for path in config.data.data_path]

    @property
    def is_small(self) -> bool:
        """Whether encoding takes about as long as starting processes does."""
        return sum(map(_text_size, self._sources)) < (LARGE if self._tokenizer.is_fast else LARGE // SLOWER)

    @cached_property
    def key(self) -> str:
        """The name of these examples in the cache: reads every file."""
        config, tokenizer = self._config, self._tokenizer
        data = config.data
        settings = {name: value for name, value in self._make.keywords.items() if name not in ("kind", "tokenizer")}
        splits = [split_for(path, data.data_split) for path in data.data_path]
        return key_of(
            {
                "sources": [[[str(f), file_hash(f)] for f in source.files] + [source.hub] for source in self._sources],
                "share": [data.data_path, splits, config.step, config.optimisation.seed, asdict(config.columns)],
                "examples": [self._kind.__name__, self._make.func.__qualname__, settings],
                "validate": None
                if self._validate is None
                else [str(value) for value in self._validate.keywords.values()],
                "tokenizer": [tokenizer_fingerprint(tokenizer), template_fingerprint(tokenizer)],
                "date": date_read_by(tokenizer),
            }
        )

    def read(self, show: bool = False) -> StepData[E]:
        """Reads and encodes everything in this process; lists of examples.

        Raises:
            UserError: see `dschat.data.sources.load_share` and the function that makes examples.
        """
        share = self._share(show)
        if show:
            self._validate_rows(share)
        train, dropped = self._make(share.train)
        held_out, dropped_eval = self._make(share.eval, held_out=True)
        return StepData(train, held_out, share.sources, share.files, {"train": dropped, "eval": dropped_eval})

    def find(self, key: str, show: bool = False) -> StepData[E] | None:
        """The examples of an earlier run, by their `key`; None if there are none."""
        found = open_entry(key)
        if found is None:
            return None
        tables, note = found
        if show:
            logger.info("tokenised data of an earlier run are used: %s", cache_folder() / key)
            for message in note["warnings"]:
                logger.warning("%s", message)
        train, held_out = (Examples(self._kind, tables[name]) if name in tables else [] for name in ("train", "eval"))
        dropped = {name: Counter(counts) for name, counts in note["dropped"].items()}
        return StepData(train, held_out, note["sources"], tuple(map(Path, note["files"])), dropped)

    def make(self, show: bool = False) -> StepData[E]:
        """Reads and encodes everything in worker processes and keeps it.

        Where it cannot be kept, a warning says so, and the examples are in memory.

        Raises:
            UserError: as `read`.
        """
        try:
            with _warnings() as warnings:
                share = self._share(show)
                self._validate_rows(share)
            with new_entry(self.key) as folder:
                dropped = {}
                for name, rows in (("train", share.train), ("eval", share.eval)):
                    workers = 1 if self._prepared else workers_for(rows)
                    _, dropped[name] = encode_rows(
                        self._kind, self._make, rows, f"tokenising {name}", workers, show, folder
                    )
                if share.train and dropped["train"].total() == len(share.train):
                    self._make(share.train)  # raises, and says why none is left
                files = [str(file) for file in share.files]
                note = {"sources": share.sources, "files": files, "dropped": dropped, "warnings": warnings}
                finish_entry(folder, note)
        except NotStorable as error:
            logger.info("%s holds values that JSON has not: the tokenised data are not kept for the next run", error)
            return self.read(show)
        except OSError as error:
            logger.warning("%s: tokenised data cannot be kept for the next run: %s", cache_folder(), error)
            return self.read(show)
        found = self.find(self.key)
        if found is None:
            return self.read(show)
        if show:
            logger.info("tokenised data are kept for the next run: %s", cache_folder() / self.key)
        return found

    def _share(self, show: bool) -> Share[Any]:
        if self._prepared:
            return prepared_share(self._prepared, self._tokenizer)
        return load_share(self._config, show)

    def _validate_rows(self, share: Share[Any]) -> None:
        """Warns of empty responses and plain-text prompts, and gives `validate` the training rows.

        Prepared folders were validated before.
        """
        if self._prepared:
            return
        empty = "" if self._kind is PromptExample else empty_responses(share.train, self._kind is SFTExample)
        date = date_note(self._tokenizer)
        if date is not None and any(row.messages is not None for row in share.train):
            logger.info("%s.", date)
        if empty:
            logger.warning("%s; remove these rows if that is not meant", empty)
        warn_of_plain_prompts(share.train, self._tokenizer, self._config.columns.apply_chat_template)
        if self._validate is not None:
            self._validate(share.train)


def _text_size(source: RawSource) -> int:
    """Bytes of text, about."""
    if source.hub:
        return HUB_ROW * sum(split["rows"] for split in source.hub["splits"].values())
    return sum(
        file.stat().st_size * (1 if file.suffix in PLAIN_SUFFIXES else COMPRESSED)
        for file in source.files
        if file.exists()
    )


@contextmanager
def _warnings() -> Iterator[list[str]]:
    """What this package warns of inside, so that it can be said again."""
    messages: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    package = logging.getLogger("dschat.data")
    package.addHandler(handler)
    try:
        yield messages
    finally:
        package.removeHandler(handler)
