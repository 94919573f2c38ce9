# SPDX-License-Identifier: Apache-2.0
"""Adapter for TRL: GRPOTrainer, which has no critic, with probability ratios of macro actions. Instead of GRPOTrainer:

    from macro_actions.frameworks import MacroActionsConfig
    from macro_actions.frameworks.trl import MacroGRPOTrainer

    trainer = MacroGRPOTrainer(..., macro_actions=MacroActionsConfig("fixed", ngram=5, policy_ratio="macro_mean"))

Advantages, denominators and clipping are TRL's: `loss_type`, `epsilon` and other fields of GRPOConfig set them.
"""

from typing import Any

from torch import Tensor
from trl import GRPOTrainer

from macro_actions.frameworks import READS, MacroActionsConfig, UnsupportedError, require
from macro_actions.segments import macro_logprobs, segment
from macro_actions.types import MacroActions

HOOKS = ("_compute_loss", "_generate_and_score_completions", "_get_per_token_logps_and_entropies")
LOSSES = ("grpo", "bnpo", "dr_grpo", "dapo")  # these read log-probabilities only to compute ratios


class MacroGRPOTrainer(GRPOTrainer):
    """GRPOTrainer whose ratio on each token is that of its macro action."""

    def __init__(self, *args: Any, macro_actions: MacroActionsConfig, **kwargs: Any) -> None:
        """Create the trainer.

        Args:
            args: arguments of GRPOTrainer.
            macro_actions: where macro actions end, and their ratio.
            kwargs: keyword arguments of GRPOTrainer.

        Raises:
            UnsupportedError: this version of TRL lacks a hook, or its settings do not go with macro actions.
        """
        require_hooks()
        super().__init__(*args, **kwargs)
        self.macro_actions = macro_actions
        self._macro: MacroActions | None = None  # of the batch, while its loss is computed
        unsupported = self._unsupported_settings()
        if unsupported:
            raise UnsupportedError(f"trl: ratios of macro actions do not go with {'; '.join(unsupported)}.")

    def _unsupported_settings(self) -> list[str]:
        """Settings that do not go with ratios of macro actions, with what to change."""
        config = self.macro_actions
        level = self.importance_sampling_level
        unsupported = []
        if self.loss_type not in LOSSES:
            unsupported.append(f"loss_type={self.loss_type}: use {', '.join(LOSSES)}")
        if level != "token":
            unsupported.append(f"importance_sampling_level={level}: use token")
        if self.beta != 0:
            unsupported.append(f"beta={self.beta}: use 0")
        if getattr(self, "use_liger_kernel", False):
            unsupported.append("use_liger_kernel=True, which computes its loss elsewhere: use False")
        if getattr(self, "off_policy_mask_threshold", None) is not None:
            unsupported.append("off_policy_mask_threshold: leave it out")
        if config.termination_condition == "ppl":
            unsupported.append("termination_condition ppl, since there is no reference: use another")
        if config.value_function != "equal" or config.macro_reward != "sum":
            unsupported.append("value_function and macro_reward, since there is no critic: leave them out")
        return unsupported

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        output = super()._generate_and_score_completions(inputs)
        needed_input = READS.get(self.macro_actions.termination_condition)
        arguments: dict[str, Any] = {}
        if needed_input == "uids" and all("prompt" in row for row in inputs):
            arguments["uids"] = [str(row["prompt"]) for row in inputs]
        if needed_input == "response_ids":
            arguments["response_ids"] = output["completion_ids"]
        # TRL shuffles and splits this tensor as the others, because its first dimension is B.
        output["macro_ends"] = self.macro_actions.ends(self._mask(output), "trl", **arguments)
        return output

    def _compute_loss(self, model: Any, inputs: Any) -> Any:
        if inputs.get("macro_ends") is None:
            raise UnsupportedError("trl: the batch lost macro_ends on its way from _generate_and_score_completions.")
        self._macro = segment(inputs["macro_ends"], self._mask(inputs))
        old_logprobs = inputs.get("old_per_token_logps")
        if old_logprobs is not None:
            old_logprobs = self._pooled(old_logprobs)
        try:
            return super()._compute_loss(model, inputs | {"old_per_token_logps": old_logprobs})
        finally:
            self._macro = None

    def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> Any:
        logprobs, *others = super()._get_per_token_logps_and_entropies(*args, **kwargs)
        if self._macro is not None:
            logprobs = self._pooled(logprobs)
        return (logprobs, *others)

    def _pooled(self, logprobs: Tensor) -> Tensor:
        """Log-probabilities of macro actions, on each of their tokens. (B, R) → (B, R)."""
        assert self._macro is not None  # while a loss is computed
        return macro_logprobs(logprobs, self._macro, self.macro_actions.policy_ratio)

    @staticmethod
    def _mask(inputs: Any) -> Tensor:
        """1 on tokens that the policy produced, 0 on padding and on tools' answers. Shape (B, R)."""
        mask: Tensor = inputs["completion_mask"]
        if inputs.get("tool_mask") is not None:
            mask = mask * inputs["tool_mask"]
        return mask


def require_hooks() -> None:
    """Raise UnsupportedError if the installed version lacks what the adapter needs."""
    require("trl", GRPOTrainer, *HOOKS)
