# SPDX-License-Identifier: Apache-2.0
"""TRL, which has no critic: GRPOTrainer with probability ratios of macro actions. Instead of GRPOTrainer:

    from macro_actions.frameworks import MacroActionsConfig
    from macro_actions.frameworks.trl import MacroGRPOTrainer

    trainer = MacroGRPOTrainer(..., macro_actions=MacroActionsConfig("fixed", ngram=5, policy_ratio="macro_mean"))

Advantages, denominators and clipping are TRL's, by `loss_type`, `epsilon` and the rest of GRPOConfig.
"""

from typing import Any

from torch import Tensor
from trl import GRPOTrainer

from macro_actions.frameworks import READS, MacroActionsConfig, UnsupportedError, require
from macro_actions.segments import MEANS, macro_logprobs, segment

HOOKS = ("_compute_loss", "_generate_and_score_completions", "_get_per_token_logps_and_entropies")
LOSSES = ("grpo", "bnpo", "dr_grpo", "dapo")  # those that read log-probabilities in ratios alone


class MacroGRPOTrainer(GRPOTrainer):
    """GRPOTrainer whose ratio on each token is that of its macro action."""

    def __init__(self, *args: Any, macro_actions: MacroActionsConfig, **kwargs: Any) -> None:
        """As GRPOTrainer.

        Raises:
            UnsupportedError: settings, or a version of TRL, in whose loss macro actions have no place.
        """
        require_hooks()
        super().__init__(*args, **kwargs)
        level = self.importance_sampling_level
        remedies = {
            f"loss_type={self.loss_type}: use {', '.join(LOSSES)}": self.loss_type not in LOSSES,
            f"importance_sampling_level={level}: use token": level != "token",
            f"beta={self.beta}: use 0": self.beta != 0,
            "off_policy_mask_threshold: leave it out": getattr(self, "off_policy_mask_threshold", None) is not None,
            "termination_condition ppl, since there is no reference: use another": (
                macro_actions.termination_condition == "ppl"
            ),
            "value_function and macro_reward, since there is no critic: leave them out": (
                (macro_actions.value_function, macro_actions.macro_reward) != ("equal", "sum")
            ),
        }
        if refused := [remedy for remedy, is_wrong in remedies.items() if is_wrong]:
            raise UnsupportedError(f"trl: ratios of macro actions do not go with {'; '.join(refused)}.")
        self.macro_actions = macro_actions
        self._ends: Tensor | None = None  # (B, T), while a loss is computed

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        output = super()._generate_and_score_completions(inputs)
        wanted = READS.get(self.macro_actions.termination_condition)
        read: dict[str, Any] = {}
        if wanted == "uids" and all("prompt" in row for row in inputs):
            read[wanted] = [str(row["prompt"]) for row in inputs]
        if wanted == "response_ids":
            read[wanted] = output["completion_ids"]
        # A tensor of one row each, so that TRL shuffles and splits it as the others.
        output["macro_ends"] = self.macro_actions.ends(self._mask(output), "trl", **read)
        return output

    def _compute_loss(self, model: Any, inputs: Any) -> Any:
        if inputs.get("macro_ends") is None:
            raise UnsupportedError("trl: the batch lost macro_ends on its way from _generate_and_score_completions.")
        self._ends, self._loss_mask = inputs["macro_ends"], self._mask(inputs)
        old = inputs.get("old_per_token_logps")
        try:
            return super()._compute_loss(
                model, inputs | {"old_per_token_logps": None if old is None else self._of(old)}
            )
        finally:
            self._ends = None

    def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> Any:
        logps, *others = super()._get_per_token_logps_and_entropies(*args, **kwargs)
        return (logps if self._ends is None else self._of(logps), *others)

    def _of(self, logps: Tensor) -> Tensor:
        """Log-probabilities of macro actions, on each of their tokens."""
        assert self._ends is not None  # while a loss is computed
        macro = segment(self._ends, self._loss_mask)
        return macro_logprobs(logps, macro, MEANS[self.macro_actions.policy_ratio])

    @staticmethod
    def _mask(inputs: Any) -> Tensor:
        """(B, T), 1 on what the policy produced: not padding, not a tool's answer."""
        mask: Tensor = inputs["completion_mask"]
        return mask if inputs.get("tool_mask") is None else mask * inputs["tool_mask"]


def require_hooks() -> None:
    """Raises UnsupportedError where the installed version lacks what the adapter needs."""
    require("trl", GRPOTrainer, *HOOKS)
