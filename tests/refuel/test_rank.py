# SPDX-License-Identifier: Apache-2.0
"""Rewards at the end of each turn: every beginning once, failures counted, and reward models that cannot read."""

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from cli_runs import read_jsonl, write_jsonl
from closeness import near
from dschat.base.errors import UserError
from dschat.refuel.data_options import RankOptions
from dschat.refuel.rank import run_rank
from factories import make_classifier, make_tokenizer, save_folder
from refuel_cases import row

UNSCORED = {name: value for name, value in row(turn=1, last=2).items() if not name.endswith("_reward")}
FUNCTION = """
calls = []
def score(dialogues, rows):
    calls.extend(len(messages) for messages in dialogues)
    print(calls)
    assert all(row["sampled_len_from_5"] == 2 for row in rows)
    return [None if m[-1]["content"] == "third" else float("nan") if m[-1]["content"] == "third b" else
            10 * len(m) + len(m[-1]["content"]) for m in dialogues]
def nothing(dialogues, rows):
    return [None] * len(dialogues)
def one(dialogues, rows):
    return [1.0]
"""


def rank(folder, dialogues=UNSCORED, **flags):
    write_jsonl(folder / "dialogues" / "train.jsonl", [dialogues])
    flags = {"prompts": str(folder / "dialogues"), "output_repo": str(folder / "ranked")} | flags
    said = run_rank(RankOptions(**flags))
    return said, read_jsonl(folder / "ranked" / "train.jsonl")


def test_every_beginning_has_the_reward_models_own_number(models, tmp_path):
    said, (found,) = rank(tmp_path, reward_model=str(models / "rm"), batch_size=2)
    assert {name: found[name] for name in UNSCORED} == UNSCORED
    model = AutoModelForSequenceClassification.from_pretrained(models / "rm").eval()
    tokenizer = AutoTokenizer.from_pretrained(models / "rm")
    for column in ("trajectory", "trajectory_sampled_h_from_sampled_len"):
        for end, reward in zip((2, 4, 6), found[f"{column}_reward"], strict=True):
            text = tokenizer.apply_chat_template(UNSCORED[column][:end], tokenize=False)
            ids = tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"]
            with torch.no_grad():
                assert model(ids).logits.item() == near(reward)
    assert said.startswith("6 rewards of 1 pairs of dialogues: ")
    _, (rounded,) = rank(tmp_path / "bf16", reward_model=str(models / "rm"), dtype="bf16")
    whole = found["trajectory_reward"]
    assert rounded["trajectory_reward"] == pytest.approx(whole, abs=2**-4)  # 8 binary digits, of numbers up to 3
    assert all(a != b for a, b in zip(rounded["trajectory_reward"], whole, strict=True))


def test_replies_that_were_cut_are_read_without_their_end(models, tmp_path):
    """The last reply of a beginning alone: earlier ones are as the template writes them."""
    flags = {"reward_model": str(models / "rm")}
    _, (whole,) = rank(tmp_path / "whole", **flags)
    _, (cut,) = rank(tmp_path / "cut", UNSCORED | {"trajectory_finished": [True, False, True]}, **flags)
    first, second, third = whole["trajectory_reward"]
    assert cut["trajectory_reward"][::2] == [near(first), near(third)]
    assert abs(cut["trajectory_reward"][1] - second) > 1e-3
    with pytest.raises(UserError, match="trajectory_finished must be a list with true or false for each of the 3"):
        rank(tmp_path / "wrong", UNSCORED | {"trajectory_finished": [True]}, **flags)


def test_failures_are_marked_and_counted(tmp_path, capsys):
    (tmp_path / "own.py").write_text(FUNCTION)
    said, (found,) = rank(tmp_path, reward_function=f"{tmp_path / 'own.py'}:score")
    assert found["trajectory_reward"] == [25, 46, -99999]
    assert found["trajectory_sampled_h_from_sampled_len_reward"] == [25, 48, -99999]
    assert "2 failed and are -99999" in said
    assert len(capsys.readouterr().out.splitlines()[-1].split(",")) == 5  # the shared beginning was scored once


@pytest.mark.parametrize(
    ("name", "words"),
    [("nothing", "not one of 6 dialogues got a finite reward"), ("one", r"returned shape \(1,\) for 5 dialogues")],
)
def test_a_function_that_scores_nothing_is_named(name, words, tmp_path):
    (tmp_path / "own.py").write_text(FUNCTION)
    with pytest.raises(UserError, match=words):
        rank(tmp_path, reward_function=f"{tmp_path / 'own.py'}:{name}")


def test_a_reward_model_without_a_chat_template_is_refused(tmp_path):
    path = save_folder(tmp_path / "rm", make_classifier("gemma"), make_tokenizer())
    with pytest.raises(UserError, match="--reward_model .*no chat template.*--reward_function"):
        rank(tmp_path, reward_model=path)
