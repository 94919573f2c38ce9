# SPDX-License-Identifier: Apache-2.0
"""Where step 3's scores come from: a server, a judge, and models that need some care."""

import threading

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from cli_runs import copy_model, message_of, read_jsonl, training_rows
from closeness import near
from dschat.scoring.reward_reader import load_reward_model
from dschat.scoring.reward_tokenizer import load_reward_tokenizer
from dschat.scoring.serve import Scorer, ScoreServer, application
from fake_judge import graded_in, judge_server, points_by_good


@pytest.fixture
def other(reward, tmp_path):
    """The reward model with a tokenizer that has a token more than the actor's."""
    folder = copy_model(reward, tmp_path / "other")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens(["<|unused|>"])
    tokenizer.save_pretrained(folder)
    classifier = AutoModelForSequenceClassification.from_pretrained(folder)
    classifier.resize_token_embeddings(len(tokenizer))
    classifier.save_pretrained(folder)
    return folder


def test_a_served_reward_model_scores_as_one_in_the_process(run, prompt_flags, sft, other, tmp_path):
    tokenizer = load_reward_tokenizer(str(other), False)
    reader = load_reward_model(str(other), tokenizer, False, torch.device("cpu"), torch.float32, 4)
    server = ScoreServer("127.0.0.1", 0, application(Scorer(reader), str(other)))
    thread = threading.Thread(target=server.answer)
    thread.start()
    models = {"actor_model_name_or_path": sft, "reward_model_name_or_path": other, "reward_url": server.url}
    result = run("ppo", prompt_flags | models | {"reward_batch": 5})
    server.should_exit = True
    thread.join()
    result.expect(0)
    assert "scores text, read as prompt + response + EOS by its own tokenizer" in result.stderr
    samples = read_jsonl(tmp_path / "out" / "samples" / "update-000004.jsonl")
    assert len(samples) == 8 == len({sample["reward_url"] for sample in samples})
    for sample in samples:
        assert sample["reward_url"] == near(sample["reward_model"])
        assert sample["score"] == near(2 * sample["reward_model"])


def test_a_critic_must_share_the_actors_tokenizer(run, ppo_flags, other):
    result = run("ppo", ppo_flags | {"critic_model_name_or_path": other})
    message_of(result, "--critic_model_name_or_path have different tokenizers", "starts from the actor")


RUBRIC = """
task = "Grade the summary of a post."
prompt = "post"
response = "summary"
[criteria]
brevity = "Is it short?"
truth = {question = "Is it true?", weight = 3}
"""


def test_a_judge_beside_a_function(run, prompt_flags, sft, functions, tmp_path, monkeypatch):
    """Its points are in metrics and samples; a second run with the same cache asks nothing, and is the same."""
    monkeypatch.delenv("JUDGE_API_KEY", raising=False)
    (tmp_path / "rubric.toml").write_text(RUBRIC)
    flags = prompt_flags | {
        "actor_model_name_or_path": sft,
        "reward_function": f"{functions}:subreddit",
        "reward_weights": ["judge=2", "subreddit=0.01"],
        "reward_judge": tmp_path / "rubric.toml",
        "judge_model": "m",
        "judge_cache": tmp_path / "answers",
        "eval_interval": 2,
    }
    with judge_server() as server:
        server.answer = lambda messages: points_by_good(messages).replace('"brevity": 0', '"brevity": 5')
        run("ppo", flags | {"judge_url": server.url}).expect(0)
        asked = len(server.bodies)
        assert asked and set(graded_in(server.bodies[0]["messages"])) == {"post", "summary"}
        assert max(server.answered.values()) == 1  # the self-check, evaluations and rollouts share the cache
        again = {"judge_url": server.url, "output_dir": tmp_path / "again"}
        run("ppo", flags | again).expect(0)
        assert len(server.bodies) == asked
    first, second = (training_rows(tmp_path / name) for name in ("out", "again"))
    for row, other in zip(first, second, strict=True):
        assert row["loss/policy"] == other["loss/policy"] and row["objective/judge"] == other["objective/judge"]
        points = 0.25 * row["objective/judge_brevity"] + 0.75 * row["objective/judge_truth"]
        assert row["objective/judge"] == pytest.approx(points, abs=1e-6)
        assert other["judge/cached"] == 1
    samples = read_jsonl(tmp_path / "out" / "samples" / "update-000004.jsonl")
    for sample in samples:
        assert sample["score"] == pytest.approx(0.01 * sample["subreddit"] + 2 * sample["judge"], abs=1e-5)
        assert sample["judge_brevity"] == 0.5
