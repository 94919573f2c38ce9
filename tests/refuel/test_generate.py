# SPDX-License-Identifier: Apache-2.0
"""Dialogues drawn twice: which turns are sampled, what the rows hold, what happens to those that end early."""

from collections import Counter
from dataclasses import replace

import pytest

from cli_runs import write_jsonl
from dialogue_cases import chat_tokenizer, dialogue
from dschat.base.errors import UserError
from dschat.data.turn_end import turn_end
from dschat.refuel.data_options import GenerateOptions
from dschat.refuel.generate import DialogueSampling, first_messages, run_generate, sampled_turns
from dschat.rollouts.continuous import ContinuousEngine
from dschat.rollouts.sampling import Sampling
from dschat.turns.dialogues import OUTGROWN, PolicyAssistant
from factories import make_causal_lm
from refuel_cases import make_prompts


def test_the_turns_are_uniform_and_follow_from_seed_and_number():
    drawn = [sampled_turns(3, number, 5) for number in range(20000)]
    lasts, pairs = Counter(last for last, _ in drawn), Counter(drawn)
    assert set(pairs) == {(last, turn) for last in range(5) for turn in range(last + 1)}
    for last, turn in pairs:
        assert abs(lasts[last] / 20000 - 1 / 5) < 0.012
        assert abs(pairs[last, turn] / 20000 - 1 / 5 / (last + 1)) < 0.012
    assert drawn[:100] == [sampled_turns(3, number, 5) for number in range(100)]
    assert drawn[:100] != [sampled_turns(4, number, 5) for number in range(100)]
    assert sampled_turns(0, 7, 1) == (0, 0)


def drawing(most=None, user=None, turns=3, seed=0):
    tokenizer = chat_tokenizer()
    model = make_causal_lm("gemma", vocab_size=len(tokenizer))
    sampling = Sampling(6, (turn_end(tokenizer).token_id, tokenizer.eos_token_id), tokenizer.pad_token_id)
    assistant = PolicyAssistant(ContinuousEngine(4).sampler_for(model), tokenizer, sampling, most, may_end=True)
    return DialogueSampling(
        assistant, user or (lambda said, numbers, seeds: [f"more {len(d)}" for d in said]), turns, seed
    )


FIRSTS = [dialogue(text)[0] for text in ("one", "two", "three", "four")]


def test_both_dialogues_share_the_state_of_the_sampled_turn():
    for entry in drawing(seed=1).sample([0, 1, 2, 3], FIRSTS):
        row, number = entry["row"], entry["number"]
        first, second = row["trajectory"], row["trajectory_sampled_h_from_sampled_len"]
        turn, last = row["sampled_h_from_sampled_len"], row["sampled_len_from_5"]
        assert (last, turn) == sampled_turns(1, number, 3)
        assert len(first) == len(second) == 6 and first[0] == FIRSTS[number]
        assert first[: 2 * turn + 1] == second[: 2 * turn + 1]
        assert first[2 * turn + 1] != second[2 * turn + 1]  # other draws


def test_rows_say_which_replies_were_cut():
    """What the policy itself said of each reply; those before the sampled turn are the first dialogue's."""
    sampling = drawing(seed=1)
    ended = {}

    def answer(states, seeds):
        replies = sampling.assistant(states, seeds)
        for reply in replies:
            ended[reply.text] = reply.finished
        return replies

    entries = replace(sampling, assistant=answer).sample([0, 1, 2, 3], FIRSTS)
    for column in ("trajectory", "trajectory_sampled_h_from_sampled_len"):
        for entry in entries:
            replies = [message["content"] for message in entry["row"][column][1::2]]
            assert entry["row"][f"{column}_finished"] == [ended[reply] for reply in replies]
    assert set(ended.values()) == {True, False} and len(ended) > 12


def test_a_dialogue_does_not_depend_on_its_batch():
    together = drawing().sample([0, 1, 2, 3], FIRSTS)
    assert drawing().sample([2], FIRSTS[2:3]) == together[2:3]
    assert drawing(seed=20000).sample([2], FIRSTS[2:3]) != together[2:3]
    same = drawing(turns=1).sample([0, 1], [FIRSTS[0]] * 2)
    assert same[0]["row"]["trajectory"] != same[1]["row"]["trajectory"]  # its number decides


def test_the_second_rollout_has_the_seed_plus_20000():
    """With one turn, the second dialogue of a seed is the first of that seed + 20000."""
    (entry,) = drawing(turns=1).sample([3], FIRSTS[:1])
    (later,) = drawing(turns=1, seed=20000).sample([3], FIRSTS[:1])
    assert entry["row"]["trajectory_sampled_h_from_sampled_len"] == later["row"]["trajectory"]


def test_a_dialogue_that_outgrows_the_policy_is_left_out_with_its_reason():
    firsts = [FIRSTS[0], dialogue("z" * 60)[0]]
    entries = drawing(most=60, turns=1).sample([0, 1], firsts)
    assert entries[0]["row"] is not None and entries[0]["reason"] == ""
    assert entries[1] == {"number": 1, "row": None, "reason": OUTGROWN}


def test_first_messages_are_taken_once(tmp_path):
    rows = [
        {"trajectory": [{"from": "user", "value": "a"}, {"from": "gpt", "value": "b"}], "chosen": "x"},
        {"trajectory": [{"role": "user", "content": "a"}]},
        {"messages": dialogue("b", "c", "d")},
        {"prompt": "a"},
        {"prompt": "e"},
    ]
    path = str(write_jsonl(tmp_path / "rows.jsonl", rows))
    found, repeated = first_messages(path, chat_tokenizer(), 0)
    assert found == [dialogue(text)[0] for text in ("a", "b", "e")] and repeated == 2
    assert first_messages(path, chat_tokenizer(), 2) == (found[:2], 1)
    # The template trims texts, so that these two are the same tokens.
    path = str(write_jsonl(tmp_path / "rows.jsonl", [{"prompt": "a"}, {"prompt": "a "}]))
    assert first_messages(path, chat_tokenizer("llama-3"), 0)[1] == 1
    assert first_messages(path, chat_tokenizer("chatml"), 0)[1] == 0


MISTAKES = {
    "no column": ({"text": "a"}, "no column 'messages', 'trajectory' or 'prompt' among 'text'"),
    "assistant first": ({"trajectory": [{"from": "gpt", "value": "a"}]}, "begins with 'gpt', not with a user"),
    "empty turn": ({"messages": dialogue("a", "")}, r"message 2 \(assistant\) is empty"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_row_without_a_first_message_is_named(name, tmp_path):
    raw, message = MISTAKES[name]
    path = write_jsonl(tmp_path / "rows.jsonl", [{"prompt": "a"}, raw])
    with pytest.raises(UserError, match=message) as refusal:
        first_messages(str(path), chat_tokenizer(), 0)
    assert str(refusal.value).startswith(f"{path}:2: ")


def options(models, folder, **changes):
    flags = {"model": str(models / "policy"), "user_model": str(models / "user"), "num_turns": 2, "max_new_tokens": 6}
    flags |= {"prompts": str(make_prompts(folder, 6)), "output_dir": folder / "work", "batch_size": 4}
    return GenerateOptions(**(flags | {"output_repo": str(folder / "dialogues")} | changes))


def test_a_name_on_the_hub_gets_a_private_data_set(models, tmp_path, monkeypatch):
    calls = []
    monkeypatch.setattr("huggingface_hub.HfApi.create_repo", lambda self, name, **rest: calls.append((name, rest)))
    monkeypatch.setattr("huggingface_hub.HfApi.upload_folder", lambda self, **rest: calls.append(rest))
    flags = {"output_repo": "somebody/dialogues", "num_turns": 1, "num_data": 2}
    said = run_generate(options(models, tmp_path, **flags))
    assert said.endswith(": https://huggingface.co/datasets/somebody/dialogues")
    assert calls[0] == ("somebody/dialogues", {"repo_type": "dataset", "private": True, "exist_ok": True})
    assert calls[1]["repo_id"] == "somebody/dialogues" and calls[1]["repo_type"] == "dataset"
    assert calls[1]["folder_path"] == tmp_path / "work" and calls[1]["allow_patterns"] == ["train.jsonl"]
    run_generate(options(models, tmp_path, public=True, **flags))
    assert calls[2][1]["private"] is False and len(calls) == 4  # pushed again, not drawn again
