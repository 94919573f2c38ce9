# SPDX-License-Identifier: Apache-2.0
"""Pointers of Git LFS: small texts that a clone holds in place of large files until `git lfs pull`."""

from pathlib import Path

from dschat.base.errors import UserError

POINTER = b"version https://git-lfs.github.com/spec/"  # begins every pointer


def refuse_pointer(file: Path, where: str) -> None:
    """Refuses a pointer of Git LFS. A file that cannot be read is left to its reader.

    Args:
        file: the file to look at.
        where: the flag or folder that the message names first.

    Raises:
        UserError: the file is a pointer.
    """
    try:
        with open(file, "rb") as stream:
            start = stream.read(len(POINTER))
    except OSError:
        return
    if start == POINTER:
        raise UserError(
            f"{where}: {file} is a pointer of Git LFS and not the file itself. Run `git lfs pull` where it was cloned,"
            " or get the files with `hf download`."
        )
