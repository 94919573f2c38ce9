# SPDX-License-Identifier: Apache-2.0
"""Sampling where logits are not finite: noted, not raised, or other processes would wait for the one that fails."""

import torch
from torch import Tensor
from transformers import LogitsProcessor


class FiniteLogits(LogitsProcessor):
    """Notes rows whose logits are not finite, and lets them be sampled from evenly, to be thrown away later.

    A logit of −inf beside finite ones is fine: it is a token that is never sampled.
    """

    def __init__(self) -> None:
        self._bad: Tensor | None = None

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        usable = scores.amax(-1).isfinite()
        self._bad = ~usable if self._bad is None else self._bad | ~usable
        return torch.where(usable[:, None], scores, 0.0)

    @property
    def bad_rows(self) -> Tensor:
        """(B,) bool, after a rollout."""
        assert self._bad is not None
        return self._bad
