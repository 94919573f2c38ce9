# SPDX-License-Identifier: Apache-2.0
"""The weighted sum of several score sources."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dschat.models.engines import Scalar
from dschat.run.distributed import sum_over_ranks
from dschat.scoring.source import UNSCORED, ResponseTexts, Scores, Weighted, scores_of
from macro_actions.types import Rollout


class WeightedScores:
    """Σ weight · score over several sources; each source's own scores are reported in metrics and samples."""

    def __init__(self, sources: Sequence[Weighted], skips: bool = False) -> None:
        """Takes the sources.

        Args:
            sources: at least one; names, where there are any, differ.
            skips: exclude responses whose sum is not finite. Then every rank must call it, for equally many responses.
        """
        self._sources = sources
        self._skips = skips

    @property
    def model(self) -> Scalar | None:
        """The model of the first source that has one."""
        for weighted in self._sources:
            if weighted.source.model is not None:
                return weighted.source.model
        return None

    def __call__(self, rollout: Rollout, texts: ResponseTexts) -> Scores:
        device = rollout.input_ids.device
        total = torch.zeros(len(rollout.input_ids), device=device)
        missing = torch.zeros(len(total), dtype=torch.bool, device=device)
        segments: Tensor | None = None
        tokens: Tensor | None = None
        parts: dict[str, Tensor] = {}
        measured: dict[str, tuple[float, float]] = {}
        for weighted in self._sources:
            scores = scores_of(weighted.source(rollout, texts))
            total = total + weighted.weight * scores.values.float()
            if weighted.name is not None:
                parts[weighted.name] = scores.values.float()
            parts |= scores.parts
            segments = _added(segments, weighted.weight, scores.segments)
            tokens = _added(tokens, weighted.weight, scores.tokens)
            if scores.missing is not None:
                missing = missing | scores.missing
            measured |= scores.measured
        if not self._skips:
            return Scores(total, missing if missing.any() else None, measured, parts, segments, tokens)
        missing = missing | ~torch.isfinite(total)
        total, *columns = _fill_missing([total, *parts.values()], missing)
        parts = dict(zip(parts, columns, strict=True)) | {UNSCORED: missing.float()}
        return Scores(total, missing, measured, parts, segments, tokens)


def _added(total: Tensor | None, weight: float, part: Tensor | None) -> Tensor | None:
    """total + weight · part; None counts as 0."""
    if part is None:
        return total
    return weight * part if total is None else total + weight * part


def _fill_missing(columns: Sequence[Tensor], missing: Tensor) -> list[Tensor]:
    """Replaces missing numbers of each column (B,) by the column's mean over all ranks, so that means do not change.

    If all numbers on all ranks are missing, they become NaN, which the trainer handles.
    """
    sums = [torch.where(missing, 0.0, column).double().sum() for column in columns]
    count = (~missing).double().sum()
    *total_sums, total_count = sum_over_ranks(torch.stack([*sums, count])).unbind()
    filled: list[Tensor] = []
    for column, total_sum in zip(columns, total_sums, strict=True):
        filled.append(torch.where(missing, (total_sum / total_count).float(), column))
    return filled
