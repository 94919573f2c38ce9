# SPDX-License-Identifier: Apache-2.0
"""Adapter for slime. Write a module, say my_credit.py on the PYTHONPATH:

    from macro_actions.frameworks import MacroActionsConfig, slime

    advantages = slime.estimator(MacroActionsConfig("fixed", ngram=5, value_function="first"))

and pass `--advantage-estimator ppo --custom-advantage-function-path my_credit.advantages`. The rewards are those of
slime's PPO: −kl_coef · KL on every token that the policy produced, and the score on the last one. slime whitens the
advantages with --normalize-advantages.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from macro_actions.frameworks import READS, MacroActionsConfig, UnsupportedError, require

Estimator = Callable[[Any, dict[str, Any]], None]


def estimator(config: MacroActionsConfig) -> Estimator:
    """Function for --custom-advantage-function-path.

    It sets `advantages` and `returns` of the rollout data: lists with one tensor per row.
    """

    def set_advantages(args: Any, rollout_data: dict[str, Any]) -> None:
        values = rollout_data.get("values")
        if values is None:
            raise UnsupportedError("slime: macro actions need a critic; set --advantage-estimator ppo.")
        lengths = rollout_data["response_lengths"]
        if [len(row) for row in values] != list(lengths):
            raise UnsupportedError("slime: --context-parallel-size must be 1: a part of a response cannot be cut.")

        mask = _padded(rollout_data["loss_masks"]).to(values[0].device)
        rewards = _token_rewards(args.kl_coef, rollout_data, mask)
        ends = config.ends(mask, "slime", **_condition_inputs(config, rollout_data))
        advantages, returns = config.gae(_padded(values), rewards, ends, mask, args.gamma, args.lambd)
        rollout_data["advantages"] = _rows(advantages, lengths)
        rollout_data["returns"] = _rows(returns, lengths)

    return set_advantages


def _token_rewards(kl_coef: float, rollout_data: dict[str, Any], mask: Tensor) -> Tensor:
    """Token rewards: the KL penalty on the policy's tokens, and the score on the response's last one. (B, R)"""
    rewards = _padded([-kl_coef * kl for kl in rollout_data["kl"]]) * mask
    last_tokens = torch.tensor(rollout_data["response_lengths"], device=rewards.device) - 1
    scores = torch.tensor(rollout_data["rewards"], dtype=rewards.dtype, device=rewards.device)
    rewards[torch.arange(len(rewards)), last_tokens] += scores
    return rewards


def _condition_inputs(config: MacroActionsConfig, rollout_data: dict[str, Any]) -> dict[str, Any]:
    """The input that the condition reads; empty if slime's rollout does not have it.

    slime has no uid per prompt: each sample's own index is used. The critic's process has no log-probabilities of the
    reference.
    """
    argument = READS.get(config.termination_condition)
    if argument == "uids" and rollout_data.get("sample_indices") is not None:
        return {"uids": [int(number) for number in rollout_data["sample_indices"]]}
    if argument == "response_ids" and rollout_data.get("tokens") is not None:
        responses = []
        for tokens, length in zip(rollout_data["tokens"], rollout_data["response_lengths"], strict=True):
            responses.append(tokens[len(tokens) - length :])
        return {"response_ids": _padded(responses)}
    return {}


def _padded(rows: Sequence[Tensor]) -> Tensor:
    """Tensors of different lengths as one of shape (B, R), padded on the right with 0."""
    return pad_sequence(list(rows), batch_first=True)


def _rows(x: Tensor, lengths: Sequence[int]) -> list[Tensor]:
    """Rows of a padded tensor, shape (B, R), without their padding."""
    return [row[:length] for row, length in zip(x, lengths, strict=True)]


def run_dispatcher(config: MacroActionsConfig, rewards: Tensor, values: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Advantages and returns from slime's own dispatcher, with γ = 1 and λ = .5, for the check of the adapter.

    It imports Megatron.

    Args:
        config: the macro actions.
        rewards: shape ``(B, R)``; each row's sum is the score of its response.
        values: shape ``(B, R)``.
        mask: shape ``(B, R)``, 1 on response tokens, which begin each row.

    Returns:
        Shape ``(B, R)`` each.
    """
    from argparse import Namespace
    from unittest.mock import patch

    from slime.backends.megatron_utils import loss

    require("slime", loss, "compute_advantages_and_returns", "load_function")
    lengths = [int(row.sum()) for row in mask]
    data: dict[str, Any] = {
        "values": _rows(values, lengths),
        "log_probs": _rows(values, lengths),  # only their shapes are read, since kl_coef is 0
        "loss_masks": _rows(mask, lengths),
        "rewards": rewards.sum(1).tolist(),
        "response_lengths": lengths,
        "total_lengths": lengths,
    }
    args = Namespace(
        kl_coef=0.0,
        gamma=1.0,
        lambd=0.5,
        use_rollout_logprobs=False,
        normalize_advantages=False,
        use_opd=False,
        custom_advantage_function_path="macro_actions",
    )
    with (
        patch.object(loss.mpu, "is_pipeline_last_stage", lambda: True),
        patch.object(loss, "load_function", lambda path: estimator(config)),
    ):
        loss.compute_advantages_and_returns(args, data)
    return _padded(data["advantages"]), _padded(data["returns"])
