# SPDX-License-Identifier: Apache-2.0
"""The share of every ``--data_path`` that belongs to one training step."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dschat.data.formats.formats import DataKeys, Row
from dschat.data.sources import load_source
from dschat.data.splits import split_indices


@dataclass(frozen=True)
class Share:
    """Rows of one step, the sources one after another, and what run.json says of them."""

    train: list[Row]
    eval: list[Row]
    sources: list[dict[str, Any]]  # per source: name, train and eval rows of the share, dropped, hub (if from there)
    files: tuple[Path, ...]


def load_share(config: Any) -> Share:
    """Reads every source and takes the step's slice of its training and evaluation rows (``--data_split``).

    Args:
        config: SFTConfig, RewardConfig or PPOConfig.

    Raises:
        UserError: see :func:`dschat.data.sources.load_source`; or a source has no row for this step.
    """
    keys = DataKeys(
        config.prompt_key, config.chosen_key, config.rejected_key, config.response_key, config.messages_key
    )
    train: list[Row] = []
    held_out: list[Row] = []
    sources: list[dict[str, Any]] = []
    files: list[Path] = []
    for path in config.data_path:
        source = load_source(path, keys, config.seed)
        parts = []
        for rows in (source.train, source.eval):
            chosen = split_indices(len(rows), config.data_split, config.phase, config.seed)
            parts.append([rows[i] for i in chosen])
        train += parts[0]
        held_out += parts[1]
        described = {
            "name": source.name,
            "train": len(parts[0]),
            "eval": len(parts[1]),
            "dropped": dict(source.dropped),
        }
        sources.append(described | ({"hub": source.hub} if source.hub else {}))
        files += source.files
    return Share(train, held_out, sources, tuple(files))
