# SPDX-License-Identifier: Apache-2.0
"""A termination condition for step 3: --termination_condition examples/termination_condition.py:sentences.

A function gets a trajectory, whose fields docs/macro-actions.md lists, and the actor's tokenizer. It returns ends
(B, R) bool: True on the last token of each macro action. The last token of a response always ends a macro action, and
values outside of responses are ignored.
"""

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from macro_actions.types import Trajectory

SENTENCE_ENDS = (".", "!", "?", "\n")


def sentences(trajectory: Trajectory, tokenizer: PreTrainedTokenizerBase) -> Tensor:
    """Every sentence is a macro action."""
    mask = trajectory.response_mask
    ids = trajectory.rollout.response_ids
    closing = []
    for token in ids[mask].unique().tolist():
        text = tokenizer.decode([token]).rstrip(" ")
        if text.endswith(SENTENCE_ENDS):
            closing.append(token)
    closing_ids = torch.tensor(closing, dtype=ids.dtype, device=ids.device)
    return mask & torch.isin(ids, closing_ids)
