# SPDX-License-Identifier: Apache-2.0
"""Whole runs in this process: the file, its rewards, best of N, the last line."""

import re
import shutil
import statistics

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from cli_runs import read_jsonl, write_jsonl
from closeness import near
from dschat.base.errors import UserError
from dschat.data.sources import load_source
from dschat.evaluation import generate as scored
from dschat.evaluation import policy
from dschat.evaluation.generate import run_inference
from dschat.evaluation.responses import is_same_scorer
from factories import BOS, EOS, make_classifier, make_tokenizer, save_folder


@torch.no_grad()
def plain_reward(folder, prompt, response, finished=True):
    """The reward of two texts by plain transformers, unpadded; without EOS if the response was cut."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    parts = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in (prompt, response)]
    end = [EOS] if finished else []
    return float(model(input_ids=torch.tensor([[BOS, *parts[0], *parts[1], *end]])).logits[0, 0])


def reward_of_row(folder, row):
    """`plain_reward` of a row of the file, which says whether its response was cut."""
    return plain_reward(folder, row["prompt"], row["response"], row["finished"])


def in_protocol_order(rows):
    from datasets import Dataset

    return Dataset.from_list(rows).shuffle(seed=1234).to_list()


def test_rows_path_rewards_and_the_last_line(options, project, tmp_path):
    chosen = options(dataset="hh-rlhf", top_k=0, max_new_tokens=60)
    line = run_inference(chosen)
    path = tmp_path / "results" / "hh-rlhf" / "temperature=0.8" / "run.jsonl"
    assert chosen.result_path == path
    assert [file.name for file in path.parent.iterdir()] == ["run.jsonl"]
    rows = read_jsonl(path)
    assert all(list(row) == ["prompt", "response", "reward", "finished", "scorer"] for row in rows)
    (scorer,) = {row["scorer"] for row in rows}
    assert re.fullmatch("rm [0-9a-f]{12}", scorer)
    held_out = [{"prompt": row["prompt"]} for row in read_jsonl(project / "data" / "hh" / "test.jsonl")]
    assert [row["prompt"] for row in rows] == [row["prompt"] for row in in_protocol_order(held_out)]
    for row in rows:
        assert row["reward"] == near(reward_of_row(project / "rm", row))
        assert "<eos>" not in row["response"]
    assert {row["finished"] for row in rows} == {True, False}
    rewards = [row["reward"] for row in rows]
    error = (statistics.variance(rewards) / len(rewards)) ** 0.5
    finished = statistics.fmean(row["finished"] for row in rows)
    assert line.startswith(f"mean reward {statistics.fmean(rewards):.4f} ± {error:.4f}, length ")
    spread = 100 * (finished * (1 - finished) / (len(rows) - 1)) ** 0.5
    assert line.endswith(f" tokens, EOS rate {100 * finished:.1f} ± {spread:.1f} %, 24 rows: {path}")


def test_the_last_line_counts_tokens_and_prompts_that_were_left_out(options):
    flags = {"num_samples": 10, "max_prompt_len": 60, "max_new_tokens": 7, "temperature": "0"}
    line = run_inference(options(dataset="hh-rlhf", **flags))
    summary = r"length 7\.0 ± 0\.0 tokens, EOS rate 0\.0 ± 0\.0 %, (\d+) rows \((\d+) prompts left out\): "
    rows, left_out = map(int, re.search(summary, line).groups())
    assert rows + left_out == 10 and left_out > 0


def test_without_a_reward_model_rows_have_no_reward(run):
    """The responses are those of a run with scores."""
    scored_rows = read_jsonl(run(num_samples=6))
    plain_rows = read_jsonl(run(num_samples=6, reward_model=None, overwrite=True))
    for row, other in zip(scored_rows, plain_rows, strict=True):
        assert other == {name: value for name, value in row.items() if name not in ("reward", "scorer")}


FUNCTION = """
def words(prompts, responses, rows):
    assert all("chosen" in row for row in rows)
    return [float(len(prompt) + len(response)) for prompt, response in zip(prompts, responses)]

def broken(prompts, responses, rows):
    return [None] * len(responses)

def two(prompts, responses):
    return [0.0] * len(responses)
"""


def test_a_function_scores_the_responses(options, project, tmp_path):
    file = tmp_path / "score.py"
    file.write_text(FUNCTION)
    flags = {"dataset": "hh-rlhf", "num_samples": 6, "reward_model": None, "overwrite": True}
    chosen = options(reward_function=f"{file}:words", **flags)
    line = run_inference(chosen)
    rows = read_jsonl(chosen.result_path)
    assert [row["reward"] for row in rows] == [float(len(row["prompt"]) + len(row["response"])) for row in rows]
    assert line.startswith(f"mean reward {statistics.fmean(row['reward'] for row in rows):.4f} ± ")
    other = scored.find_scoring(options(reward_function=f"{file}:broken", **flags).scores)
    assert not is_same_scorer(rows[0]["scorer"], other.name), "another function of the file"
    for name, words in (("broken", "it must return a number"), ("two", "three arguments")):
        with pytest.raises(UserError, match=f"--reward_function.*{words}"):
            run_inference(options(reward_function=f"{file}:{name}", **flags))


def test_best_of_n_keeps_the_best(run, project):
    one, four = (read_jsonl(run(num_samples=8, num_return=n, overwrite=True)) for n in (1, 4))
    for single, best in zip(one, four, strict=True):
        assert list(best) == ["prompt", "response", "reward", "finished", "rewards", "scorer"]
        assert len(best["rewards"]) == 4 and best["reward"] == max(best["rewards"])
        assert best["reward"] == near(reward_of_row(project / "rm", best))
        assert best["rewards"][0] == near(single["reward"]), "more draws begin with the same ones"
    assert len({row["rewards"].index(row["reward"]) for row in four}) > 1


def test_reference_scores(options, project, tmp_path):
    line = run_inference(options(dataset="webgpt", ref_scores=True, model=None))
    path = tmp_path / "results" / "webgpt" / "temperature=0.8" / "reference.jsonl"
    rows, held_out = read_jsonl(path), load_source("webgpt").eval
    assert len(rows) == len(held_out) > 1
    for row, source in zip(rows, held_out, strict=True):
        assert list(row) == ["prompt", "response", "reward", "rejected_response", "rejected_reward", "scorer"]
        assert row["prompt"] == source.prompt
        assert (row["response"], row["rejected_response"]) == (source.chosen, source.rejected)
        for text, reward in (("response", "reward"), ("rejected_response", "rejected_reward")):
            assert row[reward] == near(plain_reward(project / "rm", row["prompt"], row[text]))
    accuracy = statistics.fmean(row["reward"] > row["rejected_reward"] for row in rows)
    assert f"rejected {statistics.fmean(row['rejected_reward'] for row in rows):.4f} ± " in line
    assert f", chosen above rejected {100 * accuracy:.1f} ± " in line and line.endswith(f" {len(rows)} rows: {path}")


def test_reference_scores_need_both_responses(options, tmp_path):
    file = write_jsonl(tmp_path / "rows.jsonl", [{"prompt": f"q{i}", "chosen": " a"} for i in range(40)])
    with pytest.raises(UserError, match=r"--ref_scores: .*rows.jsonl:\d+ has no rejected response"):
        run_inference(options(ref_scores=True, data_path=str(file)))


def test_a_reward_model_with_another_tokenizer(run, tmp_path):
    tokenizer = make_tokenizer(100)
    reward_model = save_folder(tmp_path / "other", make_classifier("llama", seed=3), tokenizer)
    rows = read_jsonl(run(reward_model=reward_model, dataset="hh-rlhf", num_samples=6))
    for row in rows:
        assert row["reward"] == near(reward_of_row(reward_model, row))


def test_conversations_go_through_the_chat_template(run, project, tmp_path):
    for name in ("run/actor", "rm"):
        shutil.copytree(project / name, tmp_path / name)
        tokenizer = AutoTokenizer.from_pretrained(tmp_path / name)
        tokenizer.chat_template = "<bos>{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"
        tokenizer.save_pretrained(tmp_path / name)
    turns = [{"role": "user", "content": "Hello?"}, {"role": "assistant", "content": " Hello!"}]
    file = write_jsonl(tmp_path / "rows.jsonl", [{"messages": turns}] * 20)
    models = {"model": str(tmp_path / "run"), "reward_model": str(tmp_path / "rm")}
    row = read_jsonl(run(data_path=str(file), **models))[0]
    assert row["prompt"] == "<bos>user: Hello?\nassistant:" and row["prompt_messages"] == turns[:1]
    expected = plain_reward(tmp_path / "rm", "user: Hello?\nassistant:", row["response"], row["finished"])
    assert row["reward"] == near(expected)


def test_too_little_memory_names_the_flag(options, monkeypatch):
    def too_much(*_, **keywords):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(scored, "respond_and_score", too_much)
    with pytest.raises(UserError, match=r"--batch_size: .*16 prompts of up to \d+ tokens.*smaller --batch_size"):
        run_inference(options())
    monkeypatch.setattr(policy, "load_causal_lm", too_much)
    with pytest.raises(UserError, match=r"--model: the GPU's memory does not hold .*--dtype bf16"):
        run_inference(options())
