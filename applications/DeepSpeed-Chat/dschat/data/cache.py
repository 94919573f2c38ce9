# SPDX-License-Identifier: Apache-2.0
"""Examples kept on disk between runs, by what they were made from.

An entry is a folder with one Arrow file per split and `entry.json`, whole or not there, whoever else writes it at the
same time.
"""

from __future__ import annotations

import importlib.metadata
import json
import logging
import os
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa

from dschat.common.atomic import remove, remove_abandoned, writing_folder
from dschat.common.fingerprints import content_hash, contents_hash

logger = logging.getLogger(__name__)

CACHE_VARIABLE = "MA_RLHF_CACHE"
DEFAULT_FOLDER = "~/.cache/ma-rlhf"
ENTRY = "entry.json"
PIECE = 1 << 24  # bytes
PACKAGES = ("transformers", "tokenizers", "jinja2", "pyarrow")

Json = dict[str, Any]


def cache_folder() -> Path:
    """Where entries are kept."""
    return Path(os.environ.get(CACHE_VARIABLE) or DEFAULT_FOLDER).expanduser() / "examples"


def code_version() -> Json:
    """What the same rows may come out differently with: this package's code for data, and its libraries."""
    files = sorted(Path(__file__).parent.rglob("*.py"))
    code = contents_hash(file.name.encode() + file.read_bytes() for file in files)
    return {"code": code, **{name: importlib.metadata.version(name) for name in PACKAGES}}


def key_of(made_from: Mapping[str, Any]) -> str:
    """The name of an entry: a hash of all that decides what is in it."""
    text = json.dumps({**made_from, "version": code_version()}, sort_keys=True, default=str)
    return content_hash(text)[:32]


def open_entry(key: str) -> tuple[dict[str, pa.Table], Json] | None:
    """The tables of an entry, mapped into memory, and what was written with them; None where there is none.

    An entry that is damaged is removed.
    """
    folder = cache_folder() / key
    if not folder.exists():
        return None
    try:
        entry = json.loads((folder / ENTRY).read_text(encoding="utf-8"))
        tables = {}
        for name, checksum in entry["files"].items():
            file = folder / f"{name}.arrow"
            if _checksum(file) != checksum:
                raise ValueError(f"{file.name} has changed")
            tables[name] = pa.ipc.open_file(pa.memory_map(str(file))).read_all()
        return tables, entry["note"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, pa.ArrowException) as error:
        logger.warning("the tokenised data in %s are damaged (%s) and are made anew", folder, error)
        remove(folder)
        return None


class EntryWriter:
    """Writes the tables of an entry, batch by batch."""

    def __init__(self, folder: Path, schema: pa.Schema) -> None:
        self._folder, self._schema = folder, schema
        self._writers: dict[str, pa.ipc.RecordBatchFileWriter] = {}

    def write(self, name: str, batch: pa.RecordBatch | None = None) -> None:
        """Adds to a table, which is made where there is none yet."""
        if name not in self._writers:
            self._writers[name] = pa.ipc.new_file(str(self._folder / f"{name}.arrow"), self._schema)
        if batch is not None:
            self._writers[name].write_batch(batch)

    def finish(self, note: Json) -> None:
        """Closes the tables and writes what is to be known of them."""
        for writer in self._writers.values():
            writer.close()
        files = {name: _checksum(self._folder / f"{name}.arrow") for name in self._writers}
        (self._folder / ENTRY).write_text(json.dumps({"files": files, "note": note}), encoding="utf-8")


@contextmanager
def new_entry(key: str, schema: pa.Schema) -> Iterator[EntryWriter]:
    """Inside, an entry is written; afterwards it is in its place, unless another process was first.

    Raises:
        OSError: the cache cannot be written.
    """
    remove_abandoned(cache_folder(), ".*")  # also what earlier versions called otherwise
    with writing_folder(cache_folder() / key, shared=True) as folder:
        yield EntryWriter(folder, schema)


def _checksum(file: Path) -> str:
    """Length and CRC-32: finds damage, in a second per gigabyte or less."""
    checksum, size = 0, 0
    with open(file, "rb") as stream:
        while piece := stream.read(PIECE):
            checksum, size = zlib.crc32(piece, checksum), size + len(piece)
    return f"{size}-{checksum:08x}"
