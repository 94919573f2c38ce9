# SPDX-License-Identifier: Apache-2.0
"""Loads data sets of the Hugging Face hub. None of their code is executed.

Three of the four sets of the paper's runs are in repositories with a loading script, which `datasets` 4 and later
refuse. Data files are loaded instead: the parquet files that the hub converts them to (branch refs/convert/parquet),
or the originals.
"""

import errno
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dschat.base.atomic import NO_ROOM
from dschat.base.errors import UserError
from dschat.data.files import find_files, os_error_behind, reason_of, used_splits
from dschat.data.known_sets import DATA_VARIABLE, KnownSet, data_folder, describe_counts, fetch_command
from dschat.data.rows import RawSource

if TYPE_CHECKING:
    from datasets import Dataset, DatasetDict

logger = logging.getLogger(__name__)

DEFAULT_FOLDER = "data"  # suggested in messages if MA_RLHF_DATA is not set


def open_hub(path: str, known: KnownSet | None) -> RawSource:
    """A data set of the hub; a published one is loaded from the files that work.

    Args:
        path: the `--data_path`.
        known: the published set that it names, if any.

    Raises:
        UserError: it cannot be loaded, has no split to read, or is a published set with a wrong number of rows; the
            message names the data set, where a local copy was looked for and the command that fetches it.
    """
    hub_id = known.title if known else path
    splits = _load_splits(path, known)
    train_name, eval_name, unread = used_splits(splits)
    names = [name for name in (train_name, eval_name) if name is not None]
    if not names:
        raise UserError(
            f"--data_path {path}: the data set {hub_id} has neither a training nor an evaluation split, only "
            f"{', '.join(splits)}. Download it with `{fetch_command(hub_id, 'DIR')}` and give one of its files."
        )
    held_out = None if eval_name is None else splits[eval_name]
    num_train = 0 if train_name is None else len(splits[train_name])
    counts = (num_train, None if held_out is None else len(held_out))
    if known and counts != known.counts:  # its shares, and scores on them, would not be comparable with published ones
        raise UserError(
            f"--data_path {path}: {hub_id} should have {describe_counts(*known.counts)}, but "
            f"{describe_counts(*counts)} came from the hub: it was loaded in part, or has changed since. Remove it "
            "from the cache of the datasets library (HF_DATASETS_CACHE) and try again, or give a local copy, whose "
            f"rows are not counted: `{known.fetch_command(_target(known))}`."
        )
    split_records = {}
    for name in names:
        split = splits[name]
        # The fingerprint depends on the files of the split and their versions.
        split_records[name] = {"rows": len(split), "fingerprint": split._fingerprint}
    record = {"id": hub_id, "revision": known.revision if known else "main", "splits": split_records}
    train_rows = None if train_name is None else _rows(splits[train_name], hub_id)
    eval_rows = None if held_out is None else _rows(held_out, hub_id)
    return RawSource(hub_id, train_rows, eval_rows, hub=record, splits=tuple(names), unread=tuple(unread))


def _load_splits(path: str, known: KnownSet | None) -> "DatasetDict":
    import datasets

    try:
        if known is None:
            return datasets.load_dataset(path)
        return datasets.load_dataset(known.builder or known.hub_id, **known.load_options)
    except Exception as error:  # the library passes on all exceptions of the libraries that it uses
        splits = _load_cached(known, error) if known else None
        if splits is None:
            raise UserError(_explain_unavailable(path, known, error)) from error
        return splits


def _load_cached(known: KnownSet, error: Exception) -> "DatasetDict | None":
    """The files that an earlier download left in the hub's cache; None if there are none."""
    import datasets
    import huggingface_hub

    try:
        snapshot = huggingface_hub.snapshot_download(
            known.hub_id, repo_type="dataset", revision=known.revision, local_files_only=True
        )
        folder = Path(snapshot) / known.subset
        train_files, eval_files = find_files(folder)
        data_files = {"train": [str(file) for file in train_files]}
        if eval_files:
            data_files["test"] = [str(file) for file in eval_files]
        builder = "parquet" if train_files[0].suffix == ".parquet" else "json"
        splits = datasets.load_dataset(builder, data_files=data_files)
    except Exception:  # the hub's failure is reported instead
        return None
    logger.warning(
        "%s: the hub gave none (%s); using an earlier download in %s", known.hub_id, reason_of(error), folder
    )
    return splits


def _rows(dataset: "Dataset", hub_id: str) -> Iterator[tuple[str, Any]]:
    """The rows of a split, each as its origin and its columns."""
    for number, raw in enumerate(dataset, start=1):
        yield f"{hub_id} {dataset.split or 'rows'} row {number}", raw


def _explain_unavailable(path: str, known: KnownSet | None, error: Exception) -> str:
    """The message for a data set that is neither on this machine nor available from the hub."""
    reason = reason_of(error)
    cause = os_error_behind(error)
    if cause is not None and cause.errno in (*NO_ROOM, errno.EACCES):
        return (
            f"--data_path {path}: the caches of the Hugging Face libraries cannot be written ({reason_of(cause)}). "
            "Make room, or set HF_HOME to a folder on a disk that can be written."
        )
    hub_id = known.hub_id if known else path
    target = _target(known) if known else "DIR"
    command = known.fetch_command(target) if known else fetch_command(path, target)
    remedy = f"give {target} or one of its files"
    if known is not None:
        remedy = f"set {DATA_VARIABLE}={data_folder() or DEFAULT_FOLDER}"
    return (
        f"--data_path {path}: there is no such local file or folder ({DATA_VARIABLE} is "
        f"{data_folder() or 'not set'}), and the Hugging Face hub gave no data set {hub_id} ({reason}). Correct the "
        f"path, or fetch it where there is a network, with `{command}`, and {remedy}."
    )


def _target(known: KnownSet) -> str:
    """The path where a local copy is expected."""
    return str((data_folder() or Path(DEFAULT_FOLDER)) / known.name)


def push(folder: Path, files: Sequence[str], repository: str, public: bool, flag: str) -> str:
    """Pushes files of a folder to a data set of the hub, which is created if it does not exist.

    Args:
        folder, files: the folder, and the names of the files in it.
        repository: owner/name.
        public: whether everybody may see a data set that is created.
        flag: the command-line flag that gave the name, for messages.

    Returns:
        The address of the data set.

    Raises:
        UserError: the hub does not accept it; the local files stay.
    """
    from huggingface_hub import HfApi

    hub = HfApi()
    try:
        hub.create_repo(repository, repo_type="dataset", private=not public, exist_ok=True)
        hub.upload_folder(
            repo_id=repository,
            folder_path=folder,
            repo_type="dataset",
            allow_patterns=list(files),
            delete_patterns=["train*", "test*"],
            commit_message=", ".join(files),
        )
    except Exception as error:  # the library passes on all exceptions of the libraries that it uses
        raise UserError(
            f"{flag} {repository}: the data set is complete in {folder}, but uploading it to the Hugging Face hub"
            f" failed ({reason_of(error)}). Check the network, log in with `hf auth login`, and give the same command"
            " again, which then only uploads; or use that folder."
        ) from error
    return f"https://huggingface.co/datasets/{repository}"
