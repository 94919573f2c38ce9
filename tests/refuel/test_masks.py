# SPDX-License-Identifier: Apache-2.0
"""The files of pairs: which are held out, what the columns hold, and places with another name."""

import pytest
from pyarrow import parquet

from cli_runs import write_jsonl
from dschat.base.errors import UserError
from dschat.refuel.data_options import MaskOptions
from dschat.refuel.rank import held_out_rows, run_masks
from dschat.refuel.token_pairs import load_regression_data
from refuel_cases import row


def test_one_in_ten_is_held_out_at_most():
    different = list(map(str, range(10_000)))
    assert held_out_rows(different[:9], 500) == []
    assert len(held_out_rows(different[:59], 500)) == 5 and len(held_out_rows(different, 500)) == 500
    found = held_out_rows(different[:100], 5)
    assert found == sorted(set(found)) == held_out_rows(different[:100], 5) and len(found) == 5

    threes = [str(number // 3) for number in range(90)]
    found = held_out_rows(threes, 9)
    assert len(found) == 9, "three dialogues with three pairs each"
    assert held_out_rows([f"{text}\n" if number % 2 else text for number, text in enumerate(threes)], 9) == found
    assert {threes[row] for row in found}.isdisjoint(threes[row] for row in range(90) if row not in found)


def make(models, folder, rows, **flags):
    write_jsonl(folder / "ranked" / "train.jsonl", rows)
    flags = {"input_repo": str(folder / "ranked"), "output_repo": str(folder / "pairs"), "total_length": 64} | flags
    return run_masks(MaskOptions(model=str(models / "policy"), **flags))


def test_the_files_hold_the_documented_columns_and_can_be_trained_on(models, tmp_path):
    rewards = [((0.0, 1.0, 2.0), (0.0, float(n), 0.0)) for n in range(2, 22)]
    same = row()
    same["trajectory_sampled_h_from_sampled_len"] = same["trajectory"]
    said = make(models, tmp_path, [same, *(row(rewards=both) for both in rewards)])
    assert said.startswith("18 pairs to train on and 2 held out, 1 left out (both replies are the same: 1): ")
    table = parquet.read_table(tmp_path / "pairs" / "train.parquet")
    names = [side + part for part in ("", "_token", "_mask", "_reward") for side in ("chosen", "reject")]
    assert table.column_names == names
    assert {len(ids) for name in names[2:6] for ids in table.column(name).to_pylist()} == {64}
    data = load_regression_data([str(tmp_path / "pairs")], 64, 1000)
    held_out = {example.chosen_reward for example in data.eval}
    assert len(held_out) == 2 and {e.chosen_reward for e in data.train} | held_out == set(range(2, 22))


def test_pairs_that_are_made_anew_replace_those_held_out_before(models, tmp_path):
    """In the folder in which they are made, and in that to which they are copied."""
    rows = [row() for _ in range(12)]
    files = [tmp_path / folder / "test.parquet" for folder in ("made", "pairs")]
    for test_rows in (2, 0):
        make(models, tmp_path, rows, output_dir=tmp_path / "made", test_rows=test_rows, overwrite=test_rows == 0)
        assert [file.exists() for file in files] == [test_rows > 0] * 2
    files[1].touch()  # a data set that is finished is copied again, as at first
    make(models, tmp_path, rows, output_dir=tmp_path / "made", test_rows=0)
    assert not files[1].exists()


def test_the_same_command_again_writes_the_same_and_another_is_refused(models, tmp_path, monkeypatch):
    """Also where the rows are read in several parts."""
    rows = [row() for _ in range(12)]
    make(models, tmp_path, rows)
    files = {file.name: file.read_bytes() for file in (tmp_path / "pairs").iterdir()}
    assert "finished before" in make(models, tmp_path, rows)
    with pytest.raises(UserError, match="made with --total_length 64, now it is 65"):
        make(models, tmp_path, rows, total_length=65)
    monkeypatch.setattr("dschat.refuel.rank.CHUNK", 5)
    make(models, tmp_path, rows, overwrite=True)
    assert files == {file.name: file.read_bytes() for file in (tmp_path / "pairs").iterdir()}
