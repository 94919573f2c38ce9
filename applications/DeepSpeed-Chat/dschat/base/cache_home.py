# SPDX-License-Identifier: Apache-2.0
"""The folder of what may be deleted at any time and is then made anew: tokenised examples, compiled code."""

import os
from pathlib import Path

CACHE_VARIABLE = "MA_RLHF_CACHE"
DEFAULT_FOLDER = "~/.cache/ma-rlhf"


def cache_home() -> Path:
    """The folder that MA_RLHF_CACHE names, or ~/.cache/ma-rlhf. It need not exist, or be writable."""
    return Path(os.environ.get(CACHE_VARIABLE) or DEFAULT_FOLDER).expanduser()
