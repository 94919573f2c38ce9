# SPDX-License-Identifier: Apache-2.0
"""Folders and files that are whole or not there, whenever the writer is stopped."""

import os
import subprocess
import sys

import pytest

from dschat.run.whole_files import end_moves, write_whole, written_beside


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_what_is_written_appears_at_the_end(tmp_path):
    place = tmp_path / "out" / "step-1"
    with written_beside(tmp_path, place, lambda: None) as beside:
        (beside / "actor").mkdir()
        (beside / "actor" / "config.json").write_text("{}")
        assert not (place / "actor").exists()
    assert names(place) == ["actor"] and (place / "actor" / "config.json").read_text() == "{}"


def test_an_error_leaves_what_was_there(tmp_path):
    (tmp_path / "actor").mkdir()
    (tmp_path / "actor" / "config.json").write_text("old")
    with pytest.raises(OSError, match="disk full"), written_beside(tmp_path, tmp_path, lambda: None) as beside:
        (beside / "actor").mkdir()
        raise OSError("disk full")
    assert names(tmp_path) == ["actor"] and (tmp_path / "actor" / "config.json").read_text() == "old"


def test_new_files_and_folders_replace_old_ones_and_leave_others(tmp_path):
    for name in ("config.json", "notes.txt", "model-00001-of-00002.safetensors"):
        (tmp_path / name).write_text("old")
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "old.bin").touch()
    moved = []
    with written_beside(tmp_path, tmp_path, lambda: moved.append(names(tmp_path))) as beside:
        (beside / "config.json").write_text("new")
        (beside / "adapter").mkdir()
        (beside / "adapter" / "new.bin").touch()
    assert names(tmp_path) == ["adapter", "config.json", "model-00001-of-00002.safetensors", "notes.txt"]
    assert (tmp_path / "config.json").read_text() == "new" and names(tmp_path / "adapter") == ["new.bin"]
    assert len(moved) == 1 and ".writing" in moved[0], "the old is dealt with once the new is whole"


KILLED = """
import os, sys
from pathlib import Path
from dschat.run.whole_files import end_moves, write_whole, written_beside
place = Path(sys.argv[1])
with written_beside(place, place, lambda: None) as beside:
    (beside / "actor").mkdir()
    (beside / "actor" / "model.safetensors").write_text("half")
    os.kill(os.getpid(), 9)
"""


def test_a_kill_half_way_leaves_no_folder_and_the_next_save_works(tmp_path):
    assert subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)]).returncode == -9
    assert not (tmp_path / "actor").exists()
    with written_beside(tmp_path, tmp_path, lambda: None) as beside:
        (beside / "actor").mkdir()
        (beside / "actor" / "config.json").write_text("{}")
    assert names(tmp_path) == ["actor"] and names(tmp_path / "actor") == ["config.json"]


def test_config_json_comes_last(tmp_path, monkeypatch):
    """A folder without it is no model, so that a kill between two renames leaves none."""
    order, rename = [], os.replace
    monkeypatch.setattr(os, "replace", lambda a, b, **k: (order.append(os.path.basename(b)), rename(a, b, **k)))
    with written_beside(tmp_path, tmp_path, lambda: None) as beside:
        for name in ("config.json", "model.safetensors", "tokenizer.json"):
            (beside / name).touch()
    assert names(tmp_path) == ["config.json", "model.safetensors", "tokenizer.json"]
    assert order[-1] == "config.json"


def test_a_file_is_replaced_whole(tmp_path, monkeypatch):
    file = tmp_path / "run.json"
    write_whole(file, "old")
    monkeypatch.setattr(os, "fsync", lambda descriptor: (_ for _ in ()).throw(OSError("full")))
    with pytest.raises(OSError, match="full"):
        write_whole(file, "new")
    assert file.read_text() == "old"


def test_a_folder_that_made_way_comes_back_or_goes(tmp_path):
    """After a kill between the two renames, and after one behind them; files of the user's stay."""
    for name in (".actor.replaced-by-a-newer-one", ".critic.replaced-by-a-newer-one", "critic", ".mine.old"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(name)
    end_moves(tmp_path)
    assert names(tmp_path) == [".mine.old", "actor", "critic"]
    assert (tmp_path / "critic" / "config.json").read_text() == "critic"
