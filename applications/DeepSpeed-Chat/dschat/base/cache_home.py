# SPDX-License-Identifier: Apache-2.0
"""The folder of caches, which may be deleted at any time: tokenised examples, compiled code."""

import os
import tempfile
from pathlib import Path

CACHE_VARIABLE = "MA_RLHF_CACHE"
DEFAULT_FOLDER = "~/.cache/ma-rlhf"


def cache_home() -> Path:
    """The folder that MA_RLHF_CACHE names, or ~/.cache/ma-rlhf. It may not exist, or not be writable."""
    folder = Path(os.environ.get(CACHE_VARIABLE) or DEFAULT_FOLDER)
    try:
        return folder.expanduser()
    except RuntimeError:  # a user without a home folder, as in some containers
        return Path(tempfile.gettempdir()) / f"ma-rlhf-{os.getuid()}"
