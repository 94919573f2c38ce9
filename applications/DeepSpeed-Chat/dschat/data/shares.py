# SPDX-License-Identifier: Apache-2.0
"""The share of every ``--data_path`` that belongs to one training step."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from dschat.data.formats.rows import DataKeys, Row
from dschat.data.sources import load_source
from dschat.data.splits import split_part
from dschat.errors import UserError

R_co = TypeVar("R_co", covariant=True)


class ShareFlags(Protocol):
    """What decides which rows a step reads; every configuration of a step holds these flags."""

    data_path: list[str]
    data_split: str
    seed: int
    step: ClassVar[int]  # of the pipeline, 1, 2 or 3: which part of `data_split` it uses
    prompt_key: str
    chosen_key: str
    rejected_key: str
    response_key: str
    messages_key: str


@dataclass(frozen=True)
class Share(Generic[R_co]):
    """Rows of one step, the sources one after another, and what run.json says of them."""

    train: Sequence[R_co]
    eval: Sequence[R_co]
    sources: list[dict[str, Any]]  # per source: name, train and eval rows of the share, dropped, hub (if from there)
    files: tuple[Path, ...]


def keys_of(flags: ShareFlags) -> DataKeys:
    """The column names that the flags give."""
    return DataKeys(flags.prompt_key, flags.chosen_key, flags.rejected_key, flags.response_key, flags.messages_key)


def load_share(flags: ShareFlags, show: bool = False) -> Share[Row]:
    """Reads every source and takes the step's slice of its training and evaluation rows (``--data_split``).

    Args:
        flags: of the step.
        show: whether to show progress.

    Raises:
        UserError: see :func:`dschat.data.sources.load_source`; or ``--data_split`` has no part for this step.
    """
    from dschat.data.prepared.read import find_prepared

    for folder in find_prepared(flags.data_path):
        raise UserError(
            f"--data_path {folder.path}: a prepared folder serves steps 1, 2, 3 and DPO; this run needs the rows of"
            " the source itself: give that."
        )
    return read_share(flags.data_path, keys_of(flags), flags.data_split, flags.step, flags.seed, show)


def read_share(
    paths: Sequence[str], keys: DataKeys, data_split: str, step: int, seed: int | None, show: bool = False
) -> Share[Row]:
    """The slice of a step, 1, 2 or 3, of every source; see `load_share`. Without a seed, rows stay in their order."""
    train: list[Row] = []
    held_out: list[Row] = []
    sources: list[dict[str, Any]] = []
    files: list[Path] = []
    for path in paths:
        source = load_source(path, keys, seed, show)
        own, own_eval = (split_part(rows, data_split, step - 1, seed) for rows in (source.train, source.eval))
        train += own
        held_out += own_eval
        described = {"name": source.name, "train": len(own), "eval": len(own_eval), "dropped": source.dropped}
        sources.append(described | ({"hub": source.hub} if source.hub else {}))
        files += source.files
    return Share(train, held_out, sources, tuple(files))
