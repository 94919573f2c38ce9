# SPDX-License-Identifier: Apache-2.0
"""Data sets of rows that are made again with other settings: a stop at any moment leaves none that passes for both."""

import pytest

from cli_runs import read_jsonl
from dschat.base import journal
from dschat.evaluation.runner import RunPart
from dschat.refuel.data_options import RefuelOutputFlags
from dschat.refuel.datasets import ROWS, make_rows


def made(folder, text, overwrite=False):
    """Makes a data set of one row, whose settings are its text."""
    part = RunPart(batches=[[0]], prepare=lambda: lambda numbers: [{"number": 0, "row": {"text": text}}])
    options = RefuelOutputFlags(output_repo=str(folder), overwrite=overwrite)
    return make_rows(options, {"text": text}, part, lambda entries: ([entry["row"] for entry in entries], "1 row"))


def test_rows_of_earlier_settings_do_not_pass_for_new_ones(tmp_path, monkeypatch):
    folder = tmp_path / "rows"
    made(folder, "earlier")
    with monkeypatch.context() as hurt:
        hurt.setattr(journal, "write_rows", None)
        with pytest.raises(TypeError):
            made(folder, "new", overwrite=True)
    assert "finished before" not in made(folder, "new")
    assert read_jsonl(folder / ROWS) == [{"text": "new"}]
