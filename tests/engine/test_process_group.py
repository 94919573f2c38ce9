# SPDX-License-Identifier: Apache-2.0
"""Shared memory that runs leave in /dev/shm: DeepSpeed's, and that of vLLM on a CPU."""

import mmap
import os
import time

import pytest

from dschat.engine import process_group

LEFT = ("deepspeed_allreduce_buffer_0_127.0.0.1_29500_1", "-tp:0-[0-1]-cpushm_0")


@pytest.fixture(name="folder")
def _folder(tmp_path, monkeypatch):
    """/dev/shm with files that are an hour old, of which somebody else's has another name."""
    monkeypatch.setattr(process_group, "SHARED_FOLDER", tmp_path)
    for name in (*LEFT, "used"):
        (tmp_path / name).write_bytes(bytes(mmap.PAGESIZE))
        os.utime(tmp_path / name, (time.time() - 3600,) * 2)
    return tmp_path


def names(folder) -> set[str]:
    return {file.name for file in folder.iterdir()}


@pytest.mark.parametrize("used", LEFT)
def test_what_a_process_uses_stays_until_it_ends(used, folder) -> None:
    """A file in the memory of any process, here of this one, belongs to a run that goes on."""
    with (folder / used).open("r+b") as file, mmap.mmap(file.fileno(), 0):
        process_group.remove_left_memory()
        assert names(folder) == {used, "used"}
        process_group.remove_own_memory()
        assert names(folder) == {"used"}


def test_what_is_just_being_made_stays(folder) -> None:
    """A process may have opened it and not mapped it yet."""
    os.utime(folder / LEFT[0])
    process_group.remove_left_memory()
    assert names(folder) == {LEFT[0], "used"}


def test_one_process_of_a_machine_looks(folder, monkeypatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")
    process_group.remove_left_memory()
    assert names(folder) == {*LEFT, "used"}


def test_a_run_keeps_its_hands_off_what_others_left(folder) -> None:
    """At its end, it removes its own alone."""
    process_group.remove_own_memory()
    assert names(folder) == {*LEFT, "used"}
