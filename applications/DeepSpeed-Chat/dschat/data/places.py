# SPDX-License-Identifier: Apache-2.0
"""A data set by one name in every place: a file or folder here, or owner/name on the Hugging Face hub."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from dschat.data.formats.files import FILE_SUFFIXES
from dschat.data.formats.hub import open_hub
from dschat.data.formats.rows import RawSource
from dschat.data.formats.saved import open_local
from dschat.data.sources import HUB_NAME
from dschat.errors import UserError


def is_folder(name: str) -> bool:
    """Whether a name means a folder here, to be written: unless it is an owner/name and there is no folder "owner"."""
    return name.startswith(".") or HUB_NAME.fullmatch(name) is None or Path(name).parent.is_dir()


def open_data(name: str, flag: str) -> RawSource:
    """What a name means; rows are read when they are asked for.

    Args:
        name: a file or folder here (see `dschat.data.formats.files.find_files`), or owner/name on the hub.
        flag: the command-line flag that gave it, for messages.

    Raises:
        UserError: there is no such thing, also while rows are read.
    """
    try:
        if Path(name).exists():
            raw = open_local(Path(name))
        elif HUB_NAME.fullmatch(name) and not name.startswith("."):
            raw = open_hub(name, None)
        else:
            raise UserError(
                f"{flag} {name}: there is no such file or folder. Give a {', '.join(FILE_SUFFIXES)} file, a folder "
                "with train*.jsonl, train*.parquet and so on, or owner/name of a data set on the Hugging Face hub."
            )
    except UserError as error:
        raise _of_flag(error, flag) from error
    held_out = None if raw.eval is None else _read(raw.eval, flag)
    return replace(raw, train=_read(raw.train, flag), eval=held_out)


def push(folder: Path, files: Sequence[str], repository: str, public: bool, flag: str) -> str:
    """Pushes files of a folder to a data set of the hub, which is made where there is none; where it can be seen.

    Args:
        folder: of the files.
        files: their names.
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
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UserError(
            f"{flag} {repository}: the data set is finished, in {folder}, but the Hugging Face hub did not take it "
            f"({type(error).__name__}: {reason}). Log in with `hf auth login` where there is a network and give the "
            "same command again: it only pushes. For a folder of this machine instead, take it from there."
        ) from error
    return f"https://huggingface.co/datasets/{repository}"


def _read(rows: Iterable[tuple[str, Any]], flag: str) -> Iterator[tuple[str, Any]]:
    try:
        yield from rows
    except UserError as error:
        raise _of_flag(error, flag) from error


def _of_flag(error: UserError, flag: str) -> UserError:
    """The same message about another flag than the training steps' own."""
    return UserError(str(error).replace("--data_path", flag))
