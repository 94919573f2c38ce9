# SPDX-License-Identifier: Apache-2.0
"""A run that is stopped anywhere and taken up again is, to the last bit, the run that was never stopped."""

import json

import pytest
import torch

from dschat.config.reward import RewardConfig
from dschat.config.sft import SFTConfig
from dschat.data.examples import PairExample, SFTExample
from dschat.run import stop
from dschat.run.checkpoint import Checkpoints
from dschat.run.stop import Stopped
from dschat.scoring.function import FunctionScores
from dschat.trainers.ppo.moving_average import MovingAverage
from dschat.trainers.ppo.trainer import PPOModels, PPOTrainer
from dschat.trainers.supervised.reward import RewardTask
from dschat.trainers.supervised.sft import SFTTask
from dschat.trainers.supervised.trainer import SupervisedTrainer
from factories import (
    PAD,
    NotedSaves,
    condition_of,
    engine_of,
    frozen_engine_of,
    make_causal_lm,
    make_classifier,
    make_prompt,
    make_tokenizer,
    ppo_config,
    ragged_rows,
    random_ids,
    run_of,
    weights_of,
)

ROWS = ragged_rows([2, 5, 9, 1, 3, 4, 6, 2, 3], [7, 1, 4, 3, 9, 2, 5, 8, 4], seed=1)
SUPERVISED = {
    "data_path": ["unused"],
    "model_name_or_path": "unused",
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 2,
    "per_device_eval_batch_size": 2,
    "learning_rate": 1e-2,
    "num_train_epochs": 2,
    "eval_interval": 3,
}
# 2 epochs of 2 rollouts of 8 prompts in 2 generation batches; 2 PPO epochs of 2 updates of 2 micro-batches.
PPO = {
    "per_device_generation_batch_size": 4,
    "generation_batches": 2,
    "per_device_training_batch_size": 2,
    "gradient_accumulation_steps": 2,
    "per_device_eval_batch_size": 4,
    "ppo_epochs": 2,
    "num_train_epochs": 2,
    "eval_interval": 4,
    "max_answer_seq_len": 6,
    "lr_scheduler_type": "cosine",
    "adaptive_kl_target": 2.0,
    "enable_ema": True,
}


def length(prompts, responses, rows):
    """A reward that draws from the global random state, as users' functions may."""
    return [len(response) + float(torch.rand(1)) for response in responses]


def supervised(step, folder, **flags):
    config_class = {"sft": SFTConfig, "reward": RewardConfig}[step]
    config = config_class(**(SUPERVISED | {"output_dir": str(folder)} | flags))
    run = run_of(step, config)
    if step == "sft":
        engine = engine_of(make_causal_lm(), 2, 2, learning_rate=1e-2)
        task = SFTTask([SFTExample(p, r) for p, r in ROWS], [SFTExample(p, r) for p, r in ROWS[:3]], PAD, False)
    else:
        engine = engine_of(make_classifier(), 2, 2, learning_rate=1e-2)
        task = RewardTask(
            [PairExample(p + r, p + r[:1]) for p, r in ROWS], [PairExample(p + r, p) for p, r in ROWS[:3]], PAD
        )
    checkpoints = Checkpoints({"model": engine}, config, run, identity={})
    return SupervisedTrainer(engine, task, config, run, NotedSaves(), checkpoints), {"model": engine}


def ppo(folder, **flags):
    config = ppo_config(folder, **(PPO | flags))
    tokenizer = make_tokenizer()
    actor, critic = engine_of(make_causal_lm(), 2, 2), engine_of(make_classifier(), 2, 2)
    reward = FunctionScores(length, "--reward_function")
    models = PPOModels(actor, frozen_engine_of(make_causal_lm()), critic, reward)
    prompts = [make_prompt([1, *random_ids(2 + i % 4, i)], f"p{i}", i) for i in range(18)]
    run, condition = run_of("ppo", config), condition_of(config, tokenizer)
    average = MovingAverage(actor) if config.enable_ema else None
    engines = {"actor": actor, "critic": critic}
    checkpoints = Checkpoints(engines, config, run, {}, average.weights if average else None)
    trainer = PPOTrainer(
        models, prompts, prompts[:5], tokenizer, condition, config, run, NotedSaves(), checkpoints, average
    )
    return trainer, engines


def result_of(made, folder):
    """Weights, moving average and metrics of a run to its end."""
    trainer, engines = made
    torch.manual_seed(5)
    trainer.fit()
    trainer.run.finish()
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    rows = [{name: x for name, x in row.items() if "seconds" not in name and "time/" not in name} for row in rows]
    weights = {f"{name}.{key}": w for name, engine in engines.items() for key, w in weights_of(engine).items()}
    if getattr(trainer, "average", None) is not None:
        weights |= {f"average.{key}": w.clone() for key, w in trainer.average.weights.items()}
    samples = {file.name: file.read_text() for file in sorted(folder.glob("samples/*"))}
    return weights, rows, samples


def same(first, second):
    assert first[1] == second[1], "metrics"
    assert first[2] == second[2], "samples"
    assert first[0].keys() == second[0].keys()
    assert all(torch.equal(first[0][name], second[0][name]) for name in first[0]), "weights"


def stop_at(monkeypatch, number):
    """Lets the call with this number, from 0, of `raise_if_stopped` find a signal; none if it is None. The counts."""
    calls = []

    def noted(own):
        calls.append(own)
        return 15 if len(calls) - 1 == number else 0

    monkeypatch.setattr(stop, "largest_over_ranks", noted)
    return calls


def check_every_stop(make, folder, monkeypatch, every):
    """Stops a run at every nth point at which it can be stopped, and compares what becomes of it."""
    calls = stop_at(monkeypatch, None)
    whole = result_of(make(folder / "whole"), folder / "whole")
    points = len(calls)
    for number in range(0, points, every):
        place = folder / f"stopped-{number}"
        stop_at(monkeypatch, number)
        torch.manual_seed(5)
        with pytest.raises(Stopped):
            make(place)[0].fit()
        stop_at(monkeypatch, None)
        resumed = make(place, resume_from_checkpoint="latest")
        torch.manual_seed(99)
        same(whole, result_of(resumed, place))
    return points


@pytest.mark.parametrize("step", ["sft", "reward"])
def test_steps_1_and_2_stop_anywhere(step, group, tmp_path, monkeypatch):
    points = check_every_stop(lambda folder, **flags: supervised(step, folder, **flags), tmp_path, monkeypatch, 1)
    assert points == 4 * 2 + 3 * 2, "micro-batches of 4 updates, and batches of 3 evaluations"


CONDITIONS = [
    {"termination_condition": "fixed", "ngram": 3},
    {"termination_condition": "randomized"},
    {"termination_condition": "parsing", "parser": "chunker"},
    {"termination_condition": "ppl"},
]


@pytest.mark.parametrize("flags", CONDITIONS, ids=lambda flags: flags["termination_condition"])
@pytest.mark.parametrize("every", [13, pytest.param(1, marks=pytest.mark.slow)])
def test_step_3_stops_anywhere(flags, every, group, tmp_path, monkeypatch):
    """In an evaluation, in sampling, in scoring, inside an accumulation window, inside a rollout, between epochs."""
    check_every_stop(lambda folder, **more: ppo(folder, **flags, **more), tmp_path, monkeypatch, every)
