# SPDX-License-Identifier: Apache-2.0
"""verl, where `algorithm.adv_estimator=gae`. In a module of one's own, say my_credit.py on the PYTHONPATH:

    from macro_actions.frameworks import MacroActionsConfig, verl

    verl.register(MacroActionsConfig("fixed", ngram=5, value_function="first"))

and `actor_rollout_ref.model.external_lib=my_credit`: verl imports it where it trains and in every worker, and fails if
it cannot. A plug-in's entry point would fail without a word, and a trainer of a new name would get another buffer; so
this takes the place of verl's own GAE. For ratios of macro actions also
`actor_rollout_ref.actor.policy_loss.loss_mode=macro`. As verl's own GAE, it whitens the advantages.
"""

from functools import wraps
from typing import Any

from torch import Tensor

from macro_actions.frameworks import READS, MacroActionsConfig, UnsupportedError, replaced, require

LOSS = "macro"
FIELDS = {"uids": "uid", "response_ids": "responses", "ref_logprobs": "ref_log_prob"}  # as verl's buffer calls them
_rows: list[dict[str, Any]] = []  # what the condition reads of the rows whose advantages are computed now


def register(config: MacroActionsConfig) -> None:
    """Puts macro actions in the place of verl's GAE, lets it see what the condition reads, and adds the loss.

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
        rows = _rows[-1] if _rows else {}
        ends = config.ends(response_mask, "verl", **rows)
        advantages, returns = config.gae(values, token_level_rewards, ends, response_mask, float(gamma), float(lam))
        return masked_whiten(advantages, response_mask), returns

    def policy_loss(
        old_log_prob: Tensor, log_prob: Tensor, advantages: Tensor, response_mask: Tensor, *own: Any, **named: Any
    ) -> Any:
        old, new = config.pooled(f"verl, loss_mode={LOSS}", response_mask, old_log_prob, log_prob)
        return core_algos.compute_policy_loss_vanilla(old, new, advantages, response_mask, *own, **named)

    theirs = replaced(trainer_base.PPOTrainer._compute_advantage)

    @wraps(theirs)
    def with_rows(trainer: Any, batch: Any, metrics: dict[str, Any]) -> Any:
        estimator = trainer.config.algorithm.adv_estimator
        if estimator != "gae":
            raise UnsupportedError(f"verl: macro actions need algorithm.adv_estimator=gae, not {estimator}.")
        _rows.append(_read(config, trainer_base, batch))
        try:
            return theirs(trainer, batch, metrics)
        finally:
            _rows.pop()

    core_algos.compute_gae_advantage_return = macro_gae
    core_algos.register_policy_loss(LOSS)(policy_loss)
    with_rows.replaces = theirs  # type: ignore[attr-defined]
    trainer_base.PPOTrainer._compute_advantage = with_rows


def _read(config: MacroActionsConfig, trainer_base: Any, batch: Any) -> dict[str, Any]:
    """What the condition reads of these rows, from verl's transfer queue."""
    wanted = READS.get(config.termination_condition)
    if wanted is None:
        return {}
    place = {"keys": batch.keys, "partition_id": batch.partition_id}
    found = trainer_base.tq.kv_batch_get(**place, select_fields=[FIELDS[wanted]])
    if FIELDS[wanted] not in found.keys():
        return {}
    field = found.get(FIELDS[wanted])  # a stack of uids, or a nested tensor
    return {wanted: field.tolist() if wanted == "uids" else field.to_padded_tensor(0)}


def dispatched(config: MacroActionsConfig, rewards: Tensor, values: Tensor, mask: Tensor) -> Any:
    """Advantages and returns that verl's own dispatcher gives, with γ = 1 and λ = .5."""
    import verl
    from verl.trainer.ppo.ray_trainer import compute_advantage

    register(config)
    tensors = {"token_level_rewards": rewards, "values": values, "response_mask": mask}
    batch = compute_advantage(verl.DataProto.from_single_dict(tensors), "gae", lam=0.5, config={}).batch
    return batch["advantages"], batch["returns"]
