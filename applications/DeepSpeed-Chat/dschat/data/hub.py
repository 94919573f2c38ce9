# SPDX-License-Identifier: Apache-2.0
"""Data sets of the Hugging Face hub: the published ones by their names, and others. No code of theirs is executed.

Three of the four published repositories hold a loading script, which `datasets` 4 and later refuse. What is loaded
instead are data files: those that the hub made of them (branch refs/convert/parquet), or the originals.
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
DATA_VARIABLE = "MA_RLHF_DATA"  # folder with local copies, one folder or file per short name
PARQUET_BRANCH = "refs/convert/parquet"
COPY_SUFFIXES = ("", ".jsonl", ".parquet", ".json")
DEFAULT_FOLDER = "data"  # in messages, where MA_RLHF_DATA is not set


@dataclass(frozen=True)
class KnownSet:
    """A published data set."""

    name: str  # short name; local copies are called so
    aliases: tuple[str, ...]  # further short names
    hub_id: str  # owner/name on the hub
    train_rows: int  # rows of its training split
    eval_rows: int | None  # rows of its evaluation split; None where it has none
    load: str  # first argument of `datasets.load_dataset`: the repository, or the builder of its files
    load_options: Mapping[str, Any] = field(default_factory=dict)  # the other arguments
    revision: str = "main"  # branch that holds the files
    include: str = "*"  # pattern of the files among those of the branch
    # What results on it, and the rubric by which they are compared, are called; empty where responses are not compared
    # with each other.
    compared_as: str = ""

    @property
    def counts(self) -> tuple[int, int | None]:
        """Rows of its training and evaluation splits."""
        return self.train_rows, self.eval_rows

    def names(self) -> tuple[str, ...]:
        """Everything that `--data_path` calls it, in lower case."""
        return (self.name, *self.aliases, self.hub_id.lower())

    def fetch_command(self, folder: str | Path) -> str:
        """Shell command that downloads it into `folder`, which can then be read offline."""
        revision = () if self.revision == "main" else ("--revision", self.revision)
        return fetch_command(self.hub_id, folder, (*revision, "--include", self.include))


KNOWN_SETS = (
    KnownSet(
        name="tldr",
        aliases=("summarize",),
        hub_id="openai/summarize_from_feedback",
        train_rows=92_858,
        eval_rows=86_086,
        # The name of the configuration fails on this branch; without a folder `comparisons` and `axis` are mixed.
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
            "data_files": {part: f"hf://datasets/codeparrot/apps/{part}.jsonl" for part in ("train", "test")}
        },
        include="*.jsonl",
    ),
)


COMPARED_SETS = tuple(known.compared_as for known in KNOWN_SETS if known.compared_as)


def find_known(path: str) -> KnownSet | None:
    """The published set that a `--data_path` names, by hub id or short name in any case; None if it names none."""
    return next((known for known in KNOWN_SETS if path.lower() in known.names()), None)


def compared_set(text: str, own: bool = False, remedy: str = "leave the flag out") -> str:
    """What results call the set that a `--dataset` names.

    Args:
        text: hub id or any short name of a published set; or a name for data of one's own.
        own: data of one's own may be meant.
        remedy: how they are given where they are not, for messages.

    Returns:
        One of COMPARED_SETS; or the name of one's own set, which is then said.

    Raises:
        UserError: there is no such set, its responses are not compared, or the name of one's own is no folder's.
    """
    known = find_known(text)
    if known is not None and known.compared_as:
        return known.compared_as
    if known is not None or not own:
        raise UserError(f"--dataset {text}: unknown; give {', '.join(COMPARED_SETS)}, or {remedy}.")
    if not OWN_NAME.fullmatch(text):
        raise UserError(f"--dataset {text}: a name of your own must be letters, digits, ., - and _, no path.")
    logger.info("--dataset %s: a data set of your own (published ones: %s)", text, ", ".join(COMPARED_SETS))
    return text


def data_folder() -> Path | None:
    """The folder of local copies, $MA_RLHF_DATA; None where the variable is unset or empty."""
    value = os.environ.get(DATA_VARIABLE)
    return Path(value).expanduser() if value else None


def local_copy(known: KnownSet) -> Path | None:
    """The local folder or file of a published set: `tldr`, `tldr.jsonl` and so on in `data_folder`; None if absent."""
    folder = data_folder()
    if folder is None:
        return None
    candidates = (folder / f"{known.name}{suffix}" for suffix in COPY_SUFFIXES)
    return next((path for path in candidates if path.exists()), None)


def fetch_command(hub_id: str, folder: str | Path, options: tuple[str, ...] = ()) -> str:
    """Shell command that downloads a data set of the hub into `folder`."""
    return shlex.join(["hf", "download", hub_id, "--repo-type", "dataset", *options, "--local-dir", os.fspath(folder)])


def describe_counts(train_rows: int, eval_rows: int | None) -> str:
    """Row counts in words; no evaluation rows where they are None."""
    return f"{train_rows:,} training and {'no' if eval_rows is None else format(eval_rows, ',')} evaluation rows"


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
    used = used_splits(splits)
    if not used:
        raise UserError(
            f"--data_path {path}: the data set {hub_id} has no training split, only {', '.join(splits)}. Download it "
            f"with `{fetch_command(hub_id, 'DIR')}` and give one of its files."
        )
    sizes = [len(splits[name]) for name in used]
    counts = sizes[0], sizes[1] if len(used) > 1 else None
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
    return RawSource(hub_id, rows[0], rows[1] if len(used) > 1 else None, hub=record)


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
    logger.warning(
        "%s: the hub gave none (%s); using an earlier download in %s", known.hub_id, reason_of(error), folder
    )
    return splits


def _rows(dataset: "Dataset", hub_id: str) -> Iterator[tuple[str, Any]]:
    """What the rows of a split hold, each with its origin."""
    for number, raw in enumerate(dataset, start=1):
        yield f"{hub_id} {dataset.split or 'rows'} row {number}", raw


def _explain_unavailable(path: str, known: KnownSet | None, error: Exception) -> str:
    """One message for a data set that is neither here nor to be had from the hub."""
    reason = reason_of(error)
    cause = os_error_behind(error)
    if cause is not None and cause.errno in (*NO_ROOM, errno.EACCES):
        return (
            f"--data_path {path}: the caches of the Hugging Face libraries cannot be written ({reason_of(cause)}). "
            "Make room, or set HF_HOME to a folder on a disk that can be written."
        )
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


def push(folder: Path, files: Sequence[str], repository: str, public: bool, flag: str) -> str:
    """Pushes files of a folder to a data set of the hub, which is made where there is none; where it can be seen.

    Args:
        folder, files: the folder, and the names of the files in it.
        repository: owner/name.
        public: everybody may see a data set that is made.
        flag: the command-line flag that gave the name, for messages.

    Raises:
        UserError: the hub does not take it; the files stay.
    """
    from huggingface_hub import HfApi

    hub = HfApi()
    try:
        hub.create_repo(repository, repo_type="dataset", private=not public, exist_ok=True)
        hub.upload_folder(
            repo_id=repository, folder_path=folder, repo_type="dataset", allow_patterns=list(files),
            delete_patterns=["train*", "test*"], commit_message=f"{', '.join(files)}",
        )  # fmt: skip
    except Exception as error:  # the library lets through whatever the libraries below it raise
        raise UserError(
            f"{flag} {repository}: the data set is finished, in {folder}, but the Hugging Face hub did not take it "
            f"({reason_of(error)}). Log in with `hf auth login` where there is a network and give the "
            "same command again: it only pushes. For a folder of this machine instead, take it from there."
        ) from error
    return f"https://huggingface.co/datasets/{repository}"
