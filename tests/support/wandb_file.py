# SPDX-License-Identifier: Apache-2.0
"""What an offline W&B run holds, read from its file without W&B's own reader: a log of LevelDB's form."""

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

BLOCK = 32768  # bytes; no record's header crosses the end of one
HEAD = 7  # bytes of the file's header, and of a record's: checksum, length, kind


def history_of(folder: Path) -> list[dict[str, Any]]:
    """The rows that were logged, in order, of all offline runs below a folder, by age; W&B's own columns left out."""
    from wandb.proto import wandb_internal_pb2 as protocol

    rows = []
    for file in sorted(folder.glob("wandb/*run-*/run-*.wandb"), key=lambda file: file.parent.name):
        for content in _records(file.read_bytes()):
            record = protocol.Record()  # type: ignore[attr-defined]
            record.ParseFromString(content)
            if record.WhichOneof("record_type") == "history":
                items = ((item.key or item.nested_key[0], item.value_json) for item in record.history.item)
                rows.append({name: json.loads(value) for name, value in items if not name.startswith("_")})
    return rows


def ids_of(folder: Path) -> list[str]:
    """The ids of the offline runs below a folder, by age."""
    files = sorted(folder.glob("wandb/*run-*/run-*.wandb"), key=lambda file: file.parent.name)
    return [file.stem.removeprefix("run-") for file in files]


def _records(content: bytes) -> Iterator[bytes]:
    place, parts = HEAD, b""
    while place + HEAD <= len(content):
        if BLOCK - place % BLOCK < HEAD:
            place += BLOCK - place % BLOCK
            continue
        _, length, kind = struct.unpack("<IHB", content[place : place + HEAD])
        part = content[place + HEAD : place + HEAD + length]
        place += HEAD + length
        parts = part if kind in (1, 2) else parts + part
        if kind in (1, 4):  # whole, or the last part
            yield parts
