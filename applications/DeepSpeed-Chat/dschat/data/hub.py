# SPDX-License-Identifier: Apache-2.0
"""Data sets of the Hugging Face hub: the published ones by their names, and others. None of their code is executed.

Three of the four published repositories hold a loading script, which `datasets` 4 and later refuse. Data files are
loaded instead: the parquet files that the hub converts them to (branch refs/convert/parquet), or the originals.
"""

import errno
import logging
import os
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dschat.base.atomic import NO_ROOM
from dschat.base.errors import UserError
from dschat.data.files import find_files, os_error_behind, reason_of, used_splits
from dschat.data.rows import RawSource

if TYPE_CHECKING:
    from datasets import Dataset, DatasetDict

logger = logging.getLogger(__name__)

OWN_NAME = re.compile(r"\w[\w.-]*")
DATA_VARIABLE = "MA_RLHF_DATA"  # names the folder of local copies: one folder or file per short name
PARQUET_BRANCH = "refs/convert/parquet"
COPY_SUFFIXES = ("", ".jsonl", ".parquet", ".json")
DEFAULT_FOLDER = "data"  # suggested in messages if MA_RLHF_DATA is not set


@dataclass(frozen=True)
class KnownSet:
    """A published data set."""

    name: str  # short name, also of local copies
    aliases: tuple[str, ...]  # other short names
    hub_id: str  # owner/name on the hub
    train_rows: int  # rows of the training split
    eval_rows: int | None  # rows of the evaluation split; None if there is none
    load: str  # first argument of `datasets.load_dataset`: the repository, or the builder of its files
    load_options: Mapping[str, Any] = field(default_factory=dict)  # the other arguments
    revision: str = "main"  # branch that holds the files
    include: str = "*"  # pattern of the files on that branch
    compared_as: str = ""  # name of its results and of its rubric; empty if responses are not compared with each other

    @property
    def counts(self) -> tuple[int, int | None]:
        """Rows of the training and evaluation splits."""
        return self.train_rows, self.eval_rows

    def names(self) -> tuple[str, ...]:
        """All names by which `--data_path` may refer to it, in lower case."""
        return (self.name, *self.aliases, self.hub_id.lower())

    def fetch_command(self, folder: str | Path) -> str:
        """Shell command that downloads it to `folder`, which can then be read offline."""
        revision = () if self.revision == "main" else ("--revision", self.revision)
        return fetch_command(self.hub_id, folder, (*revision, "--include", self.include))


KNOWN_SETS = (
    KnownSet(
        name="tldr",
        aliases=("summarize",),
        hub_id="openai/summarize_from_feedback",
        train_rows=92_858,
        eval_rows=86_086,
        # The configuration's name fails on this branch, and without a folder `comparisons` and `axis` are mixed.
        load="openai/summarize_from_feedback",
        load_options={"revision": PARQUET_BRANCH, "data_dir": "comparisons"},
        revision=PARQUET_BRANCH,
        include="comparisons/*.parquet",
        compared_as="summarize",
    ),
    KnownSet(
        name="hh",
        aliases=("hh-rlhf",),
        hub_id="Dahoas/full-hh-rlhf",
        train_rows=112_052,
        eval_rows=12_451,
        load="Dahoas/full-hh-rlhf",
        include="*.parquet",
        compared_as="hh-rlhf",
    ),
    KnownSet(
        name="webgpt",
        aliases=(),
        hub_id="openai/webgpt_comparisons",
        train_rows=19_578,
        eval_rows=None,
        load="openai/webgpt_comparisons",
        load_options={"revision": PARQUET_BRANCH, "data_dir": "default/train"},
        revision=PARQUET_BRANCH,
        include="default/train/*.parquet",
        compared_as="webgpt",
    ),
    KnownSet(
        name="apps",
        aliases=(),
        hub_id="codeparrot/apps",
        train_rows=5_000,
        eval_rows=5_000,
        # The parquet branch holds each problem twice: under `all` and under its difficulty.
        load="json",
        load_options={
            "data_files": {
                "train": "hf://datasets/codeparrot/apps/train.jsonl",
                "test": "hf://datasets/codeparrot/apps/test.jsonl",
            }
        },
        include="*.jsonl",
    ),
)

COMPARED_SETS = tuple(known_set.compared_as for known_set in KNOWN_SETS if known_set.compared_as)


def find_known(path: str) -> KnownSet | None:
    """The published set that a `--data_path` names, by hub id or short name in any case; None if it names none."""
    for known_set in KNOWN_SETS:
        if path.lower() in known_set.names():
            return known_set
    return None


def compared_set(text: str, own: bool = False, remedy: str = "leave the flag out") -> str:
    """The name in results of the set that a `--dataset` names.

    Args:
        text: hub id or short name of a published set, or a name for the user's own data.
        own: whether the user's own data are allowed.
        remedy: how to give the user's own data if they are not allowed, for messages.

    Returns:
        One of COMPARED_SETS, or the name of the user's data; the latter is logged.

    Raises:
        UserError: there is no such set, its responses are not compared, or the user's name cannot be a folder's.
    """
    known_set = find_known(text)
    if known_set is not None and known_set.compared_as:
        return known_set.compared_as
    if known_set is not None or not own:
        raise UserError(f"--dataset {text}: unknown; give {', '.join(COMPARED_SETS)}, or {remedy}.")
    if not OWN_NAME.fullmatch(text):
        raise UserError(
            f"--dataset {text}: the name of your own data may hold only letters, digits, '.', '-' and '_'."
        )
    logger.info("--dataset %s: a data set of your own (published ones: %s)", text, ", ".join(COMPARED_SETS))
    return text


def data_folder() -> Path | None:
    """The folder of local copies, $MA_RLHF_DATA; None if the variable is unset or empty."""
    value = os.environ.get(DATA_VARIABLE)
    return Path(value).expanduser() if value else None


def local_copy(known: KnownSet) -> Path | None:
    """The local folder or file of a published set: `tldr`, `tldr.jsonl` and so on in `data_folder`; None if absent."""
    folder = data_folder()
    if folder is None:
        return None
    for suffix in COPY_SUFFIXES:
        path = folder / f"{known.name}{suffix}"
        if path.exists():
            return path
    return None


def fetch_command(hub_id: str, folder: str | Path, options: tuple[str, ...] = ()) -> str:
    """Shell command that downloads a data set of the hub into `folder`."""
    command = ["hf", "download", hub_id, "--repo-type", "dataset", *options]
    return shlex.join([*command, "--local-dir", os.fspath(folder)])


def describe_counts(train_rows: int, eval_rows: int | None) -> str:
    """Row counts in words: "92,858 training and no evaluation rows"."""
    eval_count = "no" if eval_rows is None else f"{eval_rows:,}"
    return f"{train_rows:,} training and {eval_count} evaluation rows"


def open_hub(path: str, known: KnownSet | None) -> RawSource:
    """A data set of the hub; a published one is loaded from the files that work.

    Args:
        path: the `--data_path`.
        known: the published set that it names, if any.

    Raises:
        UserError: it cannot be loaded, has no split to read, or is a published set with a wrong number of rows; the
            message names the data set, where a local copy was looked for and the command that fetches it.
    """
    hub_id = known.hub_id if known else path
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
        return datasets.load_dataset(known.load, **known.load_options)
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
        folder = Path(
            huggingface_hub.snapshot_download(
                known.hub_id, repo_type="dataset", revision=known.revision, local_files_only=True
            )
        )
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
