# SPDX-License-Identifier: Apache-2.0
"""Data sets of the Hugging Face hub, through the `datasets` library. Code in a repository is never executed."""

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dschat.data.formats.files import EVAL_PREFIXES, TRAIN_PREFIX, find_files, split_with
from dschat.data.formats.registry import DATA_VARIABLE, KnownSet, data_folder, describe_counts, fetch_command
from dschat.data.formats.rows import RawSource
from dschat.errors import UserError

if TYPE_CHECKING:
    from datasets import Dataset, DatasetDict

DEFAULT_FOLDER = "data"  # in messages, where MA_RLHF_DATA is not set

logger = logging.getLogger(__name__)


def open_hub(path: str, known: KnownSet | None) -> RawSource:
    """A data set of the hub: a published one in its working form, another one plainly.

    Args:
        path: what `--data_path` said.
        known: the published set that it names, if any.

    Raises:
        UserError: it cannot be loaded, has no training split, or a published set has another number of rows than it
            should; the message names the data set, where a local copy was looked for and the command that fetches it.
    """
    hub_id = known.hub_id if known else path
    splits = _load_splits(path, known)
    train = split_with(map(str, splits), [TRAIN_PREFIX])
    if train is None:
        raise UserError(
            f"--data_path {path}: the data set {hub_id} has no training split, only {', '.join(splits)}. Download it "
            f"with `{fetch_command(hub_id, 'DIR')}` and give one of its files."
        )
    held_out = split_with(map(str, splits), EVAL_PREFIXES)
    used = [train] if held_out is None else [train, held_out]
    counts = len(splits[train]), None if held_out is None else len(splits[held_out])
    if known and counts != known.counts:  # shares, and scores on them, could not be compared with published ones
        raise UserError(
            f"--data_path {path}: {hub_id} should have {describe_counts(*known.counts)}, but "
            f"{describe_counts(*counts)} came from the hub: it was loaded in part, or has changed since. Remove it "
            "from the cache of the datasets library (HF_DATASETS_CACHE) and try again, or give a local copy, whose "
            f"rows are not counted: `{known.fetch_command(_target(known))}`."
        )
    record = {
        "id": hub_id,
        "revision": known.revision if known else "main",
        # The fingerprint depends on the files of a split and their versions.
        "splits": {n: {"rows": len(splits[n]), "fingerprint": splits[n]._fingerprint} for n in used},
    }
    rows = [_rows(splits[name], hub_id) for name in used]
    return RawSource(hub_id, rows[0], rows[1] if held_out else None, hub=record)


def _load_splits(path: str, known: KnownSet | None) -> "DatasetDict":
    import datasets

    try:
        return datasets.load_dataset(known.load, **known.load_options) if known else datasets.load_dataset(path)
    except Exception as error:  # the library lets through whatever the libraries below it raise
        cached = _load_cached(known, error) if known else None
        if cached is None:
            raise UserError(_explain_unavailable(path, known, error)) from error
        return cached


def _load_cached(known: KnownSet, error: Exception) -> "DatasetDict | None":
    """The files that an earlier download left in the hub's cache; None if there are none."""
    import datasets
    import huggingface_hub

    try:
        folder = Path(
            huggingface_hub.snapshot_download(
                known.hub_id, repo_type="dataset", revision=known.revision, local_files_only=True
            )
        )
        train, held_out = find_files(folder)
        files = {"train": [str(file) for file in train], "test": [str(file) for file in held_out]}
        builder = "parquet" if train[0].suffix == ".parquet" else "json"
        splits = datasets.load_dataset(builder, data_files={name: paths for name, paths in files.items() if paths})
    except Exception:  # of the two failures the hub's is the one to report
        return None
    logger.warning("%s: the hub gave none (%s); using an earlier download in %s", known.hub_id, _reason(error), folder)
    return splits


def _rows(dataset: "Dataset", hub_id: str) -> Iterator[tuple[str, Any]]:
    """What the rows of a split hold, each with its origin."""
    for number, raw in enumerate(dataset, start=1):
        yield f"{hub_id} {dataset.split or 'rows'} row {number}", raw


def _explain_unavailable(path: str, known: KnownSet | None, error: Exception) -> str:
    """One message for a data set that is neither here nor to be had from the hub."""
    reason = _reason(error)
    if known is None:
        return (
            f"--data_path {path}: there is no such local file or folder, and the data set of that name on the Hugging "
            f"Face hub could not be loaded ({reason}). Correct the path, or download the data set where there is a "
            f"network, with `{fetch_command(path, 'DIR')}`, and give DIR or one of its files."
        )
    folder, target = data_folder(), _target(known)
    if folder is None:
        looked = f"the folder of local copies, {DATA_VARIABLE}, is not set"
        remedy = f"; then set {DATA_VARIABLE}={DEFAULT_FOLDER}, or give {target} as --data_path"
    else:
        files = f"{target}, {target}.jsonl or {target}.parquet"
        looked, remedy = f"there is no local file or folder {files} ({DATA_VARIABLE} is {folder})", ""
    return (
        f"--data_path {path}: the data set {known.hub_id} is not here: {looked}, and the "
        f"Hugging Face hub gave none ({reason}). Fetch it where there is a network, with "
        f"`{known.fetch_command(target)}`{remedy}."
    )


def _target(known: KnownSet) -> str:
    """Where a local copy is, or would be, looked for."""
    return str((data_folder() or Path(DEFAULT_FOLDER)) / known.name)


def _reason(error: Exception) -> str:
    """First line of what went wrong, with its kind; what lies below an error that only says where it happened."""
    if type(error).__name__ == "DatasetGenerationError" and isinstance(error.__cause__, Exception):
        error = error.__cause__
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0].rstrip('.')}" if lines else type(error).__name__
