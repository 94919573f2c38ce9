# SPDX-License-Identifier: Apache-2.0
"""Tables of tokenised examples that are kept between runs: the entries of the cache.

An entry is a folder with Arrow files and `entry.json`, whole or not there, whoever else writes it at the same time.
Its name is the fingerprint of all that it was made from.
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

from dschat.base.atomic import remove, remove_abandoned, writing_folder
from dschat.base.cache_home import cache_home
from dschat.base.fingerprints import content_hash, contents_hash, file_hash
from dschat.data.tokenised import Json, open_table

logger = logging.getLogger(__name__)

ENTRY = "entry.json"
PACKAGES = ("transformers", "tokenizers", "jinja2", "datasets", "pyarrow")


def cache_folder() -> Path:
    """Where entries are kept."""
    return cache_home() / "examples"


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
    if not os.path.exists(folder):  # also where the cache may not be read
        return None
    try:
        entry = json.loads((folder / ENTRY).read_text(encoding="utf-8"))
        for name, known in entry["files"].items():
            if file_hash(folder / name) != known:
                raise ValueError(f"{name} has changed")
        tables = {split: open_table([folder / name for name in names]) for split, names in entry["tables"].items()}
        return tables, entry["note"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:  # Arrow's errors are of these kinds
        logger.warning("the tokenised data in %s are damaged (%s) and are made anew", folder, error)
        remove(folder)
        return None


@contextmanager
def new_entry(key: str) -> Iterator[Path]:
    """Inside, tables are written to a folder; `finish_entry` closes it, and then it is in its place.

    Unless another process was first: then that one's stays.

    Raises:
        OSError: the cache cannot be written.
    """
    remove_abandoned(cache_folder(), ".*")
    with writing_folder(cache_folder() / key, shared=True) as folder:
        yield folder


def finish_entry(folder: Path, note: Json) -> None:
    """Writes what is to be known of the tables in a folder."""
    names = sorted(file.name for file in folder.glob("*.arrow"))
    tables: dict[str, list[str]] = {}
    for name in names:
        tables.setdefault(name.removesuffix(".arrow").split("_")[0], []).append(name)
    entry = {"files": {name: file_hash(folder / name) for name in names}, "tables": tables, "note": note}
    (folder / ENTRY).write_text(json.dumps(entry), encoding="utf-8")
