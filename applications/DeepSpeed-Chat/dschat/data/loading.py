# SPDX-License-Identifier: Apache-2.0
"""The examples of a training step: read and encoded, or taken from the cache.

Data are encoded once and kept in the cache. The next run, and the other processes of this one, map them into memory.
An entry of the cache is a folder, named by a hash of everything that its examples depend on. It holds the Arrow files
of `encode_rows`, and `entry.json` with the record of the sources. It appears when it is complete, even if several
processes write it at the same time.
"""

from __future__ import annotations

import importlib.metadata
import json
import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import cached_property, partial
from itertools import chain
from pathlib import Path
from typing import Any, Generic, TypeVar

import dschat
from dschat.base.atomic import remove, remove_abandoned, writing_folder
from dschat.base.cache_home import CACHE_VARIABLE, cache_home
from dschat.base.errors import UserError
from dschat.base.fingerprints import (
    content_hash,
    contents_hash,
    file_hash,
    template_fingerprint,
    tokenizer_fingerprint,
)
from dschat.data.examples import PromptExample, SFTExample
from dschat.data.files import os_error_behind
from dschat.data.notes import warn_of_plain_prompts, warn_of_responses
from dschat.data.prepared.folder import find_prepared
from dschat.data.rows import RawSource
from dschat.data.sources import Share, is_published, load_share, open_source, split_for
from dschat.data.tokenised import Examples, NotStorable, encode_rows, open_table
from dschat.models.template_date import date_note, date_read_by
from dschat.settings.common import CommonConfig

logger = logging.getLogger(__name__)

ENTRY = "entry.json"
PACKAGES = ("transformers", "tokenizers", "jinja2", "pyarrow")
CODE_FOLDERS = ("data", "models")  # folders of this package: what reads, renders and encodes rows

E = TypeVar("E")
Validate = partial[None]
Make = partial[tuple[list[E], Counter[str]]]


@dataclass(frozen=True)
class StepData(Generic[E]):
    """The examples of a step, and the record of them in run.json."""

    train: Sequence[E] = field(repr=False)
    eval: Sequence[E] = field(repr=False)
    sources: list[dict[str, Any]]  # see `dschat.data.sources.described`
    files: tuple[Path, ...]  # local files, in order
    dropped: dict[str, Counter[str]]  # split → reason → number of rows that encoding left out


def cache_folder() -> Path:
    """The folder of all entries."""
    return cache_home() / "examples"


def encoder_version() -> dict[str, str]:
    """Versions of everything that turns rows into ids: this package's code and the libraries that it calls."""
    package = Path(dschat.__path__[0])
    contents = []
    for folder in CODE_FOLDERS:
        for file in sorted((package / folder).rglob("*.py")):
            contents.append(file.name.encode() + file.read_bytes())
    versions = {name: importlib.metadata.version(name) for name in PACKAGES}
    return {"code": contents_hash(contents), **versions}


class ExampleLoader(Generic[E]):
    """Encodes the examples of a step, or opens those of an earlier run."""

    def __init__(
        self,
        config: CommonConfig,
        kind: type[E],
        make: Make[E],
        validate: Validate | None = None,
        on_prompt: bool | None = None,
        reads_prompts: bool = True,
    ) -> None:
        """Looks which files there are; reads no rows.

        Args:
            config: the flags that say which rows the step reads.
            kind: kind of the examples.
            make: one of the functions of `dschat.data.examples`, with all arguments but the rows and `held_out` bound
                by name: the tokenizer as `tokenizer`, and settings that are numbers or texts.
            validate: called with the training rows, to warn of what is odd in them; its settings are bound by name.
            on_prompt: in step 1, whether prompts are trained on, too.
            reads_prompts: whether the model reads the rows' prompts; otherwise environments write what it reads.

        Raises:
            UserError: there is nothing to read, or a prepared folder was made with another tokenizer.
        """
        self._config = config
        self._kind = kind
        self._make = make
        self._validate = validate
        self._reads_prompts = reads_prompts
        self._tokenizer = make.keywords["tokenizer"]
        self._prepared = find_prepared(config.data.data_path)
        self._sources: list[RawSource] = []
        if self._prepared:
            from dschat.data.prepared.read import check_folder, from_prepared

            for folder in self._prepared:
                check_folder(folder, self._tokenizer, make.keywords.get("eos_id"), on_prompt, kind)
                if config.columns.apply_chat_template and not folder.info["flags"]["apply_chat_template"]:
                    raise UserError(
                        f"--apply_chat_template: the rows of {folder.path} were prepared without it and are encoded "
                        "already. Drop the flag, or give it to `dschat data prepare`."
                    )
                files = tuple(chain.from_iterable(folder.files.values()))
                self._sources.append(RawSource(str(folder.path), (), None, files))
            self._make = from_prepared(make, kind)
        else:
            self._sources = [open_source(path, config.columns) for path in config.data.data_path]

    @cached_property
    def key(self) -> str:
        """Name of the entry: a hash of everything that the examples depend on. Reads every file."""
        data = self._config.data
        sources = []
        for source in self._sources:
            hashes = {str(file): file_hash(file) for file in source.files}
            sources.append({"files": hashes, "hub": source.hub})
        settings = {}
        for name, value in self._make.keywords.items():
            if name not in ("kind", "tokenizer"):
                settings[name] = str(value)
        warnings = None
        if self._validate is not None:
            warnings = [str(value) for value in self._validate.keywords.values()]
        made_from = {
            "sources": sources,
            "data_path": data.data_path,
            "splits": [split_for(path, data.data_split) for path in data.data_path],
            "published": [is_published(path) for path in data.data_path],
            "eval share": data.eval_share,
            "step": self._config.step,
            "columns": asdict(self._config.columns),
            "examples": [self._kind.__name__, self._make.func.__qualname__, settings],
            "warnings": warnings,
            "reads prompts": self._reads_prompts,
            "tokenizer": tokenizer_fingerprint(self._tokenizer),
            "chat template": template_fingerprint(self._tokenizer),
            "date": date_read_by(self._tokenizer),
            "version": encoder_version(),
        }
        return content_hash(json.dumps(made_from, sort_keys=True))[:32]

    def read(self, show: bool = False) -> StepData[E]:
        """Reads and encodes all rows in this process, without the cache; lists of examples.

        Raises:
            UserError: see `dschat.data.sources.load_share` and the function that makes examples.
        """
        share = self._share(show)
        if show:
            self._validate_rows(share)
        return self._encode_in_memory(share)

    def open(self, key: str, show: bool = False) -> StepData[E] | None:
        """The examples in the cache, of this or another process' `key`; None if there are none.

        A damaged entry is removed.
        """
        folder = cache_folder() / key
        try:
            note = json.loads((folder / ENTRY).read_text())
            data = StepData(
                train=self._open_split(folder, "train"),
                eval=self._open_split(folder, "eval"),
                sources=note["sources"],
                files=tuple(Path(file) for file in note["files"]),
                dropped={split: Counter(counts) for split, counts in note["dropped"].items()},
            )
        except (FileNotFoundError, NotADirectoryError, PermissionError):
            return None
        except (OSError, ValueError, KeyError, TypeError) as error:  # Arrow raises these kinds, too
            logger.warning("the tokenised data in %s are damaged (%s) and are made anew", folder, error)
            remove(folder)
            return None
        if show:
            logger.info("tokenised data of an earlier run are used: %s", folder)
            for message in note["warnings"]:
                logger.warning("%s", message)
        return data

    def _open_split(self, folder: Path, split: str) -> Examples[E]:
        return Examples(self._kind, open_table(self._kind, sorted(folder.glob(f"{split}*.arrow"))))

    def make(self, show: bool = False) -> StepData[E]:
        """Reads all rows, encodes them and keeps the examples in the cache.

        If they cannot be kept, a warning says so, and they are in memory.

        Raises:
            UserError: see `read`.
        """
        with _collect_warnings() as warnings:
            share = self._share(show)
            self._validate_rows(share)
        try:
            remove_abandoned(cache_folder(), ".*")
            with writing_folder(cache_folder() / self.key, shared=True) as folder:
                dropped = self._encode_to_files(share, folder)
                files = [str(file) for file in share.files]
                note = {"sources": share.sources, "files": files, "dropped": dropped, "warnings": warnings}
                (folder / ENTRY).write_text(json.dumps(note))
        except NotStorable as error:
            logger.info("%s holds values that JSON has not: the tokenised data are not kept for the next run", error)
            return self._encode_in_memory(share)
        except (OSError, ValueError) as error:
            cause = os_error_behind(error)  # on a full disk, the library closes its file once more than it opened it
            if cause is None:
                raise
            logger.warning(
                "%s: tokenised data cannot be kept for the next run: %s. Set %s to a folder that can be written.",
                cache_folder(),
                cause,
                CACHE_VARIABLE,
            )
            return self._encode_in_memory(share)
        data = self.open(self.key)
        if data is None:
            return self._encode_in_memory(share)
        if show:
            logger.info("tokenised data are kept for the next run: %s", cache_folder() / self.key)
        return data

    def _encode_to_files(self, share: Share[Any], folder: Path) -> dict[str, Counter[str]]:
        """Writes Arrow files of both splits; split → reason → number of rows without an example."""
        dropped = {}
        for split, rows in (("train", share.train), ("eval", share.eval)):
            file = folder / f"{split}.arrow"
            _, dropped[split] = encode_rows(self._kind, self._make, rows, f"tokenising {split}", file)
        if share.train and dropped["train"].total() == len(share.train):
            self._make(share.train)  # raises, and says why none is left
        return dropped

    def _encode_in_memory(self, share: Share[Any]) -> StepData[E]:
        train, dropped = self._make(share.train)
        held_out, dropped_eval = self._make(share.eval, held_out=True)
        all_dropped = {"train": dropped, "eval": dropped_eval}
        return StepData(train, held_out, share.sources, share.files, all_dropped)

    def _share(self, show: bool) -> Share[Any]:
        if self._prepared:
            from dschat.data.prepared.read import prepared_share

            return prepared_share(self._prepared, self._tokenizer)
        return load_share(self._config, show)

    def _validate_rows(self, share: Share[Any]) -> None:
        """Warns of odd responses and of plain-text prompts, and calls `validate` with the training rows.

        Rows of prepared folders were validated when they were prepared.
        """
        if self._prepared:
            return
        date = date_note(self._tokenizer)
        if date is not None and any(row.messages is not None for row in share.train):
            logger.info("%s.", date)
        if self._kind is not PromptExample:
            warn_of_responses(share.train, self._kind is SFTExample)
        if self._reads_prompts:
            warn_of_plain_prompts(share.train, self._tokenizer, self._config.columns.apply_chat_template)
        if self._validate is not None:
            self._validate(share.train)


@contextmanager
def _collect_warnings() -> Iterator[list[str]]:
    """Collects the warnings of this package, so that later runs can repeat them."""
    messages: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    package = logging.getLogger("dschat.data")
    package.addHandler(handler)
    try:
        yield messages
    finally:
        package.removeHandler(handler)
