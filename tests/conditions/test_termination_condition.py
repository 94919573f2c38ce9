# SPDX-License-Identifier: Apache-2.0
"""From flags to a termination condition."""

import re
from dataclasses import replace

import pytest
import torch

from constituent_treelib import Tree
from dschat.base.errors import UserError
from factories import EOS, condition_of, make_rollout, make_tokenizer, ppo_config
from macro_actions.conditions import ppl, surprise
from macro_actions.segments import segment
from macro_actions.types import Trajectory, mapped
from rl_cases import trajectory_of

LENGTHS = [7, 1, 12, 0]
TRAJECTORY = trajectory_of(LENGTHS, 13, seed=0)


def lengths_of(ends):
    """Per row the lengths of its macro actions."""
    macro = segment(ends, TRAJECTORY.response_mask)
    return [row[mask].tolist() for row, mask in zip(macro.lengths, macro.mask, strict=True)]


def segmented(tmp_path, epoch=0, **flags):
    return condition_of(ppo_config(tmp_path, **flags), None)(TRAJECTORY, epoch).ends


def test_randomized_follows_seed_and_epoch(tmp_path):
    flags = {"termination_condition": "randomized", "ngram_lengths": [1, 2, 3], "repeat_times": 5}
    first = segmented(tmp_path, **flags)
    assert torch.equal(segmented(tmp_path, **flags), first)
    assert not torch.equal(segmented(tmp_path, epoch=1, **flags), first)
    assert not torch.equal(segmented(tmp_path, seed=7, **flags), first)
    assert [sum(row) for row in lengths_of(first)] == LENGTHS
    assert {length for row in lengths_of(first) for length in row[:-1]} <= {1, 2, 3}


@pytest.mark.parametrize(
    ("condition", "text", "expected"),
    [
        ("sentence", "Hi Bob. How are you? Fine", ["Hi Bob.", " How are you?", " Fine"]),
        ("sentence", "one\ntwo. Three", ["one", "\ntwo.", " Three"]),
        ("sentence", "", []),
        ("line", "if a:\n  b\n\nelse:\n", ["if a:\n", "  b\n\n", "else:\n"]),
        ("line", "\n\nab", ["\n\n", "ab"]),
        ("line", "ä€😀\n😀", ["ä€😀\n", "😀"]),
    ],
)
def test_units_of_the_text(condition, text, expected, tmp_path):
    """Of a tokenizer whose tokens are bytes; the end token is one more macro action."""
    tokenizer = make_tokenizer(3 + len(set(text.encode())), [text])
    ids = [*tokenizer(text, add_special_tokens=False).input_ids, tokenizer.eos_token_id]
    rollout = make_rollout([([5], ids), ([5], ids[:1])])
    whole = replace(trajectory_of([len(ids), 1], len(ids), 0), rollout=rollout)
    config = ppo_config(tmp_path, termination_condition=condition)
    macro = segment(condition_of(config, tokenizer)(whole, 0).ends, rollout.response_mask)
    assert macro.lengths[0][macro.mask[0]].tolist() == [*(len(unit.encode()) for unit in expected), 1]


@pytest.mark.parametrize("mode", ["chunk", "token"])
def test_ppl_looks_at_the_reference(mode, tmp_path):
    ends = segmented(tmp_path, termination_condition="ppl", ppl_mode=mode)
    assert torch.equal(ends, ppl(TRAJECTORY.response_mask, TRAJECTORY.ref_logprobs, mode))


def test_surprise_looks_at_the_policy(tmp_path):
    ends = segmented(tmp_path, termination_condition="surprise", surprise_probability=0.2, surprise_count=2)
    assert torch.equal(ends, surprise(TRAJECTORY.response_mask, TRAJECTORY.logprobs, 0.2, 2))
    assert not torch.equal(ends, surprise(TRAJECTORY.response_mask, TRAJECTORY.logprobs))


def write_condition(tmp_path, body):
    file = tmp_path / "mine.py"
    file.write_text(f"import torch\ndef ends(trajectory, tokenizer):\n    {body}\n")
    return f"{file}:ends"


def test_a_users_own(tmp_path):
    body = "assert tokenizer == 'tokenizer'; return torch.arange(13)[None] % 4 == 3 + 0 * trajectory.scores[:, None]"
    config = ppo_config(tmp_path, termination_condition=write_condition(tmp_path, body))
    ends = condition_of(config, "tokenizer")(TRAJECTORY, 0).ends
    assert lengths_of(ends) == [[4, 3], [1], [4, 4, 4], []]
    isolated = ppo_config(
        tmp_path, termination_condition=config.termination.termination_condition, isolate_last_token=True
    )
    assert lengths_of(condition_of(isolated, "tokenizer")(TRAJECTORY, 0).ends) == [[4, 2, 1], [1], [4, 4, 3, 1], []]


def test_what_a_users_function_changes_is_its_copy(tmp_path):
    """Marking ends in the mask itself would leave the policy nothing but them to learn from."""
    body = "ends = trajectory.response_mask; ends[:, ::2] = False; trajectory.scores.zero_(); return ends"
    condition = condition_of(ppo_config(tmp_path, termination_condition=write_condition(tmp_path, body)), None)
    before = mapped(TRAJECTORY, torch.clone)
    assert not torch.equal(condition(TRAJECTORY, 0).ends, before.response_mask)
    assert torch.equal(TRAJECTORY.response_mask, before.response_mask)
    assert torch.equal(TRAJECTORY.scores, before.scores)


@pytest.mark.parametrize(
    ("body", "got"),
    [
        ("return trajectory.response_mask[:, :-1]", r"\(4, 12\) torch.bool"),
        ("return trajectory.response_mask.long()", r"\(4, 13\) torch.int64"),
        ("return [[True] * 13] * 4", "list"),
        ("return None", "NoneType"),
    ],
)
def test_a_wrong_result_is_refused(body, got, tmp_path):
    condition = condition_of(ppo_config(tmp_path, termination_condition=write_condition(tmp_path, body)), None)
    with pytest.raises(UserError, match=rf"--termination_condition .*mine.py:ends: .*\(4, 13\), not {got}"):
        condition(TRAJECTORY, 0)


class Words:
    """What a user's own parser looks like: one word per run of letters, all under one root."""

    name, version, unit = "words", "7", "sentence"

    def parse(self, units):
        words = [tuple(Tree("", *found.span()) for found in re.finditer(r"\w+", unit)) for unit in units]
        return [Tree("S", 0, len(unit), found) for unit, found in zip(units, words, strict=True)]


def make(model):
    assert model == "mine"
    return Words()


def test_parsing_by_a_users_parser(tmp_path):
    """One sentence below the cutoff is one macro action; EOS is another; padding is none."""
    flags = {"parser": f"{__file__}:make", "parser_model": "mine", "parsing_cutoff": 50}
    tokenizer = make_tokenizer()
    rollout = make_rollout([([5], [*tokenizer.encode("the quick"), EOS]), ([5], [EOS])], right=2)
    blank = torch.zeros_like(rollout.response_mask, dtype=torch.float)
    trajectory = Trajectory(rollout, blank, blank, blank, torch.zeros(2))
    condition = condition_of(ppo_config(tmp_path, termination_condition="parsing", **flags), tokenizer)
    found = condition(trajectory, 0)
    macro = segment(found.ends, trajectory.response_mask)
    length = int(trajectory.response_mask[0].sum())
    assert macro.lengths.tolist() == [[length - 1, 1], [1, 0]]
    seconds = found.totals.pop("parsing/seconds")
    assert seconds > 0
    assert found.totals == {"parsing/sentences": 1, "parsing/parsed": 1, "parsing/fell_back": 0}
