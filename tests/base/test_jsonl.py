# SPDX-License-Identifier: Apache-2.0
"""JSON Lines files as they are written, and what is said of broken ones; reading is tested with files of responses."""

import gzip
import json
import re

import pytest

from dschat.base.errors import UserError
from dschat.base.jsonl import parse_json, read_rows, write_rows


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ('{"prompt": "a\tb"}', "Invalid control character at column 14"),
        ('{"prompt": "a', "Unterminated string starting at column 12"),
        ('{"prompt":\n "a\tb"}', "Invalid control character at line 2 column 4"),
    ],
)
def test_where_json_is_broken(text, told):
    """Columns count from 1. Some of json's own messages end in "at"."""
    with pytest.raises(UserError, match=re.escape(f"a.jsonl:3: not valid JSON ({told}); correct or remove it.")):
        parse_json(text.encode(), "a.jsonl:3")


def test_text_that_utf8_cannot_hold_is_written_all_the_same(tmp_path):
    write_rows(tmp_path / "x.jsonl", [{"text": "half \ud800 of one"}])
    assert json.loads((tmp_path / "x.jsonl").read_text()) == {"text": "half ? of one"}


@pytest.mark.parametrize("indent", [None, 1])
def test_a_list_of_rows_is_read_as_lines_are(tmp_path, indent):
    path = tmp_path / "outputs.json"
    path.write_text("\ufeff\n" + json.dumps([{"a": 1}, {"a": 2}], indent=indent), encoding="utf-8")
    assert read_rows(path, "--file") == [(f"{path} row 1", {"a": 1}), (f"{path} row 2", {"a": 2})]
    path.write_text(json.dumps([{"a": 1}, 2], indent=indent))
    with pytest.raises(UserError, match="outputs.json row 2: int instead of an object with columns; correct the row"):
        read_rows(path, "--file")


def test_a_packed_name_is_written_packed(tmp_path):
    file = tmp_path / "x.jsonl.gz"
    write_rows(file, [{"a": 1}])
    assert gzip.decompress(file.read_bytes()) == b'{"a": 1}\n'
    assert read_rows(file, "--file") == [(f"{file}:1", {"a": 1})]
