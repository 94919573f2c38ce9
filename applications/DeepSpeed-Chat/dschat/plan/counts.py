# SPDX-License-Identifier: Apache-2.0
"""Training rows of a step, and the updates, samples and evaluations that follow from them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dschat.base.errors import UserError
from dschat.data.known_sets import KnownSet, find_known
from dschat.data.prepared.folder import find_prepared
from dschat.data.prepared.read import prepared_share
from dschat.data.sources import described, read_share
from dschat.data.splits import PUBLISHED_SPLIT, parse_fractions, split_bounds, with_eval_share
from dschat.refuel.offline_settings import RefuelConfig
from dschat.settings.batches import BatchPlan
from dschat.settings.common import CommonConfig


@dataclass(frozen=True)
class Counts:
    """Numbers of a whole run."""

    examples: int  # training rows
    held_out: int  # evaluation rows
    updates: int  # optimizer updates
    trained: int  # examples in these updates; in step 3, prompts with all of their responses


def counts(config: CommonConfig, plan: BatchPlan, examples: int, held_out: int) -> Counts:
    """Counts a run with the trainers' arithmetic; rows that do not fill a rollout (or an update) are left out.

    Raises:
        UserError: fewer examples than one rollout or update.
    """
    size = plan.iteration_size
    updates_per_size = plan.updates_per_iteration
    if examples < size:
        raise UserError(f"{examples} training rows are fewer than the {size} that are needed at a time.")
    updates = config.total_updates(examples, plan)
    return Counts(examples=examples, held_out=held_out, updates=updates, trained=updates // updates_per_size * size)


def find_sources(config: CommonConfig) -> list[dict[str, Any]] | None:
    """The rows that the step takes from each source, in the form of `dschat.data.sources.described`.

    None if a source is neither local nor a published data set whose size is known.
    """
    if isinstance(config, RefuelConfig):  # reads pairs, which are tokens
        return None
    folders = find_prepared(config.data.data_path)
    if folders:
        return prepared_share(folders).sources
    sources: list[dict[str, Any]] = []
    for path in config.data.data_path:
        known_set = find_known(path)
        if Path(path).exists():
            share = read_share(
                [path],
                config.columns,
                config.data.data_split,
                config.step,
                config.optimisation.seed,
                eval_share=config.data.eval_share,
            )
            sources += share.sources
        elif known_set is not None:
            sources.append(_published_source(known_set, config))
        else:
            return None
    return sources


def _published_source(known_set: KnownSet, config: CommonConfig) -> dict[str, Any]:
    """The rows that the step takes from a published data set, whose number of rows is known."""
    train_rows, eval_rows = known_set.counts
    if eval_rows is None:
        _, train_rows, end = split_bounds(train_rows, parse_fractions(with_eval_share(config.data.eval_share)))
        eval_rows = end - train_rows
    split = config.data.data_split or (PUBLISHED_SPLIT if known_set.of_paper else None)
    train = range(_share(train_rows, split, config.step))
    held_out = range(_share(eval_rows, split, config.step))
    return described(known_set.title, train, held_out, {}, known_set.counts, split)


def _share(rows: int, data_split: str | None, step: int) -> int:
    """Rows of a step's share; all without a split."""
    if data_split is None:
        return rows
    bounds = split_bounds(rows, parse_fractions(data_split))
    return bounds[step] - bounds[step - 1]


def count_rows(sources: Sequence[Mapping[str, Any]]) -> tuple[int, int]:
    """Training and evaluation rows of `find_sources`."""
    train = sum(source["train"] for source in sources)
    held_out = sum(source["eval"] for source in sources)
    return train, held_out
