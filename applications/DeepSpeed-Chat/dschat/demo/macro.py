# SPDX-License-Identifier: Apache-2.0
"""The macro actions of an answer: where training with the same flags would cut it."""

from collections.abc import Sequence

import torch

from dschat.conditions.termination import TerminationCondition
from dschat.config.macro_actions import TerminationFlags
from dschat.demo.models import Opened
from dschat.macro_view.html import MacroToken
from dschat.models.policy import PolicyModel
from dschat.rl.macro_actions import segment
from dschat.rl.types import Rollout, Trajectory
from dschat.trainers.rollout_metrics import token_texts


class MacroActionsOf:
    """Cuts a model's answers."""

    def __init__(self, model: Opened, flags: TerminationFlags, seed: int) -> None:
        """Loads what the condition needs.

        Args:
            model: whose answers are cut.
            flags: the condition, checked.
            seed: for `randomized`.

        Raises:
            UserError: a user's function cannot be imported, or the parser cannot be loaded.
        """
        self._model = model
        self._condition = TerminationCondition(flags, model.tokenizer, model.tokenizer.eos_token_id, seed)
        self._reads_logprobs = flags.termination_condition == "ppl" or ":" in flags.termination_condition

    def __call__(self, prompt_ids: Sequence[int], answer_ids: Sequence[int]) -> list[MacroToken]:
        """The tokens of an answer, each with the number of its macro action.

        `ppl` and a user's function get the log-probs of the model that answers, in the place of the reference's.

        Args:
            prompt_ids: P of them.
            answer_ids: R of them; none gives none.

        Raises:
            UserError: a user's function fails.
        """
        if not answer_ids:
            return []
        ids = torch.tensor([[*prompt_ids, *answer_ids]])
        mask = torch.ones(1, len(answer_ids), dtype=torch.bool)
        rollout = Rollout(ids, torch.ones_like(ids).bool(), mask, torch.zeros(1).long(), torch.ones(1).bool())
        logprobs = torch.zeros(mask.shape)
        if self._reads_logprobs:
            device = self._model.causal_lm.device
            with torch.no_grad():
                policy = PolicyModel(self._model.causal_lm)
                found = policy(ids.to(device), rollout.attention_mask.to(device), len(answer_ids), 1.0)
            logprobs = found[0].float().cpu()
        trajectory = Trajectory(rollout, logprobs, logprobs, torch.zeros(mask.shape), torch.zeros(1))
        numbers = segment(self._condition(trajectory, 0).ends, mask).index[0].tolist()
        texts = token_texts(list(answer_ids), self._model.tokenizer)
        return [MacroToken(text, number) for text, number in zip(texts, numbers, strict=True)]
