# SPDX-License-Identifier: Apache-2.0
"""Samples of response files: the same prompts from every file that answers the same prompts."""

import json
import random
import sys
from collections import Counter

import pytest

from cli_runs import message_of, read_jsonl, run_command, write_jsonl
from dschat.base.errors import UserError
from dschat.evaluation import sampling
from dschat.evaluation.options import SampleOptions
from dschat.evaluation.responses import Response, read_pairs
from dschat.evaluation.sampling import choose_rows, group_of
from fake_judge import EVALUATION

SCRIPT = EVALUATION / "tools" / "sample_from_dataset.py"


def post(group, number):
    """A TL;DR prompt of DATA's form; group None is a post without a subreddit, ARTICLE an article."""
    if group == "ARTICLE":
        return f"ARTICLE\nSubreddit: r/cnn_dm\nnews {number}\nTL;DR: "
    line = f"Subreddit: r/{group}\n" if group else ""
    return f"POST\n{line}story {number}\nTL;DR: "


def rows(sizes, model="a"):
    prompts = [post(group, number) for group, size in sizes.items() for number in range(size)]
    return [{"prompt": prompt, "response": f" {model} {i}", "reward": i / 4} for i, prompt in enumerate(prompts)]


def sample_file(source, target, **options):
    options = {"dataset": "summarize", "num": 50, "seed": 42} | options
    return sampling.sample(SampleOptions(data_path=source, save_path=target, **options))


def sample(tmp_path, content, name="a", **options):
    file = write_jsonl(tmp_path / f"{name}.jsonl", content)
    line = sample_file(file, tmp_path / f"{name}-sampled.jsonl", **options)
    return read_jsonl(tmp_path / f"{name}-sampled.jsonl"), line


def responses(content):
    return [Response(row["prompt"], row["response"], None, "file:1", row) for row in content]


def groups(sampled):
    return Counter(group_of(row["prompt"]) for row in sampled)


@pytest.mark.parametrize(
    ("prompt", "group"),
    [
        (post("relationships", 1), "r/relationships"),
        ("\n" + post("AskReddit", 1), "r/AskReddit"),
        (post(None, 1), "POST without a subreddit"),
        (post("ARTICLE", 1), "ARTICLE"),
        ("ARTICLE\nnews\nTL;DR: ", "ARTICLE"),
        ("POST\nI saw\nSubreddit: r/late\nTL;DR: ", "POST without a subreddit"),
        ("Human: hi", "other prompts"),
        ("", "other prompts"),
    ],
)
def test_groups(prompt, group):
    assert group_of(prompt) == group


def test_at_most_five_of_each_subreddit(tmp_path):
    """20 groups of 9: 100 candidates, of which 50 are drawn; the articles are one group like the others."""
    sizes = {f"sub{i}": 9 for i in range(18)} | {"ARTICLE": 9, None: 9}
    sampled, line = sample(tmp_path, rows(sizes))
    assert len(sampled) == 50 and max(groups(sampled).values()) <= 5
    assert line.startswith("50 rows of 180, ")
    everything = rows(sizes)
    assert all(row in everything for row in sampled)
    assert len({row["prompt"] for row in sampled}) == 50


def test_small_groups_count_as_much_as_large_ones():
    """One group of 1,000 and 19 of 5: what is trimmed does not prefer the large one.

    Half of 100 candidates stay, so 2.5 of the large group's five are expected; over 40 seeds 100 of 200.
    """
    sizes = {"large": 1000} | {f"sub{i}": 5 for i in range(19)}
    given = responses(rows(sizes))
    found = [response.prompt for seed in range(40) for response in choose_rows(given, "summarize", 50, seed)]
    drawn = [group_of(prompt) for prompt in found].count("r/large")
    assert 70 < drawn < 130  # 7 per cent is the standard deviation of a share of 200 fair draws


def test_filled_up_to_fifty(tmp_path):
    """3 groups give 15; the other 35 come from anywhere, so a group may have more than five."""
    sampled, _ = sample(tmp_path, rows({"x": 40, "y": 40, "z": 5}))
    counts = groups(sampled)
    assert len(sampled) == 50 and counts["r/z"] == 5 and min(counts["r/x"], counts["r/y"]) > 5


def test_fewer_rows_than_asked_for(tmp_path):
    content = rows({"x": 20, "y": 3})
    sampled, line = sample(tmp_path, content)
    assert sorted(row["prompt"] for row in sampled) == sorted(row["prompt"] for row in content)
    assert line.startswith("23 rows: all there are, fewer than --num 50")
    assert sampled != content  # shuffled all the same


@pytest.mark.parametrize("dataset", ["summarize", "webgpt"])
def test_every_model_gets_the_same_prompts_in_the_same_order(tmp_path, dataset):
    sizes = {f"sub{i}": 7 for i in range(20)}
    first, _ = sample(tmp_path, rows(sizes, "a"), "a", dataset=dataset)
    second, _ = sample(tmp_path, rows(sizes, "b"), "b", dataset=dataset)
    third, _ = sample(tmp_path, random.Random(1).sample(rows(sizes, "c"), 140), "c", dataset=dataset)
    prompts = [[row["prompt"] for row in sampled] for sampled in (first, second, third)]
    assert prompts[0] == prompts[1] == prompts[2]
    pairs = read_pairs(tmp_path / "a-sampled.jsonl", "--a", tmp_path / "c-sampled.jsonl", "--b")
    assert len(pairs) == 50 and pairs[0].b.response.startswith(" c ")


def test_rows_with_the_same_prompt_are_different_rows_and_columns_are_kept(tmp_path):
    content = [{"prompt": "p", "response": str(i)} for i in range(8)]
    sampled, _ = sample(tmp_path, content, dataset="hh-rlhf", num=5)
    assert len({row["response"] for row in sampled}) == 5
    content = [{"prompt": "ü\u2028", "response": "", "reward": -1.25, "finished": True, "more": {"x": [1]}}]
    sample_file(write_jsonl(tmp_path / "a.jsonl", content), tmp_path / "a-sampled.jsonl")
    line = (tmp_path / "a-sampled.jsonl").read_text(encoding="utf-8").removesuffix("\n")
    assert json.loads(line) == content[0]


def test_the_documented_command_and_data_of_ones_own(tmp_path):
    write_jsonl(tmp_path / "A.jsonl", rows({f"sub{i}": 7 for i in range(20)}))

    def script(*words):
        return run_command([sys.executable, SCRIPT, *words], cwd=tmp_path)

    files = ["--data_path", "A.jsonl", "--save_path", "A-sampled.jsonl"]
    result = script(*files, "--dataset", "summarize").expect(0)
    assert result.stdout.startswith("50 rows of 140, ") and result.stdout.endswith("; A-sampled.jsonl\n")
    script("--data_file", "A.jsonl", "--save_file", "new/B.jsonl", "--dataset", "summarize").expect(0)
    assert (tmp_path / "new" / "B.jsonl").read_bytes() == (tmp_path / "A-sampled.jsonl").read_bytes()
    message_of(script(*files, "--num", "0"), "--num 0 is out of range: give a whole number of at least 1")
    result = script(*files, "--dataset", "mine").expect(0)
    assert result.stdout == "50 rows of 140; A-sampled.jsonl\n"
    assert "--dataset mine: a data set of your own (published ones: summarize" in result.stderr
    drawn = (tmp_path / "A-sampled.jsonl").read_bytes()
    script(*files, "--dataset", "webgpt").expect(0)
    assert (tmp_path / "A-sampled.jsonl").read_bytes() == drawn, "both are drawn from uniformly"


def test_bad_input(tmp_path):
    with pytest.raises(UserError, match=r"bad\.jsonl:2: no column 'response'"):
        sample(tmp_path, [{"prompt": "p", "response": "r"}, {"prompt": "p"}], "bad")
    with pytest.raises(UserError, match="--data_path .*none.jsonl: there is no such file"):
        sample_file(tmp_path / "none.jsonl", tmp_path / "x.jsonl")
    with pytest.raises(UserError, match="--save_path .*bad.jsonl is the file of --data_path"):
        sample_file(tmp_path / "bad.jsonl", tmp_path / "bad.jsonl")
