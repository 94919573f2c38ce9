# SPDX-License-Identifier: Apache-2.0
"""From flags to a termination condition."""

import pytest
import torch

from dschat.errors import UserError
from dschat.rl.macro_actions import segment
from dschat.trainers.segmentation import make_segmenter
from factories import ppo_config
from rl_cases import trajectory_of

LENGTHS = [7, 1, 12, 0]
TRAJECTORY = trajectory_of(LENGTHS, 13, seed=0)


def lengths_of(ends):
    """Per row the lengths of its macro actions."""
    macro = segment(ends, TRAJECTORY.response_mask)
    return [row[mask].tolist() for row, mask in zip(macro.lengths, macro.mask, strict=True)]


def segmented(tmp_path, epoch=0, **flags):
    return make_segmenter(ppo_config(tmp_path, **flags), None)(TRAJECTORY, epoch)


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({"ngram": "1"}, [[1] * 7, [1], [1] * 12, []]),
        ({"ngram": "5"}, [[5, 2], [1], [5, 5, 2], []]),
        ({"ngram": "inf"}, [[7], [1], [12], []]),
        ({"ngram": "5", "isolate_last_token": True}, [[5, 1, 1], [1], [5, 5, 1, 1], []]),
        ({"ngram": "inf", "isolate_last_token": True}, [[6, 1], [1], [11, 1], []]),
    ],
)
def test_fixed(flags, expected, tmp_path):
    assert lengths_of(segmented(tmp_path, **flags)) == expected


def test_randomized_follows_seed_and_epoch(tmp_path):
    flags = {"termination_condition": "randomized", "ngram_lengths": [1, 2, 3], "repeat_times": 5}
    first = segmented(tmp_path, **flags)
    assert torch.equal(segmented(tmp_path, **flags), first)
    assert not torch.equal(segmented(tmp_path, epoch=1, **flags), first)
    assert not torch.equal(segmented(tmp_path, seed=7, **flags), first)
    assert [sum(row) for row in lengths_of(first)] == LENGTHS
    assert {length for row in lengths_of(first) for length in row[:-1]} <= {1, 2, 3}


@pytest.mark.parametrize("mode", ["chunk", "prefix", "token"])
def test_ppl_looks_at_the_reference(mode, tmp_path):
    ends = segmented(tmp_path, termination_condition="ppl", ppl_mode=mode)
    nll = (-TRAJECTORY.ref_logprobs).tolist()
    for row, length in enumerate(LENGTHS):
        expected, start = [], 0
        for j in range(1, length):
            now, past = nll[row][j], nll[row][start if mode == "chunk" else 0 : j]
            cut = now > nll[row][j - 1] if mode == "token" else now > sum(past) / len(past)
            if cut:
                expected.append(j - start)
                start = j
        assert lengths_of(ends)[row] == ([*expected, length - start] if length else [])


def write_condition(tmp_path, body):
    file = tmp_path / "mine.py"
    file.write_text(f"import torch\ndef ends(trajectory, tokenizer):\n    {body}\n")
    return f"{file}:ends"


def test_a_users_own(tmp_path):
    body = "assert tokenizer == 'tokenizer'; return torch.arange(13)[None] % 4 == 3 + 0 * trajectory.scores[:, None]"
    config = ppo_config(tmp_path, termination_condition=write_condition(tmp_path, body))
    ends = make_segmenter(config, "tokenizer")(TRAJECTORY, 0)
    assert lengths_of(ends) == [[4, 3], [1], [4, 4, 4], []]
    isolated = ppo_config(tmp_path, termination_condition=config.termination_condition, isolate_last_token=True)
    assert lengths_of(make_segmenter(isolated, "tokenizer")(TRAJECTORY, 0)) == [[4, 2, 1], [1], [4, 4, 3, 1], []]


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
    segmenter = make_segmenter(ppo_config(tmp_path, termination_condition=write_condition(tmp_path, body)), None)
    with pytest.raises(UserError, match=rf"--termination_condition .*mine.py:ends: .*\(4, 13\), not {got}"):
        segmenter(TRAJECTORY, 0)


def test_a_function_that_does_not_exist(tmp_path):
    spec = write_condition(tmp_path, "pass").replace(":ends", ":other")
    with pytest.raises(UserError, match="--termination_condition .*no function named 'other'"):
        make_segmenter(ppo_config(tmp_path, termination_condition=spec), None)


def test_an_unknown_condition(tmp_path):
    with pytest.raises(UserError, match="--termination_condition parsing"):
        segmented(tmp_path, termination_condition="parsing")
