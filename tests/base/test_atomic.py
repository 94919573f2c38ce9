# SPDX-License-Identifier: Apache-2.0
"""Files and folders are whole or not there wherever their writer is stopped, and the next start puts things right."""

import os
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import pytest

from dschat.base import atomic
from dschat.base.atomic import recover, recover_folder, write_file, writing, writing_folder, writing_into, writing_once
from interruptions import CTRL_C, KILL, stopped_at

WAYS = [KILL, CTRL_C]


def fill(folder, content, *names):
    """Files of one content."""
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(content)
    return folder


def contents(folder):
    """name → content of every file below a folder."""
    return {str(file.relative_to(folder)): file.read_text() for file in sorted(folder.rglob("*")) if file.is_file()}


def points(tmp_path, how, begin, act):
    """Folders in which something was begun, and stopped at every point in turn; the last one saw its end."""
    reached, point = True, 0
    while reached:
        place = tmp_path / str(point)
        place.mkdir()
        begin(place)
        reached = stopped_at(point, how, lambda place=place: act(place))
        yield place
        point += 1
    assert point > 2


def test_a_link_stays(tmp_path):
    fill(tmp_path, "old", "file")
    (tmp_path / "link").symlink_to("file")
    write_file(tmp_path / "link", "new")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "file").read_text() == "new"


@pytest.fixture(params=["the disk", "another disk"])
def linked(request, tmp_path):
    """A link named `link` to a folder of old files, on the same disk or another one."""
    if request.param == "the disk":
        yield fill(tmp_path / "real", "old", "a", "b"), tmp_path / "link"
        return
    memory = Path("/dev/shm")
    if not memory.is_dir() or memory.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("no other disk")
    with tempfile.TemporaryDirectory(dir=memory) as folder:
        yield fill(Path(folder) / "real", "old", "a", "b"), tmp_path / "link"


def test_a_link_to_a_folder_stays(linked, tmp_path):
    """What it names is replaced, as often as it is written; nothing is left beside it."""
    real, link = linked
    link.symlink_to(real)
    for _ in range(2):
        with writing_folder(link) as folder:
            fill(folder, "new", "a", "model/c")
        with writing_into(tmp_path, tmp_path / ".new", lambda: None) as folder:
            fill(folder / "link", "newest", "d")
    assert link.is_symlink() and contents(real) == {"d": "newest"}
    assert {entry.name for entry in (*tmp_path.iterdir(), *real.parent.iterdir())} <= {"link", "real"}


def test_a_link_to_a_folder_that_is_gone(tmp_path):
    """The folder is made again, where the link says."""
    (tmp_path / "link").symlink_to(tmp_path / "gone" / "real")
    with writing_into(tmp_path / "out", tmp_path / ".new", lambda: None) as folder:
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "model").symlink_to(tmp_path / "gone" / "model")
        fill(folder / "model", "new", "a")
    with writing_folder(tmp_path / "link") as folder:
        fill(folder, "new", "b")
    assert contents(tmp_path / "gone") == {"model/a": "new", "real/b": "new"}


@pytest.mark.parametrize("how", WAYS)
def test_a_file_is_the_old_or_the_new_one(how, tmp_path):
    found = []
    for place in points(
        tmp_path, how, lambda place: fill(place, "old", "x"), lambda place: write_file(place / "x", "new")
    ):
        found.append((place / "x").read_text())
        assert how == KILL or contents(place) == {"x": found[-1]}
        write_file(place / "x", "next")
        assert contents(place) == {"x": "next"}, "nothing is left behind"
    assert found == sorted(found, reverse=True) and {*found} == {"old", "new"}


def replace(place):
    with writing_folder(place / "x") as beside:
        fill(beside, "new", "a", "deep/b")


@pytest.mark.parametrize("how", WAYS)
def test_a_folder_is_the_old_or_the_new_one(how, tmp_path):
    """At the next start; what was there is never among what is new."""
    found = []
    for place in points(tmp_path, how, lambda place: fill(place / "x", "old", "a", "gone"), replace):
        assert how == KILL or (place / "x").exists(), "Ctrl-C waits for no next start"
        recover_folder(place / "x")
        assert contents(place / "x") in ({"a": "old", "gone": "old"}, {"a": "new", "deep/b": "new"})
        found.append(contents(place / "x")["a"])
        replace(place)
        assert contents(place) == {"x/a": "new", "x/deep/b": "new"}, "nothing is left behind"
    assert found == sorted(found, reverse=True) and {*found} == {"old", "new"}


def save(place, content="new", before_moving=lambda: None):
    with writing_into(place, place / ".writing", before_moving) as beside:
        fill(beside, content, "actor/model", "actor/config.json", "config.json", "tokenizer")


@pytest.mark.parametrize("how", WAYS)
def test_each_file_and_folder_among_others_is_the_old_or_the_new_one(how, tmp_path):
    def begin(place):
        fill(place, "old", "actor/model", "actor/config.json", "actor/gone", "config.json", "tokenizer", "notes")

    for place in points(tmp_path, how, begin, save):
        recover(place)
        found = contents(place)
        assert found["notes"] == "old" and found["config.json"] in ("old", "new")
        actor = {found.get(f"actor/{name}") for name in ("model", "config.json")}
        assert actor in ({"old"}, {"new"}) and (found.get("actor/gone") == "old") == (actor == {"old"})
        if found["config.json"] == "new":
            assert found["tokenizer"] == "new", "config.json comes last"
        save(place)
        assert {*contents(place)} == {"actor/model", "actor/config.json", "config.json", "tokenizer", "notes"}


def test_what_is_moved_aside_keeps_its_order(tmp_path, monkeypatch):
    """After a kill in between the rest goes into a folder of its own."""
    fill(tmp_path, "old", "actor/model", "run.json", "notes")
    entries = [tmp_path / "actor", tmp_path / "run.json"]
    assert stopped_at(1, CTRL_C, lambda: atomic.move_aside(entries, tmp_path))
    left = {"earlier-1/actor/model": "old", "run.json": "old", "notes": "old"}
    assert contents(tmp_path) == left
    assert atomic.move_aside(entries[1:], tmp_path) == tmp_path / "earlier-2"
    assert contents(tmp_path) == {"earlier-1/actor/model": "old", "earlier-2/run.json": "old", "notes": "old"}


def test_an_error_leaves_what_was_there(tmp_path):
    place = fill(tmp_path, "old", "x", "folder/a", "config.json")
    begins = (
        lambda: writing(place / "x"),
        lambda: writing_folder(place / "folder"),
        lambda: writing_folder(place / "folder", shared=True),
    )
    for begin in begins:
        with pytest.raises(OSError, match="full"), begin():
            raise OSError("full")

    with pytest.raises(OSError), writing_folder(place / "x", shared=True) as beside:
        fill(beside, "new", "a")  # a file is in its place

    def refuse():
        assert ".writing/config.json" in contents(place), "the new is whole before the old is dealt with"
        raise OSError("lock lost")

    with pytest.raises(OSError, match="lock lost"):
        save(place, before_moving=refuse)
    assert contents(place) == {"config.json": "old", "folder/a": "old", "x": "old"} and len([*place.iterdir()]) == 3


def test_what_a_kill_left_comes_back_or_goes(tmp_path):
    """Files of the user's stay."""
    run = fill(tmp_path / "run", "put aside", ".actor.replaced-by-a-newer-one/a", ".critic.replaced-by-a-newer-one/a")
    fill(run, "stays", "critic/a", ".mine.old/a")
    recover(run)
    assert contents(run) == {".mine.old/a": "stays", "actor/a": "put aside", "critic/a": "stays"}
    save(fill(run, "put aside", ".critic_ema.replaced-by-a-newer-one/a"))
    assert contents(run)["critic_ema/a"] == "put aside", "also where another folder is saved"
    data = fill(tmp_path / "data", "put aside", ".x[1].replaced-by-a-newer-one/a", ".y.replaced-by-a-newer-one/a")
    fill(data, "stays", "y/a", ".x[1].mine.old/a", ".x1.replaced-by-a-newer-one/a")
    for name in ("x[1]", "y"):
        recover_folder(data / name)
    replace(fill(data, "put aside", ".x.replaced-by-a-newer-one/a", "x/a"))
    assert contents(data / "x") == {"a": "new", "deep/b": "new"} and not [*data.glob(".x.r*")]
    atomic.remove(data / "x")
    expected = dict.fromkeys(("y/a", ".x[1].mine.old/a", ".x1.replaced-by-a-newer-one/a"), "stays")
    assert contents(data) == expected | {"x[1]/a": "put aside"}


def test_several_processes_may_write_the_same(tmp_path):
    """The last file and the first folder stay. What a killed process left of them goes after a day."""
    fill(tmp_path, "half", ".x.dead.writing", ".x.now.writing", ".y.dead.writing", ".f.dead.writing/a")
    for old in [*tmp_path.glob(".*dead*"), *tmp_path.glob(".*dead*/*")]:
        os.utime(old, (time.time() - atomic.ABANDONED - 9,) * 2)
    with writing(tmp_path / "x", shared=True) as first, writing(tmp_path / "x", shared=True) as second:
        first.write_text("first")
        second.write_text("second")
    with writing_folder(tmp_path / "f", shared=True) as first, writing_folder(tmp_path / "f", shared=True) as second:
        fill(first, "first", "a")
        fill(second, "second", "a")
    left = {".x.now.writing": "half", ".y.dead.writing": "half"}
    assert contents(tmp_path) == left | {"f/a": "second", "x": "first"}, "the inner ones end first"


@pytest.mark.parametrize("links", [True, False], ids=["hard links", "no hard links"])
def test_of_several_writers_of_a_file_the_first_stays(links, tmp_path, monkeypatch):
    """Where the disk has hard links; elsewhere the last. No unfinished file is left."""
    if not links:

        def refuse(*_):
            raise PermissionError("no hard links")

        monkeypatch.setattr(os, "link", refuse)
    file = tmp_path / "new" / "a.json"
    with writing_once(file) as first, writing_once(file) as second:
        assert first != second
        first.write_text("one")
        second.write_text("two")
    with suppress(ValueError), writing_once(file) as third:
        third.write_text("three")
        raise ValueError
    # The inner block ends first.
    assert contents(tmp_path) == {"new/a.json": "two" if links else "one"}


def test_a_folder_in_which_a_file_grows_is_not_abandoned(tmp_path):
    """Its own time stays that of the file's making. What was not written for a day goes, deep inside, too."""
    fill(tmp_path, "half", ".f.growing.writing/deep/a", ".f.dead.writing/deep/a")
    day_ago = time.time() - atomic.ABANDONED - 9
    for entry in [*tmp_path.rglob("*")]:
        os.utime(entry, (day_ago, day_ago))
    with open(tmp_path / ".f.growing.writing" / "deep" / "a", "a") as file:
        file.write("more")
    atomic.remove_abandoned(tmp_path, ".*")
    assert contents(tmp_path) == {".f.growing.writing/deep/a": "halfmore"}


def test_everything_is_on_the_disk_before_it_is_moved(tmp_path, monkeypatch):
    synced = []

    def fsync(descriptor):
        synced.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")))

    monkeypatch.setattr(os, "fsync", fsync)
    with writing_folder(tmp_path / "folder") as new:
        fill(new, "x", "one", "below/two")
    assert sorted(synced) == sorted([new, new / "one", new / "below", new / "below/two"])
    synced.clear()
    with writing_into(tmp_path, tmp_path / ".new", lambda: None) as new:
        fill(new, "x", "three", "four")
    assert sorted(synced) == sorted([new, new / "three", new / "four", tmp_path])
    synced.clear()
    with writing(tmp_path / "file") as new:
        new.write_text("x")
    assert synced == [new]


def test_what_is_in_the_way_of_a_folder_is_named_and_stays(tmp_path):
    """A file that somebody has called as a folder that is written is neither replaced nor lost."""
    place = fill(tmp_path, "somebody's", "step-4", "new/a")
    with pytest.raises(FileExistsError, match="step-4 is in the way and is no folder: move it elsewhere"):
        atomic.put(place / "new", place / "step-4")
    assert contents(place) == {"new/a": "somebody's", "step-4": "somebody's"}
    (place / "loop").symlink_to(place / "loop")
    with pytest.raises(FileExistsError, match="loop is in the way and is no folder"):
        atomic.put(place / "new", place / "loop")
    assert (place / "new").is_dir() and (place / "loop").is_symlink()
