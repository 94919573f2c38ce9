# SPDX-License-Identifier: Apache-2.0
"""A checkpoint's manifest: what the run is made of, and the size and SHA-256 of every file."""

import hashlib
import json
import os
from pathlib import Path
from typing import NamedTuple

from dschat.run.distributed import barrier, broadcast_object, gather_objects, rank, world_size
from dschat.run.progress import Json

MANIFEST = "manifest.json"


class File(NamedTuple):
    """What a manifest says of a file."""

    size: int
    sha256: str


def read_manifest(folder: Path) -> Json:
    """A checkpoint's manifest; {} where there is none that can be read."""
    try:
        found = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) and "sha256" in found else {}


def digest(manifest: Json) -> str:
    """SHA-256 of a manifest without its own."""
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode("utf-8")).hexdigest()


def hash_together(folder: Path) -> dict[str, File]:
    """Size and SHA-256 of every file below a folder but the manifest, each rank its share; and flushes them."""
    names = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    names = broadcast_object([name for name in names if name != MANIFEST])
    own: dict[str, File] = {}
    for name in names[rank() :: world_size()]:
        try:
            with open(folder / name, "rb") as stream:
                os.fsync(stream.fileno())
                size = os.fstat(stream.fileno()).st_size
                own[name] = File(size, hashlib.file_digest(stream, "sha256").hexdigest())
        except OSError:
            continue  # it counts as missing
    barrier()  # sizes differ: the time-out of other collectives shall not count
    return {name: found for part in gather_objects(own) for name, found in part.items()}
