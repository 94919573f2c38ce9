# SPDX-License-Identifier: Apache-2.0
"""Samples of response files: the same prompts from every file that answers the same prompts."""

import random
from collections import Counter

import pytest

from cli_runs import read_jsonl, write_jsonl
from dschat.base.errors import UserError
from dschat.cli import main
from dschat.evaluation import sampling
from dschat.evaluation.options import SampleOptions
from dschat.evaluation.sampling import group_of


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


def groups(sampled):
    return Counter(group_of(row["prompt"]) for row in sampled)


@pytest.mark.parametrize(
    ("prompt", "group"),
    [
        (post("relationships", 1), "r/relationships"),
        (post(None, 1), "POST without a subreddit"),
        (post("ARTICLE", 1), "ARTICLE"),
        ("POST\nI saw\nSubreddit: r/late\nTL;DR: ", "POST without a subreddit"),
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
    assert len({row["prompt"] for row in sampled}) == 50


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
    second, _ = sample(tmp_path, random.Random(1).sample(rows(sizes, "b"), 140), "b", dataset=dataset)
    assert [row["prompt"] for row in first] == [row["prompt"] for row in second]
    assert len(first) == 50 and second[0]["response"].startswith(" b ")


def test_rows_with_the_same_prompt_are_different_rows_and_columns_are_kept(tmp_path):
    content = [{"prompt": "ü", "response": str(i), "more": {"x": [1]}} for i in range(8)]
    sampled, _ = sample(tmp_path, content, dataset="hh-rlhf", num=5)
    assert len({row["response"] for row in sampled}) == 5 and all(row in content for row in sampled)


def test_the_command_and_data_of_ones_own(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write_jsonl(tmp_path / "A.jsonl", rows({f"sub{i}": 7 for i in range(20)}))
    assert main("sample --data_file A.jsonl --save_file new/B.jsonl --dataset summarize".split()) == 0
    assert main("sample --data_path A.jsonl --save_path C.jsonl --dataset mine".split()) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("50 rows of 140, ") and first.endswith("; new/B.jsonl")
    assert second == "50 rows of 140; C.jsonl"


def test_bad_input(tmp_path):
    with pytest.raises(UserError, match=r"bad\.jsonl:2: no column 'response'"):
        sample(tmp_path, [{"prompt": "p", "response": "r"}, {"prompt": "p"}], "bad")
    with pytest.raises(UserError, match="--save_path .*bad.jsonl is the file of --data_path"):
        sample_file(tmp_path / "bad.jsonl", tmp_path / "bad.jsonl")
