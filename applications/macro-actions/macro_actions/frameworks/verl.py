# SPDX-License-Identifier: Apache-2.0
"""Adapter for verl with `algorithm.adv_estimator=gae`. Write a module, say my_credit.py on the PYTHONPATH:

    from macro_actions.frameworks import MacroActionsConfig, verl

    verl.register(MacroActionsConfig("fixed", ngram=5, value_function="first"))

and set `actor_rollout_ref.model.external_lib=my_credit`. verl imports the module in the trainer and in every worker,
and stops if it cannot; a plug-in's entry point would be skipped silently. The adapter replaces verl's own GAE, because
verl would give an estimator of another name another buffer. For ratios of macro actions, set also
`actor_rollout_ref.actor.policy_loss.loss_mode=macro`. The advantages are whitened, as verl's own GAE does.
"""

from functools import wraps
from typing import Any

from torch import Tensor

from macro_actions.frameworks import READS, MacroActionsConfig, UnsupportedError, replaced, require

LOSS_NAME = "macro"
FIELDS = {"uids": "uid", "response_ids": "responses", "ref_logprobs": "ref_log_prob"}  # names in verl's buffer
# Inputs of the condition for the batch whose advantages verl is computing; empty at all other times. verl passes only
# values, rewards and mask to its GAE. The trainer's method has the batch and passes the other inputs on in here.
_inputs: list[dict[str, Any]] = []


def register(config: MacroActionsConfig) -> None:
    """Replace verl's GAE by macro actions, pass it the inputs of the condition, and add the loss.

    Raises:
        UnsupportedError: this version of verl lacks a hook.
    """
    from verl.trainer.ppo import core_algos
    from verl.trainer.ppo.v1 import trainer_base
    from verl.utils.torch_functional import masked_whiten

    require("verl", core_algos, "compute_gae_advantage_return", "compute_policy_loss_vanilla", "register_policy_loss")
    require("verl", trainer_base, "tq")
    require("verl", trainer_base.PPOTrainer, "_compute_advantage")

    def macro_gae(
        token_level_rewards: Tensor, values: Tensor, response_mask: Tensor, gamma: float, lam: float
    ) -> tuple[Tensor, Tensor]:
        inputs = _inputs[-1] if _inputs else {}
        ends = config.ends(response_mask, "verl", **inputs)
        advantages, returns = config.gae(values, token_level_rewards, ends, response_mask, float(gamma), float(lam))
        return masked_whiten(advantages, response_mask), returns

    def policy_loss(
        old_log_prob: Tensor, log_prob: Tensor, advantages: Tensor, response_mask: Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        old, new = config.pooled(f"verl, loss_mode={LOSS_NAME}", response_mask, old_log_prob, log_prob)
        return core_algos.compute_policy_loss_vanilla(old, new, advantages, response_mask, *args, **kwargs)

    original = replaced(trainer_base.PPOTrainer._compute_advantage)

    @wraps(original)
    def compute_with_inputs(trainer: Any, batch: Any, metrics: dict[str, Any]) -> Any:
        estimator = trainer.config.algorithm.adv_estimator
        if estimator != "gae":
            raise UnsupportedError(f"verl: macro actions need algorithm.adv_estimator=gae, not {estimator}.")
        _inputs.append(_condition_inputs(config, trainer_base, batch))
        try:
            return original(trainer, batch, metrics)
        finally:
            _inputs.pop()

    core_algos.compute_gae_advantage_return = macro_gae
    core_algos.register_policy_loss(LOSS_NAME)(policy_loss)
    compute_with_inputs.replaces = original  # type: ignore[attr-defined]
    trainer_base.PPOTrainer._compute_advantage = compute_with_inputs


def _condition_inputs(config: MacroActionsConfig, trainer_base: Any, batch: Any) -> dict[str, Any]:
    """The input that the condition reads, from verl's transfer queue; empty if the queue does not have it."""
    argument = READS.get(config.termination_condition)
    if argument is None:
        return {}
    column = FIELDS[argument]
    columns = trainer_base.tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=[column])
    if column not in columns.keys():
        return {}
    rows = columns.get(column)  # a stack of uids, or a nested tensor
    return {argument: rows.tolist() if argument == "uids" else rows.to_padded_tensor(0)}


def run_dispatcher(config: MacroActionsConfig, rewards: Tensor, values: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Advantages and returns from verl's own dispatcher, with γ = 1 and λ = .5. Shape (B, R) each."""
    import verl
    from verl.trainer.ppo.ray_trainer import compute_advantage

    register(config)
    tensors = {"token_level_rewards": rewards, "values": values, "response_mask": mask}
    data = verl.DataProto.from_single_dict(tensors)
    batch = compute_advantage(data, "gae", gamma=1.0, lam=0.5, config={}).batch
    return batch["advantages"], batch["returns"]
