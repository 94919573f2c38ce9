# SPDX-License-Identifier: Apache-2.0
"""Rows with the same prompt stay on one side, whatever their format and however many sources there are."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cli_runs import write_jsonl as write
from data_cases import flags_of
from dialogue_cases import dialogue
from dschat.base.errors import UserError
from dschat.data.rows import Row
from dschat.data.sources import Share, load_share, load_source
from dschat.data.splits import opening, parts_of_rows, prompt_of_rows


def pair(prompt: str, number: int) -> dict[str, Any]:
    """A pair of responses to a prompt."""
    return {"prompt": prompt, "chosen": f" good {number}", "rejected": f" bad {number}"}


def openings(rows: Sequence[Row]) -> set[str]:
    """The openings of rows."""
    return set(map(opening, rows))


def share_of(folder: Path, rows: list[dict[str, Any]], **flags: Any) -> Share[Row]:
    """What a step reads of a file with these rows."""
    return load_share(flags_of(write(folder / "rows.jsonl", rows), data_split=None, **flags))


def assert_disjoint(share: Share[Row]) -> None:
    """No opening is on both sides, and both have rows."""
    assert share.train and share.eval
    assert openings(share.train).isdisjoint(openings(share.eval))


def test_parts_by_hand():
    # Prompts in the order of their first rows 3, 0, 1: c takes place 0, a places 1 to 3, b places 4 and 5.
    prompts = ["a", "b", "a", "c", "b", "a"]
    order = np.array([3, 0, 5, 4, 1, 2])
    # The middle of a is 2.5, that of b is 5.
    assert parts_of_rows(prompts, [0, 2, 6], order).tolist() == [1, 1, 1, 0, 1, 1]
    assert parts_of_rows(prompts, [0, 3, 6], order).tolist() == [0, 1, 0, 0, 1, 0]
    assert parts_of_rows(prompts, [0, 3, 5, 6], order).tolist() == [0, 2, 0, 0, 2, 0], (
        "a middle on a bound is behind it"
    )
    assert parts_of_rows(["a", "a", "a"], [0, 2, 3], np.array([2, 0, 1])).tolist() == [0, 1, 0], "one prompt: rows"
    assert parts_of_rows([], [0, 0, 0], np.array([], dtype=np.uint32)).tolist() == []


@pytest.mark.parametrize("step", [1, 3])
def test_pairs_of_one_prompt_are_held_out_together(tmp_path, step):
    rows = [pair(f"What is {number // 4}?", number) for number in range(240)]
    share = share_of(tmp_path, rows, step=step)
    assert_disjoint(share)
    assert (len(share.train), len(share.eval)) == (228, 12), "5 % of 240 rows: three prompts of four pairs"


def test_a_prompt_written_in_other_ways_is_the_same_prompt(tmp_path):
    """A letter with its accent is one character or two; white space is of any kind and length."""
    rows = []
    for number in range(60):
        for prompt in ("Caf\u00e9 of {}?", "Cafe\u0301 of {}?", " Caf\u00e9  of\n{}?\t", "Caf\u00e9 of\u00a0{}?"):
            rows.append(pair(prompt.format(number), number))
    share = share_of(tmp_path, rows)
    numbers = [{row.prompt.split()[-1] for row in part} for part in (share.train, share.eval)]
    assert numbers[0].isdisjoint(numbers[1]) and len(numbers[1]) == 3


def test_dialogues_that_begin_alike_are_held_out_together(tmp_path):
    """Turns of one dialogue, dialogues that go on differently, and texts of HH-RLHF have the same opening."""
    rows = []
    for number in range(60):
        question = f"Question {number}?"
        rows.append({"messages": dialogue(question, "First answer.")})
        rows.append({"messages": dialogue(question, "Other answer.", "Why?", "Because.")})
        system = {"role": "system", "content": f"Rule {number % 7}."}
        rows.append({"messages": [system, *dialogue(f" {question}", "Third.")]})
        rows.append(
            {"prompt": f"\n\nHuman: {question}\n\nAssistant: Yes.\n\nHuman: So?\n\nAssistant:", "response": "x"}
        )
    share = share_of(tmp_path, rows)
    assert_disjoint(share)
    assert len(openings(share.train) | openings(share.eval)) == 60


def test_runs_of_other_seeds_take_the_same_rows(tmp_path):
    """PPO shares no prompt with a reward model of another seed, and nobody trains on what another run holds out."""
    path = write(tmp_path / "rows.jsonl", [pair(f"What is {number // 2}?", number) for number in range(800)])
    reward, other, ppo = (
        load_share(flags_of(path, step=step, data_split="0,3,1", seed=seed)) for step, seed in ((2, 1), (2, 9), (3, 9))
    )
    assert (reward.train, reward.eval) == (other.train, other.eval)
    assert (len(reward.train), len(ppo.train), len(reward.eval), len(ppo.eval)) == (570, 190, 30, 10)
    sides = [openings(rows) for rows in (reward.train, ppo.train, reward.eval, ppo.eval)]
    assert sum(map(len, sides)) == len(set().union(*sides)) == 400, "every prompt is on one side"


@pytest.mark.parametrize("split", [None, "1,1,1"])
def test_a_prompt_of_two_sources_is_on_one_side(tmp_path, split):
    demonstrations = [{"prompt": f"Q{number}", "response": " a"} for number in range(100)]
    pairs = [pair(f"Q{number}", number) for number in range(99, -1, -1)]
    paths = [write(tmp_path / "a.jsonl", demonstrations), write(tmp_path / "b.jsonl", pairs)]
    for order in (paths, paths[::-1]):
        share = load_share(flags_of(*order, data_split=split))
        assert_disjoint(share)
        if split is None:
            assert len(share.train) + len(share.eval) == 200, "no row is lost"

    # What one source alone holds out is held out of both together.
    together = openings(load_share(flags_of(*paths, data_split=None)).eval)
    assert openings(load_source(paths[0]).eval) <= together


def test_other_sources_do_not_change_which_step_has_a_row(tmp_path):
    """Step 1 also trains on demonstrations of some of the prompts that all steps divide."""
    pairs = write(tmp_path / "pairs.jsonl", [pair(f"Q{number}", number) for number in range(400)])
    demonstrations = [{"prompt": f"Q{number}", "response": " a"} for number in range(200)]
    more = write(tmp_path / "more.jsonl", demonstrations)
    split = {"data_split": "2,4,4"}
    beside = load_share(flags_of(pairs, more, step=1, **split))
    first = {row.origin for row in beside.train if row.origin.startswith(str(pairs))}
    assert first <= {row.origin for row in load_share(flags_of(pairs, step=1, **split)).train}
    for step in (2, 3):
        assert first.isdisjoint(row.origin for row in load_share(flags_of(pairs, step=step, **split)).train)


def test_two_editions_with_evaluation_rows_of_their_own(tmp_path):
    """Each trains on prompts that the other evaluates: these are dropped from the training of both."""
    for name, other in (("a", "b"), ("b", "a")):
        write(tmp_path / name / "train.jsonl", [pair(f"{name}{n}", n) for n in range(20)] + [pair(f"{other}x", 1)])
        write(tmp_path / name / "test.jsonl", [pair(f"{name}x", 2)])
    share = load_share(flags_of(tmp_path / "a", tmp_path / "b", data_split=None))
    assert len(share.train) == 40 and openings(share.train).isdisjoint(openings(share.eval))
    assert [one["dropped"] for one in share.sources] == [{"prompt held out in another source": 1}] * 2


def test_data_whose_rows_begin_alike(tmp_path):
    """Examples before the question are no opening; and where all prompts are equal, each row stands for itself."""
    shots = [dialogue("2+2?", "4", f"{number // 2}+1?", "n") for number in range(80)]
    rows = load_source(write(tmp_path / "shots.jsonl", [{"messages": shot} for shot in shots]))
    last = [{row.messages[-1]["content"] for row in part} for part in (rows.train, rows.eval)]
    assert len(rows.eval) == 4 and last[0].isdisjoint(last[1])

    same = load_source(write(tmp_path / "same.jsonl", [pair("Tell a story.", number) for number in range(40)]))
    assert (len(same.train), len(same.eval)) == (38, 2)
    assert prompt_of_rows(same.train) is None


def test_of_few_prompts_the_one_with_the_fewest_rows_is_held_out(tmp_path):
    rows = [pair(f"Q{number % 3}", number) for number in range(60)] + [pair("Q3", number) for number in range(15)]
    share = share_of(tmp_path, rows)
    assert len(share.train) == 60 and openings(share.train) == {"Q0", "Q1", "Q2"}
    assert len(share.eval) == 15 and openings(share.eval) == {"Q3"}


@pytest.mark.parametrize("share, held_out", [(0.0, 0), (0.3, 12)])
def test_the_share_that_is_held_out(tmp_path, share, held_out):
    rows = share_of(tmp_path, [pair(f"Q{number}", number) for number in range(40)], eval_share=share)
    assert (len(rows.train), len(rows.eval)) == (40 - held_out, held_out)


def test_evaluation_files_alone_are_not_trained_on(tmp_path):
    write(tmp_path / "test.jsonl", [pair("Q", 0)])
    source = load_source(tmp_path)
    assert (len(source.train), len(source.eval), source.num_rows) == (0, 1, (0, 1))
    with pytest.raises(UserError, match="has evaluation rows and no training rows. Add files train"):
        load_share(flags_of(tmp_path))
    assert len(load_share(flags_of(tmp_path / "test.jsonl", data_split=None)).train) == 1, "the remedy"
