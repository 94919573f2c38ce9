# SPDX-License-Identifier: Apache-2.0
"""Whole iterations of the PPO trainer: what it writes, and responses without a score."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

from cli_runs import read_jsonl
from closeness import near
from dschat.run.state import derive_seed
from dschat.scoring.function import FunctionScores
from dschat.scoring.source import Scores, Weighted
from dschat.scoring.weighted import WeightedScores
from factories import (
    largest_difference,
    make_causal_lm,
    make_classifier,
    make_prompts,
    ppo_config,
    ppo_loop,
    weights_of_all,
)


def test_derived_seeds_differ():
    seeds = {derive_seed(1234, kind, draw, 0, part) for kind in range(2) for draw in range(20) for part in range(3)}
    assert len(seeds) == 120 and all(0 <= seed < 2**32 for seed in seeds)
    assert derive_seed(1, 2) == derive_seed(1, 2)


def share_of_a(prompts, responses, rows):
    """Share of the letter a among the characters of a response."""
    return torch.tensor([response.count("a") / max(len(response), 1) for response in responses])


def make_trainer(folder, num_prompts=32, reward=share_of_a, **overrides):
    """Models wide enough for a real distribution, narrow enough for a short run to move it."""
    config = ppo_config(folder, **overrides)
    make = partial(make_causal_lm, initializer_range=0.02)
    models = {"actor": make(), "reference": make(), "critic": make_classifier(initializer_range=0.02)}
    return ppo_loop(config, reward, make_prompts(num_prompts), make_prompts(6), **models)


def test_fit_writes_what_it_should(group, tmp_path):
    """34 prompts, rollouts of 16 = 2 generation batches of 8, updates of 2 x 4, 2 PPO epochs: 2 x 4 updates."""
    sizes = {"generation_batches": 2, "per_device_training_batch_size": 4, "gradient_accumulation_steps": 2}
    trainer = make_trainer(tmp_path, num_prompts=34, ppo_epochs=2, eval_interval=4, **sizes)
    count = FunctionScores(lambda prompts, responses, rows: [float(len(text)) for text in responses], "--metric")
    trainer.algorithm.scorer.models = replace(trainer.algorithm.models, metric=count, metric_name="count")
    result = trainer.fit()
    rows = read_jsonl(tmp_path / "metrics.jsonl")
    train = [row for row in rows if "objective/scores" in row]
    assert [row["update"] for row in train] == [4, 8]
    assert all({"time/generation", "time/scoring", "time/training"} <= row.keys() for row in train)
    means = {f"eval/{name}" for name in ("scores", "kl", "kl_per_token", "length", "eos_rate", "count")}
    assert set(result) == means | {f"{name}_stderr" for name in means} | {"eval/rows"}
    samples = read_jsonl(tmp_path / "samples" / "update-000008.jsonl")
    assert len(samples) == 6 and {"prompt", "response", "score", "count", "finished", "tokens"} <= samples[0].keys()
    means = {key: sum(sample[key] for sample in samples) / 6 for key in ("score", "count")}
    assert means == near({"score": result["eval/scores"], "count": result["eval/count"]})


def test_a_response_without_a_score_is_no_measurement(group, tmp_path):
    """Ten held-out responses, three of them with a score: mean and standard error are those of three numbers."""

    def some(prompts, responses, rows):
        return [float(row["n"]) ** 2 if row["n"] % 4 == 1 else None for row in rows]

    def length(prompts, responses, rows):
        return [float(len(response)) for response in responses]

    reward = WeightedScores([Weighted("some", 2.0, FunctionScores(some, "--f", "skip"))], skips=True)
    trainer = make_trainer(tmp_path, reward=reward, on_reward_error="skip")
    scorer = trainer.algorithm.scorer
    scorer.models = replace(scorer.models, metric=FunctionScores(length, "--m"), metric_name="m")
    trainer.algorithm.held_out = make_prompts(10)
    metrics = trainer.evaluate()
    scored = np.array([1.0, 25.0, 81.0])
    assert metrics["eval/some"] == near(scored.mean()) and metrics["eval/scores"] == near(2 * scored.mean())
    assert metrics["eval/scores_stderr"] == near(2 * scored.std(ddof=1) / np.sqrt(3))
    assert metrics["eval/some_stderr"] == near(scored.std(ddof=1) / np.sqrt(3))
    assert metrics["eval/unscored"] == near(0.7)
    samples = read_jsonl(tmp_path / "samples" / "update-000000.jsonl")
    assert [sample["score"] for sample in samples] == [2.0 * n**2 if n % 4 == 1 else None for n in range(10)]
    for sample in samples:
        assert (sample["some"] is None) == bool(sample["unscored"])


class SomeUnscored:
    """Scores rows 0 to 7 by their numbers; the second and the last could not be scored and stand at `value`."""

    model = None

    def __init__(self, value):
        self.value = value

    def __call__(self, rollout, texts):
        values = torch.arange(8.0)
        missing = torch.tensor([i in (1, 7) for i in range(8)])
        return Scores(torch.where(missing, self.value, values), missing, {"programs/passed": (6.0, 8.0)})


@pytest.mark.parametrize("whiten", [False, True])
def test_a_response_that_could_not_be_scored_is_not_trained_on(group, tmp_path, whiten):
    weights = []
    for value in (0.0, 1e6):
        trainer = make_trainer(tmp_path / str(value), whiten_advantages=whiten, actor_learning_rate=1e-2)
        before = weights_of_all(**trainer.algorithm.models.trained)
        trainer.algorithm.scorer.models = replace(trainer.algorithm.models, reward=SomeUnscored(value))
        metrics = trainer.iterate([list(range(8))])
        weights.append(weights_of_all(**trainer.algorithm.models.trained))
        assert metrics["programs/passed"] == 0.75
        assert largest_difference(before, weights[-1]) > 1e-3
    assert largest_difference(*weights) == 0
