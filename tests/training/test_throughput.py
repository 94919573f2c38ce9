# SPDX-License-Identifier: Apache-2.0
"""Tokens per second, MFU and the share of the memory's bandwidth: by hand, and in the metrics of every step."""

from types import SimpleNamespace

import numpy as np
import pytest

from closeness import FORMULA, near
from dschat.data.examples import PairExample, PreferenceExample, SFTExample
from dschat.models.layout import Lengths
from dschat.refuel.offline import RefuelTask
from dschat.refuel.token_pairs import RegressionExample
from dschat.run.peaks import Gpu
from dschat.training import throughput
from dschat.training.supervised.dpo import DPOTask
from dschat.training.supervised.reward import RewardTask
from dschat.training.supervised.sft import SFTTask
from dschat.training.throughput import Throughput
from factories import collected, make_causal_lm, make_classifier, make_prompts, ppo_config, ppo_loop

# The models of `factories`: 2 layers, 32 wide, 2 heads of width 16, 1 key-value head, an MLP of 64; 100 ids. By hand:
# q and o 32 · 32 each, k and v 32 · 16 each, gate, up and down 32 · 64 each.
LAYERS = 2 * (2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 64)
NORMS = 5 * 32
HEAD = 100 * 32
GPU = Gpu(memory=1, operations_per_second=1e9, bytes_per_second=1e6)


def engine_with(model):
    """As much of an engine as is looked at."""
    return SimpleNamespace(module=SimpleNamespace(inner=model))


def operations(lengths, head=HEAD):
    """Of a forward and a backward pass of an actor; without a head, of a critic with its row of 32."""
    weights = LAYERS + NORMS + (head or 32)
    return 6 * weights * sum(lengths) + 12 * 2 * 32 * sum(length * length for length in lengths)


def test_updates_by_hand():
    """Actor and critic on texts of 5 and 3 tokens in 2 s, and updates of the critic alone."""
    engines = [engine_with(make_causal_lm()), engine_with(make_classifier())]
    measured = Throughput(engines, GPU)
    both = operations([5, 3]) + operations([5, 3], head=0)
    metrics = measured.trained([np.array([5, 3])] * 2, 2.0)
    assert metrics == near({"time/trained_per_second": 4.0, "time/mfu": both / 2e9}, FORMULA)
    metrics = measured.trained([np.array([]), np.array([5, 3])], 2.0)
    expected = operations([5, 3], head=0)
    assert metrics == near({"time/trained_per_second": 4.0, "time/mfu": expected / 2e9}, FORMULA)


def test_sampling_by_hand():
    """Two draws in 0.5 s, float32, two rows at a time.

    Responses of 3 and 1 tokens to prompts of 4 and 6 take 3 steps, and two tokens see 5 and 6 keys; one of 2 tokens to
    a prompt of 1 takes 2 steps, and one token sees 2.
    """
    measured = Throughput([engine_with(make_causal_lm())], GPU, slots=2)
    draws = [Lengths(np.array([4, 6]), np.array([3, 1])), Lengths(np.array([1]), np.array([2]))]
    read = 4 * ((3 + 2) * (LAYERS + NORMS + HEAD) + (5 + 6 + 2) * 2 * 2 * 16)
    expected = {"time/sampled_per_second": 12.0, "time/bandwidth": read / 0.5e6}
    assert measured.sampled(draws, 0.5) == near(expected, FORMULA)


def test_two_processes_have_two_gpus(monkeypatch):
    """With as much on the other one, there are twice the tokens in the same time, and the shares are the same."""
    measured = Throughput([engine_with(make_causal_lm())], GPU, slots=1)
    draws = [Lengths(np.array([4]), np.array([3]))]
    alone = measured.trained([np.array([5])], 1.0) | measured.sampled(draws, 1.0)
    monkeypatch.setattr(throughput, "sum_over_ranks", lambda numbers: 2 * numbers)
    monkeypatch.setattr(throughput, "world_size", lambda: 2)
    both = measured.trained([np.array([5])], 1.0) | measured.sampled(draws, 1.0)
    doubled = {name: x * (2 if name.endswith("per_second") else 1) for name, x in alone.items()}
    assert both == near(doubled, FORMULA)


def test_the_lengths_of_every_task():
    """Prompts count, too, and both sequences of a pair."""
    pair = PreferenceExample([1, 2], [3], [4, 5])
    regression = RegressionExample([1, 2], [3], [4, 5], chosen_reward=1.0, rejected_reward=0.0)
    assert SFTTask([], [], 0).lengths([SFTExample([1, 2], [3, 4, 5], [True, False, True])]) == [5]
    assert RewardTask([], [], 0).lengths([PairExample([1, 2, 3], [1, 2])]) == [3, 2]
    assert DPOTask([], [], 0, None, None, None).lengths([pair]) == [3, 4]
    assert RefuelTask([], [], 0, 1.0, 1.0).lengths([regression]) == [3, 4]


def ppo_trainer(folder, **overrides):
    """32 prompts, whose responses all have the same score."""
    return ppo_loop(ppo_config(folder, **overrides), lambda p, r, rows: [1.0] * len(r), make_prompts(32))


@pytest.mark.parametrize(
    ("flags", "done", "actor", "critic"),
    [({"ppo_epochs": 2}, 0, 2, 2), ({"ppo_epochs": 2}, 1, 1, 1), ({"critic_epochs": 3}, 0, 1, 3)],
)
def test_a_rollouts_updates(flags, done, actor, critic, group, tmp_path):
    """Passes of actor and critic; an iteration that is taken up after the first of two has trained on half as much."""
    trainer = ppo_trainer(tmp_path, **flags)
    algorithm = trainer.algorithm
    algorithm.throughput = Throughput(algorithm.models.trained.values(), GPU, slots=8)
    current = algorithm.current = collected(trainer, [list(range(8))])
    rollout = current.batch.rollout
    lengths, targets = rollout.attention_mask.sum(1).tolist(), int(rollout.response_mask.sum())
    assert current.metrics["time/sampled_per_second"] == near(targets / current.metrics["time/generation"], FORMULA)
    current.progress.steps = done
    metrics = algorithm.iterate([], 0)
    seconds = metrics["time/training"]
    assert metrics["time/trained_per_second"] == near(max(actor, critic) * sum(lengths) / seconds, FORMULA)
    expected = actor * operations(lengths) + critic * operations(lengths, head=0)
    assert metrics["time/mfu"] == near(expected / (seconds * GPU.operations_per_second), FORMULA)


def test_refilled_prompts_were_sampled_too(group, tmp_path):
    """Every group has equal scores, so that two rounds sample as much again each."""
    flags = {"advantage_estimator": "grpo", "samples_per_prompt": 2, "drop_equal_groups": True, "refill_rounds": 2}
    trainer = ppo_trainer(tmp_path, **flags)
    iteration = collected(trainer, [list(range(trainer.algorithm.plan.rollout_per_rank))])
    metrics = iteration.metrics
    drawn = metrics["time/sampled_per_second"] * metrics["time/generation"]
    refilled = metrics["rollout/refill_tokens"]
    assert refilled > 0 and drawn == near(int(iteration.batch.response_mask.sum()) + refilled, FORMULA)
