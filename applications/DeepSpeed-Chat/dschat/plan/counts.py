# SPDX-License-Identifier: Apache-2.0
"""How many updates a run makes, how often it evaluates, and how many prompts and responses that takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dschat.config.batches import BatchPlan
from dschat.config.common import CommonConfig
from dschat.config.ppo import PPOConfig
from dschat.config.supervised import SupervisedConfig
from dschat.data.hub import find_known
from dschat.data.prepared.read import share_sizes
from dschat.data.sources import TRAIN_EVAL_SPLIT, load_share, split_bounds
from dschat.errors import UserError


@dataclass(frozen=True)
class Counts:
    """Of a whole run.

    Attributes:
        examples: rows to train on.
        held_out: rows to evaluate on.
        updates: of the optimiser.
        trained: examples in these updates; in step 3 each is a prompt with all of its responses.
        evaluations: that of the start and of the end included.
        evaluated: examples in all evaluations.
    """

    examples: int
    held_out: int
    updates: int
    trained: int
    evaluations: int
    evaluated: int


def counts(config: CommonConfig, plan: BatchPlan, examples: int, held_out: int) -> Counts:
    """The arithmetic of the trainers: what does not fill a rollout (in steps 1 and 2 an update) is left out.

    Args:
        config: the flags.
        plan: its batch sizes.
        examples, held_out: rows of the data.

    Raises:
        UserError: fewer examples than one rollout or update.
    """
    size = plan.global_rollout or plan.global_batch
    per_size = plan.updates_per_rollout or 1
    rounds = examples // size * config.num_train_epochs
    if not rounds:
        raise UserError(f"{examples} training rows are fewer than the {size} that are needed at a time.")
    updates = rounds * per_size
    evaluations = _evaluations(updates, per_size, config.eval_interval) if held_out else 0
    at_once = min(held_out, _evaluated_at_once(config, plan) or held_out)
    return Counts(examples, held_out, updates, rounds * size, evaluations, evaluations * at_once)


def find_rows(config: CommonConfig) -> tuple[int, int] | None:
    """Training and held-out rows of the step's share; None where the data are neither local nor published sets."""
    if all(Path(path).exists() for path in config.data_path):
        prepared = share_sizes(config)
        if prepared is not None:
            return prepared
        share = load_share(config)
        return len(share.train), len(share.eval)
    known = [find_known(path) for path in config.data_path]
    sizes = [_published_rows(one.train_rows, one.eval_rows, config) for one in known if one is not None]
    if len(sizes) < len(known):
        return None
    return sum(size[0] for size in sizes), sum(size[1] for size in sizes)


def _published_rows(train: int, held_out: int | None, config: CommonConfig) -> tuple[int, int]:
    if held_out is None:
        bounds = split_bounds(train, _fractions(TRAIN_EVAL_SPLIT))
        train, held_out = bounds[1], bounds[2] - bounds[1]
    first, second = (_share(rows, config) for rows in (train, held_out))
    return first, second


def _share(rows: int, config: CommonConfig) -> int:
    bounds = split_bounds(rows, _fractions(config.data_split))
    return bounds[config.step] - bounds[config.step - 1]


def _fractions(split: str) -> list[float]:
    return [float(part) for part in split.split(",")]


def _evaluations(updates: int, at_a_time: int, interval: int) -> int:
    """At the start, after every update (or rollout's updates) that reaches a multiple of the interval, at the end."""
    ends: Sequence[int] = range(at_a_time, updates, at_a_time)
    due = sum((end - at_a_time) // interval < end // interval for end in ends) if interval else 0
    return 2 + due


def _evaluated_at_once(config: CommonConfig, plan: BatchPlan) -> int:
    """Most examples of one evaluation; 0 = all."""
    if isinstance(config, PPOConfig):
        return config.num_eval_prompts(plan.world_size)
    assert isinstance(config, SupervisedConfig)
    return config.num_eval_examples(plan.world_size)
