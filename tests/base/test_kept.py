# SPDX-License-Identifier: Apache-2.0
"""A saved result is used only by the settings that made it."""

import json

import pytest

from dschat.base.changes import changed_names, first_change
from dschat.base.kept import Kept, settings_of_kept


def test_a_content_is_opened_by_the_settings_that_made_it(tmp_path):
    file = tmp_path / "deep" / "made.json"
    assert Kept(file, {"seed": 1}).open() is None and Kept(file, {"seed": 1}).difference() == ""
    Kept(file, {"seed": 1, "sizes": (2, 3)}).write({"rows": 4})
    same = Kept(file, {"sizes": [2, 3], "seed": 1})
    assert same.open() == {"rows": 4} and same.difference() == ""
    assert settings_of_kept(file) == {"seed": 1, "sizes": [2, 3]}
    assert json.loads(file.read_text()) == {"made_from": {"seed": 1, "sizes": [2, 3]}, "content": {"rows": 4}}


@pytest.mark.parametrize(
    ("settings", "difference"),
    [({"top-k": 2}, "--top_k 1, now it is 2"), ({"top-k": 1, "seed": 0}, "--seed None, now it is 0")],
)
def test_other_settings_do_not_open_it(settings, difference, tmp_path):
    Kept(tmp_path / "made.json", {"top-k": 1}).write("a")
    other = Kept(tmp_path / "made.json", settings)
    assert other.open() is None and other.difference() == difference
    other.write("b")
    assert other.open() == "b"


@pytest.mark.parametrize("content", ["{", "[]", '{"made_from": {}}'])
def test_a_damaged_file_is_named(content, tmp_path):
    file = tmp_path / "made.json"
    file.write_text(content)
    for read in (Kept(file, {}).open, Kept(file, {}).difference):
        with pytest.raises(ValueError, match=str(file)):
            read()
    assert settings_of_kept(tmp_path / "none.json") is None


def test_names_of_what_changed():
    assert changed_names({"a": 1, "b": 2, "c": 3}, {"d": 4, "b": 5, "a": 1}) == ["d", "b", "c"]
    assert changed_names({"a": None}, {}) == [] and first_change({"a": 1}, {"a": 1}) == ""
