# SPDX-License-Identifier: Apache-2.0
"""slime. In a module of one's own, say my_credit.py on the PYTHONPATH:

    from macro_actions.frameworks import MacroActionsConfig, slime

    advantages = slime.estimator(MacroActionsConfig("fixed", ngram=5, value_function="first"))

and `--advantage-estimator ppo --custom-advantage-function-path my_credit.advantages`. The rewards are those of slime's
PPO, −kl_coef · KL on every token that the policy produced and the score on the last one; slime whitens where
--normalize-advantages says so.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from macro_actions.frameworks import READS, MacroActionsConfig, UnsupportedError, require

Estimator = Callable[[Any, dict[str, Any]], None]


def estimator(config: MacroActionsConfig) -> Estimator:
    """A function for --custom-advantage-function-path: it sets `advantages` and `returns`, a tensor of each sample."""

    def advantages(args: Any, rollout_data: dict[str, Any]) -> None:
        values = rollout_data.get("values")
        if values is None:
            raise UnsupportedError("slime: macro actions need a critic; set --advantage-estimator ppo.")
        lengths = rollout_data["response_lengths"]
        if [len(row) for row in values] != list(lengths):
            raise UnsupportedError("slime: --context-parallel-size must be 1: a part of a response cannot be cut.")
        mask = _padded(rollout_data["loss_masks"]).to(values[0].device)
        rewards = _padded([-args.kl_coef * kl for kl in rollout_data["kl"]]) * mask
        last = torch.tensor(lengths, device=rewards.device) - 1
        scores = torch.tensor(rollout_data["rewards"], dtype=rewards.dtype, device=rewards.device)
        rewards[torch.arange(len(lengths)), last] += scores
        ends = config.ends(mask, "slime", **_read(config, rollout_data))
        found = config.gae(_padded(values), rewards, ends, mask, args.gamma, args.lambd)
        for name, rows in zip(("advantages", "returns"), found, strict=True):
            rollout_data[name] = [row[:length] for row, length in zip(rows, lengths, strict=True)]

    return advantages


def _read(config: MacroActionsConfig, rollout_data: dict[str, Any]) -> dict[str, Any]:
    """What the condition reads; its samples' numbers stand for uids in slime, each prompt's samples in a row."""
    wanted, lengths = READS.get(config.termination_condition), rollout_data["response_lengths"]
    if wanted == "uids" and rollout_data.get("sample_indices") is not None:
        return {wanted: [int(number) for number in rollout_data["sample_indices"]]}
    if wanted == "response_ids" and rollout_data.get("tokens") is not None:
        rows = zip(rollout_data["tokens"], lengths, strict=True)
        return {wanted: _padded([row[len(row) - length :] for row, length in rows])}
    return {}  # no log-probabilities of a reference: the critic's process has none


def _padded(rows: Sequence[Tensor]) -> Tensor:
    return pad_sequence(list(rows), batch_first=True)


def dispatched(config: MacroActionsConfig, rewards: Tensor, values: Tensor, mask: Tensor) -> Any:
    """Advantages and returns that slime's own dispatcher gives, with γ = 1 and λ = .5; it imports Megatron."""
    from argparse import Namespace

    from slime.backends.megatron_utils import loss

    require("slime", loss, "compute_advantages_and_returns", "load_function")
    lengths = [int(row.sum()) for row in mask]
    rows = {"values": values, "log_probs": values, "loss_masks": mask}
    data: dict[str, Any] = {n: [row[:k] for row, k in zip(x, lengths, strict=True)] for n, x in rows.items()}
    data |= {"rewards": rewards.sum(1).tolist(), "response_lengths": lengths, "total_lengths": lengths}
    own = {"kl_coef": 0.0, "gamma": 1.0, "lambd": 0.5, "use_rollout_logprobs": False, "normalize_advantages": False}
    args = Namespace(**own, use_opd=False, custom_advantage_function_path="macro_actions")
    loss.mpu.is_pipeline_last_stage, loss.load_function = lambda: True, lambda path: estimator(config)
    loss.compute_advantages_and_returns(args, data)
    return _padded(data["advantages"]), _padded(data["returns"])
