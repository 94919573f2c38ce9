# SPDX-License-Identifier: Apache-2.0
"""A termination condition of the user's own: ``module.py:function``."""

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from dschat.common.user_function import call_function, load_function
from dschat.errors import UserError
from dschat.rl.types import Trajectory

FLAG = "--termination_condition"


class UserCondition:
    """Calls ``f(trajectory, tokenizer)`` and checks the ends that it returns."""

    def __init__(self, spec: str, tokenizer: PreTrainedTokenizerBase) -> None:
        """Imports the function.

        Raises:
            UserError: it cannot be imported.
        """
        self._function, self._spec, self._tokenizer = load_function(spec, FLAG), spec, tokenizer

    def __call__(self, trajectory: Trajectory) -> Tensor:
        """Where macro actions end: (B, R) bool.

        Raises:
            UserError: the function fails, or returns something else.
        """
        ends = call_function(self._function, FLAG, trajectory, self._tokenizer)
        mask = trajectory.response_mask
        if not isinstance(ends, Tensor) or ends.dtype != torch.bool or ends.shape != mask.shape:
            got = f"{tuple(ends.shape)} {ends.dtype}" if isinstance(ends, Tensor) else type(ends).__name__
            raise UserError(
                f"{FLAG} {self._spec}: the function must return a bool tensor of shape (B, R) = {tuple(mask.shape)}, "
                f"not {got}."
            )
        return ends.to(mask.device)
