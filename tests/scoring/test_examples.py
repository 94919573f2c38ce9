# SPDX-License-Identifier: Apache-2.0
"""The files in examples/ as the flags load them, and the condition and fields of docs/macro-actions.md."""

import re
from dataclasses import fields

import torch

from cli_runs import ROOT
from closeness import near
from dschat.base.user_function import load_function
from dschat.rollouts.termination import user_condition
from factories import EOS, make_rollout
from macro_actions.types import Rollout, Trajectory

EXAMPLES = ROOT / "examples"


def test_the_rewards_of_the_example():
    """Lengths 200, 100 and 20: 0, -1/2 and -9/10, and a point for a reason."""
    responses = ["x" * 200, "because " + "x" * 92, "Because it is so, mm"]
    for name, numbers in (("closeness", [0, -0.5, -0.9]), ("says_why", [0, 1, 1])):
        function = load_function(f"{EXAMPLES / 'reward.py'}:{name}", "--reward_function")
        assert list(function(["p"] * 3, responses, [{}] * 3)) == near(numbers)


def test_the_condition_of_the_example_ends_sentences(tokenizer):
    """Of single characters, by the tokenizer's ids: "a. b" and "c" + EOS."""
    ids = [[tokenizer.encode(c, add_special_tokens=False)[0] for c in text] for text in ("a. b", "c")]
    rollout = make_rollout([([5], ids[0]), ([5], [*ids[1], EOS])])
    zeros = torch.zeros(rollout.response_mask.shape)
    trajectory = Trajectory(rollout, zeros, zeros, None, torch.zeros(2))
    condition = user_condition(f"{EXAMPLES / 'termination_condition.py'}:sentences", tokenizer)
    assert condition(trajectory, 0).ends.tolist() == [[False, True, False, False], [False] * 4]


def test_the_documented_fields_are_all_there_are():
    page = (ROOT / "docs" / "macro-actions.md").read_text("utf-8")
    section = page.partition("## A termination condition of your own\n")[2].partition("\n## ")[0]
    documented = re.findall(r"^\| `([\w.]+)(?:\(\))?` \|", section, re.MULTILINE)
    own = {field.name for field in fields(Trajectory)} - {"rollout"} | {"response_mask"}
    rollout = {field.name for field in fields(Rollout)} - {"response_mask"}
    rollout |= {"prompt_width", "response_ids", "response_rows", "response_runs"}
    assert sorted(documented) == sorted(own | {f"rollout.{name}" for name in rollout})
