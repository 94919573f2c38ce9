# SPDX-License-Identifier: Apache-2.0
"""Training rows of a step, and the updates that follow from them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dschat.data.known_sets import KnownSet, find_known, local_copy
from dschat.data.prepared.folder import find_prepared
from dschat.data.prepared.read import prepared_share
from dschat.data.sources import described, load_share, names_file, split_for
from dschat.data.splits import parse_fractions, split_bounds, with_eval_share
from dschat.settings.batches import BatchPlan
from dschat.settings.common import CommonConfig


@dataclass(frozen=True)
class Counts:
    """Numbers of a whole run. Rows that a run drops later, such as too long ones, are included."""

    train_rows: int
    updates: int  # optimizer updates
    trained: int  # rows of these updates, again in each epoch; in step 3, prompts with all of their responses


def count_run(config: CommonConfig, plan: BatchPlan, train_rows: int) -> Counts:
    """Counts a run with the trainers' arithmetic; rows that do not fill a rollout (or an update) are left out.

    Raises:
        UserError: see `config.total_updates`: fewer rows than one rollout or update, for example.
    """
    updates = config.total_updates(train_rows, plan)
    iterations = updates // plan.updates_per_iteration
    return Counts(train_rows=train_rows, updates=updates, trained=iterations * plan.iteration_size)


def find_sources(config: CommonConfig) -> list[dict[str, Any]] | None:
    """The rows that the step takes from each source, in the form of `dschat.data.sources.described`.

    None if the step reads pairs of tokens instead of rows, or if a source is neither local nor a published data set
    whose size is known. Local sources are read. The counts of a published set are estimates (`is_estimate`): a run
    also removes prompts that are held out of another source, and outside of the paper's sets keeps rows of one prompt
    together.

    Raises:
        UserError: a local source cannot be read, or see `parse_fractions`.
    """
    if not config.reads_rows:
        return None
    folders = find_prepared(config.data.data_path)
    if folders:
        return prepared_share(folders).sources
    records: dict[str, dict[str, Any]] = {}
    local_paths: list[str] = []
    for path in config.data.data_path:
        known_set = find_known(path)
        has_copy = known_set is not None and local_copy(known_set) is not None
        if has_copy or names_file(path):
            local_paths.append(path)
        elif known_set is not None:
            records[path] = _published_source(path, known_set, config)
        else:
            return None

    # Local sources are read together: a prompt that is held out of one is not trained on from another.
    share = load_share(config, paths=local_paths)
    records |= zip(local_paths, share.sources, strict=True)
    return [records[path] for path in config.data.data_path]


def _published_source(path: str, known_set: KnownSet, config: CommonConfig) -> dict[str, Any]:
    """The rows that the step takes from a published data set, whose number of rows is known."""
    train_rows, eval_rows = known_set.counts
    if eval_rows is None:
        eval_split = with_eval_share(config.data.eval_share)
        eval_rows = _rows_in_part(train_rows, eval_split, 1)
        train_rows = _rows_in_part(train_rows, eval_split, 0)
    split = split_for(path, config.data.data_split)
    train = _rows_in_part(train_rows, split, config.step - 1)
    held_out = _rows_in_part(eval_rows, split, config.step - 1)
    return described(known_set.title, train, held_out, {}, known_set.counts, split) | {"is_estimate": True}


def _rows_in_part(rows: int, split: str | None, part: int) -> int:
    """Rows of a part of a split, counted from 0; all without a split."""
    if split is None:
        return rows
    bounds = split_bounds(rows, parse_fractions(split))
    return bounds[part + 1] - bounds[part]
