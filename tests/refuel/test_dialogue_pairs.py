# SPDX-License-Identifier: Apache-2.0
"""From two scored dialogues to tokens and masks, and these as a run reads them: ranges, limits, rows that are none."""

import pytest

from cli_runs import write_jsonl
from dialogue_cases import TEMPLATES, chat_tokenizer
from dschat.base.errors import UserError
from dschat.data.turn_end import turn_end
from dschat.refuel.dialogue_pairs import read_dialogue_pair, tokenize_pairs
from dschat.refuel.token_pairs import load_regression_data
from refuel_cases import row


def tokenized(*rows, template="llama-3", total_length=200):
    tokenizer = chat_tokenizer(template)
    pairs = [read_dialogue_pair(raw, f"rows:{n}", scored=True) for n, raw in enumerate(rows, start=1)]
    return tokenizer, *tokenize_pairs(pairs, tokenizer, turn_end(tokenizer), total_length)


@pytest.mark.parametrize("template", TEMPLATES)
def test_the_mask_covers_the_reply_and_what_ends_it(template):
    tokenizer, (made,), _ = tokenized(row(), template=template)
    for name, reply in (("chosen", "second b"), ("reject", "second")):
        tokens, mask = made[f"{name}_token"], made[f"{name}_mask"]
        assert len(tokens) == len(mask) == 200
        covered = [token for token, bit in zip(tokens, mask, strict=True) if bit]
        assert tokenizer.decode(covered[:-1]).strip() == reply
        assert tokenizer.decode(covered[-1:]) == TEMPLATES[template][1]
        before = tokenizer.decode(tokens[: mask.index(1)])
        messages = made[name][:3]
        expected = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        assert before.removeprefix("<bos>") == expected.removeprefix("<bos>")
        end = mask.index(1) + sum(mask)
        assert sum(mask[end:]) == 0 and set(tokens[end:]) == {tokenizer.pad_token_id}


def test_a_reply_that_was_cut_has_no_end():
    """Its policy did not sample the token; the other reply's does not change."""
    side = "trajectory_sampled_h_from_sampled_len"
    _, (whole, cut, other_cut, others), _ = tokenized(
        row(),
        row() | {f"{side}_finished": [True, False, True]},
        row() | {"trajectory_finished": [True, False, True]},
        row() | {"trajectory_finished": [False, True, False]},  # not that of turn h
    )
    assert sum(cut["chosen_mask"]) == sum(whole["chosen_mask"]) - 1 and cut["reject_mask"] == whole["reject_mask"]
    covered = sum(cut["chosen_mask"]) + cut["chosen_mask"].index(1)
    assert cut["chosen_token"][:covered] == whole["chosen_token"][:covered]
    assert sum(other_cut["reject_mask"]) == sum(whole["reject_mask"]) - 1
    assert other_cut["chosen_mask"] == whole["chosen_mask"] and others == whole


def test_chosen_has_the_strictly_higher_reward_at_the_last_scored_turn():
    rewards = ((9.0, 2.0, 3.0), (9.0, 1.0, 3.0))
    _, (higher, tied), _ = tokenized(row(rewards=rewards), row(last=2, rewards=rewards))
    assert (higher["chosen_reward"], higher["reject_reward"]) == (2.0, 1.0)
    assert [m["content"] for m in higher["chosen"]] == ["ask", "first", "more", "second"]
    assert [m["content"] for m in higher["reject"]][-1] == "second b"
    assert tied["chosen_reward"] == tied["reject_reward"] == 3.0  # the second comes first
    assert [m["content"] for m in tied["chosen"]][3:] == ["second b", "again b", "third b"]
    assert [m["content"] for m in tied["reject"]][3:] == ["second", "again", "third"]


def test_what_is_left_out_is_counted_by_reason():
    def with_text(side, place, text):
        changed = row()
        changed[side][place]["content"] = text
        return changed

    first, second, long = "trajectory", "trajectory_sampled_h_from_sampled_len", "z" * 150
    rows = [
        row(rewards=((1.0, 2.0, 3.0), (1.0, 2.0, -99999.0))),
        row(),
        row(rewards=((-99999, 2.0, 3.0), (1.0, 2.0, 3.0))),
        with_text(second, 3, "second"),  # the same reply
        with_text(first, 3, " "),
        with_text(first, 5, long),
        with_text(second, 3, long),
        with_text(second, 5, long),  # not read
    ]
    _, kept, left_out = tokenized(*rows, total_length=120)
    assert len(kept) == 2
    assert left_out == {
        "a turn could not be scored": 2,
        "both replies are the same": 1,
        "a reply is empty": 1,
        "the first dialogue is too long": 1,
        "the second dialogue is too long up to its turn": 1,
    }
    assert -99999 not in [kept[n][f"{side}_reward"] for n in range(2) for side in ("chosen", "reject")]


MISTAKES = {
    "no column": (row(trajectory=None), ["'trajectory'", "`dschat refuel-data rank` makes"]),
    "roles": (row(trajectory=row()["trajectory"][1:]), ["trajectory", "message 1", "alternate"]),
    "lengths": (row(trajectory=row()["trajectory"][:4]), ["the same number of turns"]),
    "turn behind the last": (row(turn=1, last=0), ["must be turns"]),
    "another beginning": (row(last=2, sampled_h_from_sampled_len=2), ["differ before"]),
    "no list": (row(trajectory_reward=3.5), ["trajectory_reward must be a list with a reward for each"]),
    "truth": (row(sampled_h_from_sampled_len=True), ["is True", "must be turns"]),
    "no number": (row(trajectory_reward=[1.0, float("nan"), 2.0]), ["must be a number", "-99999"]),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_row_that_is_none_is_named(name):
    raw, words = MISTAKES[name]
    with pytest.raises(UserError) as refusal:
        read_dialogue_pair(raw, "rows.jsonl:7", scored=True)
    assert str(refusal.value).startswith("rows.jsonl:7")
    assert all(word in str(refusal.value) for word in words), refusal.value


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


def test_failed_rewards_and_long_pairs_are_left_out(tmp_path):
    long = pair(chosen_mask=[0, 0, 1, 1, 1, 0])
    write_jsonl(tmp_path / "train.jsonl", [pair(reject_reward=-99999), pair(), long])
    data = load_regression_data([str(tmp_path)], 4, 10)
    assert len(data.train) == 1
    assert data.dropped["train"] == {"a turn could not be scored": 1, "longer than --task.total_length": 1}
    with pytest.raises(UserError, match="no training pair is left .*longer than --task.total_length: 2"):
        load_regression_data([str(tmp_path)], 3, 10)


NO_PAIRS = {
    "no column": (pair(chosen_mask=None), "no column 'chosen_mask'; give .*`dschat refuel-data tokenize` makes"),
    "other states": (pair(reject_token=[1, 6, 8, 0, 0, 0]), "differ before their replies"),
    "mask with a gap": (pair(chosen_mask=[0, 0, 1, 0, 1, 0]), "a mask must be 1"),
    "mask with a 2": (pair(chosen_mask=[0, 0, 1, 1, 1, 2]), "a mask must be 1"),
    "other model": (pair(chosen_token=[1, 5, 6, 10, 0, 0]), "token id 10 is not below the model's 10 ids"),
    "no number": (pair(chosen_reward="high"), "must be numbers"),
}


@pytest.mark.parametrize("name", NO_PAIRS)
def test_a_pair_of_tokens_that_is_none_is_named(name, tmp_path):
    raw, message = NO_PAIRS[name]
    write_jsonl(tmp_path / "train.jsonl", [pair(), raw])
    with pytest.raises(UserError, match=message) as refusal:
        load_regression_data([str(tmp_path)], 10, 10)
    assert str(refusal.value).startswith(f"{tmp_path / 'train.jsonl'}:2: ")
