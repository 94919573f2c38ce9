# SPDX-License-Identifier: Apache-2.0
"""Where caches are kept."""

import os
import tempfile
from pathlib import Path

from dschat.base.cache_home import cache_home


def test_the_folder_of_caches(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("MA_RLHF_CACHE", "~/mine")
    assert cache_home() == tmp_path / "mine"
    monkeypatch.delenv("MA_RLHF_CACHE")
    assert cache_home() == tmp_path / ".cache" / "ma-rlhf"


def test_a_user_without_a_home(monkeypatch):
    """A container may run as a user id that no file knows."""

    def expanduser(path: Path) -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "expanduser", expanduser)
    assert cache_home() == Path(tempfile.gettempdir()) / f"ma-rlhf-{os.getuid()}"
