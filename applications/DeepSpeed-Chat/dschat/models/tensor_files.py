# SPDX-License-Identifier: Apache-2.0
"""Writes safetensors files."""

import stat
from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor


def save_tensors(tensors: Mapping[str, Tensor], file: Path, metadata: Mapping[str, str] | None = None) -> None:
    """Writes tensors to a safetensors file with the permissions of any other new file, which the umask decides.

    safetensors 0.8 on its own makes files that only their owner can read, so that nobody else on a shared disk could
    load the model beside a readable config.json. Raises OSError or SafetensorError.
    """
    file.touch()
    permissions = stat.S_IMODE(file.stat().st_mode)
    try:
        save_file(dict(tensors), file, metadata=None if metadata is None else dict(metadata))
    except BaseException:
        file.unlink()
        raise
    if stat.S_IMODE(file.stat().st_mode) != permissions:
        file.chmod(permissions)
