# SPDX-License-Identifier: Apache-2.0
"""--max_tokens_per_micro_batch in every step: what its forward passes hold, and that it changes no numbers.

On two processes and at every ZeRO stage: tests/distributed/test_same_update.py.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from closeness import UPDATE, assert_weights_near, near
from dschat.models.policy import PolicyModel
from dschat.models.scalar import ScalarModel
from dschat.scoring.reward_model import RewardModelScores
from factories import frozen_engine_of, make_causal_lm, make_classifier, make_prompts, ppo_config, ppo_loop, weights_of
from recorded_updates import DEMONSTRATIONS, PAIRS, Case, engine_for, supervised_trainer, supervised_update
from refuel_runs import trainer_of

Trained = tuple[Any, dict[str, float]]  # an engine after an update, and the numbers of the update and an evaluation


def supervised(step, folder, tokens):
    case, model = Case(tokens=tokens), make_classifier(seed=2) if step == "reward" else make_causal_lm()
    held_out = {"sft": DEMONSTRATIONS, "reward": PAIRS}[step][:5]
    trainer = supervised_trainer(step, engine_for(model, case, folder), case, folder, held_out)
    return trainer.algorithm.engine, supervised_update(trainer, 0) | trainer.evaluate()


def ppo(estimator, folder, tokens):
    """RLOO asks for log-probs before its update, PPO in it."""
    flags = {"samples_per_prompt": 2, "per_device_training_batch_size": 16, "actor_learning_rate": 1e-4}
    config = ppo_config(folder, advantage_estimator=estimator, max_tokens_per_micro_batch=tokens, **flags)
    sizes = (64, 4 * tokens) if tokens else (16,)
    reward = RewardModelScores(frozen_engine_of(make_classifier(seed=5)), *sizes)
    trainer = ppo_loop(config, reward, make_prompts(8), make_prompts(8), make_causal_lm(initializer_range=0.1))
    return trainer.algorithm.models.actor, trainer.iterate([list(range(8))]) | trainer.evaluate()


def online(folder, tokens):
    trainer = trainer_of(folder, noptepochs=2, learning_rate=1e-4, max_tokens_per_micro_batch=tokens)
    return trainer.algorithm.models.policy, trainer.iterate([list(range(8))]) | trainer.evaluate()


# The step; tokens of a micro-batch, so that an update has several; how it is run.
STEPS: dict[str, tuple[int, Callable[[Path, int | None], Trained]]] = {
    "sft": (18, lambda *given: supervised("sft", *given)),
    "reward": (36, lambda folder, tokens: supervised("reward", folder, tokens and tokens // 2)),
    "ppo": (40, lambda *given: ppo("gae", *given)),
    "rloo": (40, lambda *given: ppo("rloo", *given)),
    "refuel online": (200, online),
}


@pytest.mark.parametrize("step", STEPS)
def test_the_same_numbers_in_passes_of_so_many_tokens(step, group, tmp_path, monkeypatch):
    passes = []  # of an update or not; tokens, padding included
    for model in (PolicyModel, ScalarModel):
        monkeypatch.setattr(model, "forward", noting(model.forward, passes))
    tokens, run = STEPS[step]
    engine, expected = run(tmp_path / "rows", None)
    by_rows = passes.copy()
    passes.clear()
    found_engine, found = run(tmp_path / "tokens", tokens)
    largest = {kind: max(size for training, size in passes if training is kind) for kind in (True, False)}
    assert largest[True] <= tokens and largest[False] <= 4 * tokens
    assert largest[False] > tokens or step not in ("ppo", "rloo")
    assert max(size for training, size in by_rows if training) > tokens
    assert sum(training for training, _ in passes) > sum(training for training, _ in by_rows)
    assert_weights_near(weights_of(found_engine), weights_of(engine))
    expected = {name: x for name, x in expected.items() if not name.startswith("time/")}
    assert {name: found[name] for name in expected} == near(expected, 8 * UPDATE, scale=0.1)


def noting(forward, passes):
    def noted(self, input_ids, *given, **named):
        passes.append((torch.is_grad_enabled(), input_ids.numel()))
        return forward(self, input_ids, *given, **named)

    return noted
