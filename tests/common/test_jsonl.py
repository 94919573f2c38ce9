# SPDX-License-Identifier: Apache-2.0
"""JSON Lines files as they are written; how they are read is tested with the files of responses."""

import json

from dschat.common.jsonl import write_rows


def test_text_that_utf8_cannot_hold_is_written_all_the_same(tmp_path):
    write_rows(tmp_path / "x.jsonl", [{"text": "half \ud800 of one"}])
    assert json.loads((tmp_path / "x.jsonl").read_text()) == {"text": "half ? of one"}
