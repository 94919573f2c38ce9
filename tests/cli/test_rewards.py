# SPDX-License-Identifier: Apache-2.0
"""Where step 3's scores come from: a server, a judge, and models that need some care."""

import pytest
from transformers import AutoTokenizer

from cli_runs import copy_model, message_of, read_jsonl, training_rows
from fake_judge import judge_server, points_by_good


def test_a_critic_must_share_the_actors_tokenizer(run, ppo_flags, reward, tmp_path):
    other = copy_model(reward, tmp_path / "other")
    tokenizer = AutoTokenizer.from_pretrained(other)
    tokenizer.add_tokens(["<|unused|>"])
    tokenizer.save_pretrained(other)
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
