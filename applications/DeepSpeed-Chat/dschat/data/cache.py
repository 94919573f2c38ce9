# SPDX-License-Identifier: Apache-2.0
"""The cache of tokenised examples: tables that are kept between runs.

An entry is a folder with Arrow files and `entry.json`, which says what it was made from. It appears when it is
complete, even if several processes write it at the same time. Its name is a hash of what it was made from.
"""

import importlib.metadata
import json
import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa

import dschat
from dschat.base.atomic import remove, remove_abandoned, writing_folder
from dschat.base.cache_home import cache_home
from dschat.base.fingerprints import content_hash, contents_hash, file_hash
from dschat.base.kept import Kept
from dschat.data.tokenised import Json, open_table

logger = logging.getLogger(__name__)

ENTRY = "entry.json"
PACKAGES = ("transformers", "tokenizers", "jinja2", "pyarrow")
CODE_FOLDERS = ("data", "models")  # folders of this package: what reads, renders and encodes rows


def cache_folder() -> Path:
    """The folder of all entries."""
    return cache_home() / "examples"


def code_version() -> Json:
    """Versions of everything that turns rows into ids: this package's code and the libraries that it calls."""
    package = Path(dschat.__path__[0])
    contents = []
    for folder in CODE_FOLDERS:
        for file in sorted((package / folder).rglob("*.py")):
            contents.append(file.name.encode() + file.read_bytes())
    versions = {name: importlib.metadata.version(name) for name in PACKAGES}
    return {"code": contents_hash(contents), **versions}


class CacheEntry:
    """The tables that were made from one set of files and settings, if there are any."""

    def __init__(self, made_from: Mapping[str, Any]) -> None:
        """Names the entry; reads nothing. `made_from` holds everything that decides what is in it."""
        self.made_from = made_from
        self.key = content_hash(json.dumps(made_from, sort_keys=True))[:32]
        self.folder = cache_folder() / self.key

    def open(self) -> tuple[dict[str, pa.Table], Json] | None:
        """Split → its table, mapped into memory, and the note written with the tables; None if there is no entry.

        A damaged entry is removed.
        """
        if not os.path.exists(self.folder):  # also if the cache may not be read
            return None
        try:
            content = Kept(self.folder / ENTRY, self.made_from).open()
            if content is None:
                raise ValueError(f"{ENTRY} is missing or describes other data")
            for name, expected in content["files"].items():
                if file_hash(self.folder / name) != expected:
                    raise ValueError(f"{name} has changed")
            tables = {}
            for name in content["files"]:
                split = name.removesuffix(".arrow")
                tables[split] = open_table([self.folder / name])
            return tables, content["note"]
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:  # Arrow raises these kinds, too
            logger.warning("the tokenised data in %s are damaged (%s) and are made anew", self.folder, error)
            remove(self.folder)
            return None

    @contextmanager
    def new_folder(self) -> Iterator[Path]:
        """A folder to write `<split>.arrow` files to; `finish` it, and the entry is there after the block.

        If another process has written the entry in the meantime, that one stays.

        Raises:
            OSError: the cache cannot be written.
        """
        remove_abandoned(cache_folder(), ".*")
        with writing_folder(self.folder, shared=True) as folder:
            yield folder

    def finish(self, folder: Path, note: Json) -> None:
        """Writes `entry.json` for the tables in a folder from `new_folder`. Raises OSError."""
        files = {file.name: file_hash(file) for file in sorted(folder.glob("*.arrow"))}
        Kept(folder / ENTRY, self.made_from).write({"files": files, "note": note})
