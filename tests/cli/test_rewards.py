# SPDX-License-Identifier: Apache-2.0
"""Where step 3's scores come from: a server that goes away and comes back, and models that need some care."""

import threading
import time

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from cli_runs import copy_model, message_of, read_jsonl, training_rows
from closeness import near
from dschat.scoring.reward_reader import load_reward_model
from dschat.scoring.reward_tokenizer import load_reward_tokenizer
from dschat.scoring.serve import Scorer, ScoreServer, application
from fake_judge import graded_in, judge_server, points_by_good
from fake_score_server import StandIn, by_length


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


class Restarted:
    """A stand-in that closes its port when a number of requests has come, and opens it again later, if at all."""

    def __init__(self, after, seconds):
        self.count, self.after, self.seconds = 0, after, seconds
        self.server = StandIn(self.answer)
        self.url, self.port = self.server.url, self.server.port

    def answer(self, request):
        self.count += 1
        if self.count == self.after:
            threading.Thread(target=self._restart).start()
        return by_length(request)

    def _restart(self):
        self.server.stop()
        if self.seconds is not None:
            time.sleep(self.seconds)
            self.server = StandIn(self.answer, port=self.port)


@pytest.mark.slow
def test_a_run_that_lost_its_server_goes_on_from_its_checkpoint(run, prompt_flags, sft, tmp_path):
    flags = prompt_flags | {"actor_model_name_or_path": sft, "save_steps": 2}
    server = Restarted(after=3, seconds=None)  # after the self-check, the first evaluation and a rollout
    result = run("ppo", flags | {"reward_url": server.url, "reward_patience": 1})
    message_of(result, f"--reward_url {server.url}: no answer", "--resume_from_checkpoint")
    again = StandIn()
    run("ppo", flags | {"reward_url": again.url, "resume_from_checkpoint": True}).expect(0)
    again.stop()
    assert [row["update"] for row in training_rows(tmp_path / "out")] == [2, 4]


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
        "judge_price_in": 1,
        "judge_price_out": 2,
        "judge_max_cost": 1,
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
        assert other["judge/cached"] == 1 and other["judge/cost"] == 0
    # The fake charges 100 tokens sent and 10 answered for each response that differs from earlier ones.
    assert 0 < first[0]["judge/cost"] <= (100 * 1 + 10 * 2) / 1e6 + 1e-9
    samples = read_jsonl(tmp_path / "out" / "samples" / "update-000004.jsonl")
    for sample in samples:
        assert sample["score"] == pytest.approx(0.01 * sample["subreddit"] + 2 * sample["judge"], abs=1e-5)
        assert sample["judge_brevity"] == 0.5
