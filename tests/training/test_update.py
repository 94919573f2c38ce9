# SPDX-License-Identifier: Apache-2.0
"""The loops with stand-ins for models: what is divided by what, and which seed, epoch and coefficient goes where."""

import math
import tempfile
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
import torch

from closeness import FORMULA, UPDATE, near
from dschat.rollouts.engine import Generation
from dschat.rollouts.sampling import row_seed
from dschat.run.state import SeedKind
from dschat.scoring.function import FunctionScores
from dschat.training.ppo.credit import Credit
from dschat.training.ppo.models import MovingAverage, PPOModels
from dschat.training.ppo.update import UpdateContext, ppo_update
from factories import (
    EOS,
    make_prompt,
    make_rollout,
    ppo_config,
    ppo_trainer_of,
    run_of,
    supervised_config,
    supervised_loop_of,
    to_device,
    update_flags,
)
from macro_actions.conditions import fixed
from macro_actions.segments import segment
from macro_actions.types import PPOBatch, Trajectory

RESPONSE = [5, 6, 7, EOS]


class StandIn:
    """An engine that says one number of every token and notes what it is asked and told."""

    grad_norm, skipped, nonfinite, learning_rate = 3.0, False, None, 1e-3
    layers = "eager"
    module = SimpleNamespace(
        inner=SimpleNamespace(generation_config=SimpleNamespace(eos_token_id=None)),
        parameters=lambda: iter([torch.zeros(1)]),
        bins=None,
        numbers=lambda outputs: outputs,
    )

    def __init__(self, number):
        self.number, self.weight = number, 0.0
        self.losses = []
        self.lengths = []  # of the response that each forward pass was about
        self.temperatures = set()

    def __call__(self, input_ids, mask, targets=None, temperature=1.0, *_, raw=False):
        if targets is None:
            return torch.full_like(input_ids, self.number, dtype=torch.float32)
        self.lengths.append(len(targets))
        self.temperatures.add(temperature)
        one = torch.ones(len(targets), device=input_ids.device)
        return self.number * one, 0.7 * one

    def backward(self, loss):
        self.losses.append(float(loss))

    def train(self): ...

    eval = step = train

    @contextmanager
    def gathered(self):
        yield self.module

    def parts(self):
        return {"w": torch.tensor([self.weight])}


# -- one update


def batch_of(lengths=(1, 2, 3, 4)):
    """Advantages 1, values 0 and returns 2 everywhere; macro actions of two tokens and what remains."""
    rollout = make_rollout([([5], [6] * n) for n in lengths])
    mask = rollout.response_mask
    one = mask.float()
    trajectory = Trajectory(rollout, -one, -one, 0 * one, torch.zeros(len(lengths)))
    macro = segment(fixed(mask, 2), mask)
    return to_device(PPOBatch(trajectory, macro, 0 * one, 0 * one, one, 2 * one))


# The ratio of a token is 1.1, of two tokens 1.21, which is clipped to 1.15. By the response's length: what its tokens
# or macro actions add to −loss, and how many they are.
SHARES = {
    "token": {1: (1.1, 1), 2: (2.2, 2), 3: (3.3, 3), 4: (4.4, 4)},
    "macro": {1: (1.1, 1), 2: (1.15, 1), 3: (2.25, 2), 4: (2.3, 2)},
    "macro_mean": {1: (1.1, 1), 2: (2.2, 2), 3: (3.3, 3), 4: (4.4, 4)},
}


@pytest.mark.parametrize("policy_ratio", SHARES)
def test_losses_are_means_over_the_rows_of_their_update(policy_ratio):
    """Four rows in updates of two. Values: old 0, new 1, return 2 at a clip range of 0.5: ½ (0.5 − 2)² = 1.125."""
    actor, critic = StandIn(-1 + math.log(1.1)), StandIn(1.0)
    mean = "macro" if policy_ratio == "macro" else "token"
    clips = {"cliprange": 0.15, "cliprange_value": 0.5}
    settings = update_flags(2, 1, 2, **clips, temperature=0.7, policy_ratio=policy_ratio, loss_mean=mean)
    stats = ppo_update(UpdateContext(actor, critic, Credit(batch_of()), *settings), seed=0)
    expected = []
    assert len(actor.lengths) == 2 * 2 * 2  # PPO epochs, updates, rows
    for update in range(4):
        (first, count), (second, other) = (SHARES[policy_ratio][n] for n in actor.lengths[2 * update : 2 * update + 2])
        expected.append(-(first + second) / (count + other))
        assert sum(actor.losses[2 * update : 2 * update + 2]) == near(expected[-1], FORMULA)
        assert sum(critic.losses[2 * update : 2 * update + 2]) == near(1.125, FORMULA)
    assert sorted(actor.lengths[:4]) == sorted(actor.lengths[4:]) == [1, 2, 3, 4]
    assert stats["loss/policy"] == near(sum(expected) / 4, FORMULA)
    assert stats["loss/value"] == pytest.approx(1.125) and stats["val/clipfrac"] == pytest.approx(1.0)
    assert stats["policy/entropy"] == pytest.approx(0.7) and actor.temperatures == {0.7}
    assert stats["grad_norm/actor"] == stats["grad_norm/critic"] == 3.0


def test_the_seed_shuffles_the_rows():
    orders = []
    for seed in (0, 1, 2):
        actor = StandIn(-1.0)
        settings = update_flags(1, 1, 1)
        credit = Credit(batch_of(tuple(range(1, 9))))
        ppo_update(UpdateContext(actor, StandIn(0.0), credit, *settings), seed)
        orders.append(tuple(actor.lengths))
    assert len(set(orders)) == 3


def test_an_update_that_fp16_left_out_is_counted_and_has_no_norm():
    actor, critic = StandIn(-1.0), StandIn(0.0)
    actor.skipped = True
    settings = update_flags(2, 2, 1)
    stats = ppo_update(UpdateContext(actor, critic, Credit(batch_of()), *settings), seed=0)
    assert stats["skipped/actor"] == 2 and "grad_norm/actor" not in stats and stats["grad_norm/critic"] == 3.0


# -- a run of four iterations: two epochs of two rollouts, each of two generation batches of two prompts on each rank


@dataclass
class Notes:
    """What the parts of a run were given."""

    draws: list[int] = field(default_factory=list)  # seeds of generation, row by row
    shuffles: list[int] = field(default_factory=list)  # seeds of ppo_update, iteration by iteration
    epochs: list[int] = field(default_factory=list)  # told to the termination condition
    batches: list[PPOBatch] = field(default_factory=list)  # trained on


@pytest.fixture
def trainer_of(monkeypatch, tokenizer, tmp_path):
    """trainer_of(rank, world_size, held_out=0, **flags): a trainer of stand-ins, and its notes."""

    def make(rank=0, world_size=1, held_out=0, **flags):
        notes = Notes()

        def draw(prompts, sampling, seeds):
            notes.draws.extend(seeds)
            rollout = to_device(make_rollout([(prompt, RESPONSE) for prompt in prompts]))
            return Generation(rollout, -1.0 * rollout.response_mask, torch.zeros_like(rollout.finished))

        def update(context, seed, *_):
            notes.batches.append(context.credit.whole())
            notes.shuffles.append(seed)
            context.actor.weight = 1.0
            return {"loss/policy": 0.0, "loss/value": 0.0}

        monkeypatch.setattr("dschat.training.ppo.algorithm.ppo_update", update)
        for module in ("loop", "ppo.evaluation"):
            monkeypatch.setattr(f"dschat.training.{module}.rank", lambda: rank)
            monkeypatch.setattr(f"dschat.training.{module}.world_size", lambda: world_size)
        sizes = {"per_device_generation_batch_size": 2, "generation_batches": 2, "per_device_training_batch_size": 4}
        sizes |= {"num_train_epochs": 2, "per_device_eval_batch_size": 2, "ppo_epochs": 2}
        config = ppo_config(tempfile.mkdtemp(dir=tmp_path), **(sizes | {"self_checks": False} | flags))
        reward = FunctionScores(lambda p, r, rows: [float(row["n"]) for row in rows], "--reward_function")
        rollouts = SimpleNamespace(session=lambda actor, same_weights: nullcontext(draw))
        models = PPOModels(StandIn(-1.0), StandIn(-1.5), StandIn(0.0), reward, rollouts)
        prompts = [make_prompt([5] * (1 + i % 3), "", i, {"n": i}) for i in range(8 * world_size)]
        trainer = ppo_trainer_of(models, prompts, prompts[:held_out], tokenizer, config)
        trainer.run.plan = trainer.algorithm.plan = config.plan_batches(world_size)
        condition = trainer.algorithm.scorer.condition
        trainer.algorithm.scorer.condition = lambda trajectory, epoch: (
            notes.epochs.append(epoch),
            condition(trajectory, epoch),
        )[1]
        return trainer, notes

    return make


def test_every_response_is_drawn_with_a_seed_of_its_own(trainer_of, monkeypatch):
    """On each of two ranks: 4 iterations x 4 prompts, 6 of an evaluation, and in the self-check the same 2."""
    for name in ("check_rollout", "check_scalar"):
        monkeypatch.setattr(f"dschat.training.ppo.algorithm.{name}", lambda *_: None)
    seeds = []
    for rank in (0, 1):
        for use, held_out, draws in (("fit", 0, 16), ("evaluate", 12, 6), ("self_check", 0, 2)):
            trainer, notes = trainer_of(rank, 2, held_out)
            getattr(trainer.algorithm if use == "self_check" else trainer, use)()
            assert len(notes.draws) == draws, use
            seeds += notes.draws
            if use == "self_check":
                assert not {row_seed(trainer.config.optimisation.seed, SeedKind.TRAINING, 0, i) for i in range(2)} & {
                    *notes.draws
                }
    assert len(set(seeds)) == 2 * (16 + 6) + 2


def test_another_seed_of_the_run_draws_and_shuffles_otherwise(trainer_of):
    runs = []
    for seed in (1, 2, 1):
        trainer, notes = trainer_of(seed=seed)
        trainer.fit()
        runs.append((notes.draws, notes.shuffles))
    assert runs[0] == runs[2]
    assert not set(runs[0][0]) & set(runs[1][0]) and not set(runs[0][1]) & set(runs[1][1])


def test_every_epoch_takes_every_prompt_in_another_order(trainer_of):
    """Two ranks share the 16 prompts of an epoch; of the epochs, 0 and 1, the termination condition is told.

    Every iteration is shuffled otherwise, and alike on both ranks.
    """
    orders, shuffles = [], []
    for rank in (0, 1):
        trainer, notes = trainer_of(rank, 2)
        trainer.fit()
        assert notes.epochs == [0, 0, 1, 1]
        orders.append([batch.trajectory.rollout.prompt_index.tolist() for batch in notes.batches])
        shuffles.append(notes.shuffles)
    assert shuffles[0] == shuffles[1] and len(set(shuffles[0])) == 4
    for epoch in (slice(0, 2), slice(2, 4)):
        assert sorted(i for order in orders for rows in order[epoch] for i in rows) == list(range(16))
    assert [set(rows) for rows in orders[0][:2]] != [set(rows) for rows in orders[0][2:]]


# The KL is 0.5 nats per token and 2 per response. 8 responses at a horizon of 8: beyond the target the coefficient
# grows by a fifth, below it falls by one.
@pytest.mark.parametrize(
    ("target", "coefficients"),
    [(None, [0.1, 0.1, 0.1, 0.1]), (1.0, [0.1, 0.12, 0.144, 0.1728]), (4.0, [0.1, 0.08, 0.064, 0.0512])],
)
def test_the_kl_coefficient_of_each_iteration(target, coefficients, trainer_of):
    horizon = {} if target is None else {"adaptive_kl_horizon": 8}
    trainer, notes = trainer_of(0, 2, kl_coef=0.1, adaptive_kl_target=target, **horizon)
    trainer.fit()
    penalties = [float(-batch.rewards[0, 0]) for batch in notes.batches]
    assert penalties == pytest.approx([0.5 * coefficient for coefficient in coefficients])


def test_the_moving_average_moves_once_in_every_iteration(trainer_of):
    """The weight is 0 before the first of four iterations and 1 from then on; decay 0.992."""
    trainer, _ = trainer_of()
    trainer.algorithm.average = MovingAverage(trainer.algorithm.models.actor)
    trainer.fit()
    assert float(trainer.algorithm.average.parts["w"]) == near(1 - 0.992**4, UPDATE)


def test_an_evaluation_is_the_mean_over_the_prompts(trainer_of):
    """Scores 0 to 4, of variance 2.5; KL, length and EOS are those of every response."""
    trainer, _ = trainer_of(held_out=5)
    expected = {"eval/scores": 2.0, "eval/kl": 2.0, "eval/length": 4.0, "eval/eos_rate": 1.0, "eval/rows": 5.0}
    expected |= {"eval/kl_per_token": 0.5, "eval/scores_stderr": math.sqrt(2.5 / 5)}
    expected |= dict.fromkeys([f"eval/{name}_stderr" for name in ("kl", "kl_per_token", "length", "eos_rate")], 0.0)
    assert trainer.evaluate() == near(expected, FORMULA)


# -- steps 1 and 2


class Letters:
    """A task whose loss is the share of an update's letters that a micro-batch holds."""

    name = "sft"
    train, eval = ["a" * n for n in range(1, 17)], ()

    def __init__(self):
        self.seen = []

    def prepare(self, engine):
        pass

    def count(self, examples):
        return sum(map(len, examples))

    def lengths(self, examples):
        return [len(example) for example in examples]

    def loss(self, engine, examples, count):
        self.seen += map(len, examples)
        return torch.tensor(float(self.count(examples))) / count, {}


def supervised_run(folder, seed):
    """Two epochs of 16 examples in updates of 2 x 4: the examples by their lengths, and the losses."""
    sizes = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "num_train_epochs": 2}
    config = supervised_config("sft", folder, seed=seed, self_checks=False, **sizes)
    task, engine = Letters(), StandIn(0.0)
    supervised_loop_of(engine, task, config, run_of("sft", config)).fit()
    return task.seen, engine.losses


def test_supervised_epochs_take_every_example_in_another_order(tmp_path):
    (seen, losses), (others, _) = supervised_run(tmp_path / "1", 1), supervised_run(tmp_path / "2", 2)
    first, second = seen[:16], seen[16:]
    assert sorted(first) == sorted(second) == list(range(1, 17))
    assert set(first[:8]) != set(second[:8]) and set(first[:8]) != set(others[:8])
    assert [sum(losses[i : i + 2]) for i in range(0, 8, 2)] == pytest.approx([1.0] * 4)
