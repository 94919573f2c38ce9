# SPDX-License-Identifier: Apache-2.0
"""A termination condition for step 3: --termination_condition examples/termination_condition.py:sentences.

A function gets a trajectory, whose fields docs/rewards.md lists, and the actor's tokenizer, and returns ends (B, R)
bool: True on the last token of each macro action. The last token of a response ends one in any case, and what lies off
the responses is not read.
"""

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from macro_actions.types import Trajectory

ENDS = (".", "!", "?", "\n")


def sentences(trajectory: Trajectory, tokenizer: PreTrainedTokenizerBase) -> Tensor:
    """A macro action is a sentence: it ends with a token whose text ends one."""
    mask, ids = trajectory.response_mask, trajectory.rollout.response_ids
    closing = [token for token in ids[mask].unique().tolist() if tokenizer.decode([token]).rstrip(" ").endswith(ENDS)]
    return mask & torch.isin(ids, torch.tensor(closing, dtype=ids.dtype, device=ids.device))
