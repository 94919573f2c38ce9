# SPDX-License-Identifier: Apache-2.0
"""REFUEL's pairs as a run reads them: ranges, limits, and rows that are none."""

import pytest

from cli_runs import write_jsonl
from dschat.data.dialogue_pairs import load_regression_data
from dschat.errors import UserError


def pair(**changes):
    made = {"chosen_token": [1, 5, 6, 7, 0, 0], "chosen_mask": [0, 0, 1, 1, 0, 0], "chosen_reward": 2.0}
    made |= {"reject_token": [1, 5, 8, 0, 0, 0], "reject_mask": [0, 0, 1, 0, 0, 0], "reject_reward": 0.5}
    return made | changes


def test_tokens_come_apart_where_the_mask_begins(tmp_path):
    write_jsonl(tmp_path / "train.jsonl", [pair()])
    write_jsonl(tmp_path / "test.jsonl", [pair(chosen_reward=3)])
    data = load_regression_data([str(tmp_path)], 10, 10)
    (example,) = data.train
    assert (example.prompt_ids, example.chosen_ids, example.rejected_ids) == ([1, 5], [6, 7], [8])
    assert (example.chosen_reward, example.rejected_reward) == (2.0, 0.5)
    assert [held_out.chosen_reward for held_out in data.eval] == [3.0]
    assert data.sources == [{"name": tmp_path.name, "train": 1, "eval": 1, "dropped": {}}]


@pytest.mark.parametrize(("start", "end", "found"), [(0, -1, [0, 1, 2, 3]), (1, -1, [1, 2, 3]), (1, 3, [1, 2])])
def test_a_range_counts_rows_of_all_data_sets(tmp_path, start, end, found):
    for name, rewards in (("a", (0, 1)), ("b", (2, 3))):
        write_jsonl(tmp_path / name / "train.jsonl", [pair(chosen_reward=r) for r in rewards])
    data = load_regression_data([str(tmp_path / "a"), str(tmp_path / "b")], 10, 10, start, end)
    assert [example.chosen_reward for example in data.train] == found


def test_failed_rewards_and_long_pairs_are_left_out(tmp_path):
    long = pair(chosen_mask=[0, 0, 1, 1, 1, 0])
    write_jsonl(tmp_path / "train.jsonl", [pair(reject_reward=-99999), pair(), long])
    data = load_regression_data([str(tmp_path)], 4, 10)
    assert len(data.train) == 1
    assert data.dropped["train"] == {"a reward is missing": 1, "longer than --task.total_length": 1}
    with pytest.raises(UserError, match="no training pair is left of 3 .*longer than --task.total_length: 2"):
        load_regression_data([str(tmp_path)], 3, 10)


MISTAKES = {
    "no column": (pair(chosen_mask=None), "no column 'chosen_mask'; give a data set that tokenize_masks.py makes"),
    "other states": (pair(reject_token=[1, 6, 8, 0, 0, 0]), "differ before their replies"),
    "mask with a gap": (pair(chosen_mask=[0, 0, 1, 0, 1, 0]), "a mask must be 1"),
    "empty mask": (pair(reject_mask=[0] * 6), "a mask must be 1"),
    "short mask": (pair(reject_mask=[0, 0, 1]), "a mask must be 1"),
    "other model": (pair(chosen_token=[1, 5, 6, 10, 0, 0]), "token 10 is none of the model's 10"),
    "no number": (pair(chosen_reward="high"), "must be numbers"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_row_that_is_none_is_named(name, tmp_path):
    raw, message = MISTAKES[name]
    write_jsonl(tmp_path / "train.jsonl", [pair(), raw])
    with pytest.raises(UserError, match=message) as refusal:
        load_regression_data([str(tmp_path)], 10, 10)
    assert str(refusal.value).startswith(f"{tmp_path / 'train.jsonl'}:2: ")


def test_data_that_are_not_there_are_named(tmp_path):
    with pytest.raises(UserError, match="--task.query_dataset .*absent: there is no such file or folder"):
        load_regression_data([str(tmp_path / "absent")], 10, 10)
