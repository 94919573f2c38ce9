# SPDX-License-Identifier: Apache-2.0
"""SkyRL. In an entry point of one's own, twice `skyrl.register(MacroActionsConfig("fixed", ngram=5))`: before
`validate_cfg`, which asks for the estimator's name, and in the function that ray runs, where the trainer is. On the
command line `trainer.algorithm.advantage_estimator=macro_gae trainer.critic.model.path=...`, for ratios of macro
actions also `trainer.algorithm.policy_loss_type=macro`. As SkyRL's own GAE, it whitens the advantages. Responses stand
on the right there; what the policy did not produce is in `loss_mask`, which only the trainer's method sees.
"""

import copy
from collections.abc import Sequence
from functools import partial, wraps
from typing import Any

from torch import Tensor

from macro_actions.frameworks import MacroActionsConfig, UnsupportedError, replaced, require

NAME, LOSS = "macro_gae", "macro"
_batches: list[Any] = []  # the one whose advantages the trainer computes now


def advantages_and_returns(
    macro: MacroActionsConfig, *, values: Tensor | None, response_mask: Tensor, index: Sequence[str], **own: Any
) -> tuple[Tensor, Tensor]:
    """SkyRL's advantage estimator: advantages, whitened, and returns; (B, R) each."""
    from skyrl.backends.skyrl_train.utils.ppo_utils import masked_whiten

    if values is None:
        raise UnsupportedError(f"skyrl: {NAME} needs a critic; set trainer.critic.model.path.")
    if not _batches:
        raise UnsupportedError("skyrl: call skyrl.register in the function that ray runs, where the trainer is, too.")
    batch = _batches[-1]
    mask, ids, reference = (batch.get(name) for name in ("loss_mask", "sequences", "base_action_log_probs"))
    mask, ids = response_mask if mask is None else mask, None if ids is None else ids[:, -values.shape[1] :]
    ends = macro.ends(mask, "skyrl", list(index), ids, reference)
    found = macro.gae(values, own["token_level_rewards"], ends, mask, own["gamma"], own["lambd"])
    return masked_whiten(found[0], mask), found[1]


def policy_loss(
    macro: MacroActionsConfig, new: Tensor, old: Tensor, advantages: Tensor, *, loss_mask: Tensor, **own: Any
) -> Any:
    """SkyRL's clipped loss, and its metrics, with a ratio of each macro action; conditions read the mask alone."""
    from skyrl.backends.skyrl_train.utils.off_policy_correction_utils import off_policy_correction_enabled
    from skyrl.backends.skyrl_train.utils.ppo_utils import ppo_policy_loss

    config = copy.copy(own["config"])
    if off_policy_correction_enabled(config.off_policy_correction):
        raise UnsupportedError(f"skyrl: unset trainer.algorithm.off_policy_correction for policy_loss_type={LOSS}.")
    new_, old_ = macro.pooled(f"skyrl, policy_loss_type={LOSS}", loss_mask, new, old)
    config.policy_loss_type = "regular"
    return ppo_policy_loss(new_, old_, advantages, config, loss_mask)


def register(config: MacroActionsConfig) -> None:
    """Adds estimator and loss to SkyRL's registries, and lets the estimator see the trainer's whole batch.

    Raises:
        UnsupportedError: this version of SkyRL lacks a hook.
    """
    from skyrl.backends.skyrl_train.utils import ppo_utils
    from skyrl.train.trainer import RayPPOTrainer

    require("skyrl", ppo_utils, "AdvantageEstimatorRegistry", "PolicyLossRegistry", "masked_whiten", "ppo_policy_loss")
    require("skyrl", RayPPOTrainer, "compute_advantages_and_returns")
    # Functions of a module, so that SkyRL can send them to other processes.
    estimators, losses = ppo_utils.AdvantageEstimatorRegistry, ppo_utils.PolicyLossRegistry
    for registry, name, function in ((estimators, NAME, advantages_and_returns), (losses, LOSS, policy_loss)):
        if name in registry.list_available():
            registry.unregister(name)
        registry.register(name, partial(function, config))
    theirs = replaced(RayPPOTrainer.compute_advantages_and_returns)

    @wraps(theirs)
    def with_batch(trainer: Any, data: Any) -> Any:
        if (chosen := trainer.cfg.trainer.algorithm.advantage_estimator) != NAME:
            raise UnsupportedError(f"skyrl: set trainer.algorithm.advantage_estimator={NAME}, not {chosen}.")
        if trainer.cfg.generator.step_wise_trajectories:
            raise UnsupportedError(f"skyrl: {NAME} gets no masks with generator.step_wise_trajectories=true.")
        fully_async = any(kind.__name__ == "FullyAsyncRayPPOTrainer" for kind in type(trainer).__mro__)
        if fully_async and trainer.cfg.trainer.algorithm.policy_loss_type == LOSS:
            raise UnsupportedError(f"skyrl: fully asynchronous training has no old log-probabilities for {LOSS}.")
        _batches.append(data)
        try:
            return theirs(trainer, data)
        finally:
            _batches.pop()

    with_batch.replaces = theirs  # type: ignore[attr-defined]
    RayPPOTrainer.compute_advantages_and_returns = with_batch


def dispatched(config: MacroActionsConfig, rewards: Tensor, values: Tensor, mask: Tensor) -> Any:
    """Advantages and returns that SkyRL's own dispatcher gives, with γ = 1 and λ = .5."""
    from skyrl.backends.skyrl_train.utils import ppo_utils

    register(config)
    _batches.append({"loss_mask": mask})
    index = [str(row) for row in range(len(mask))]
    return ppo_utils.compute_advantages_and_returns(rewards, mask, index, NAME, None, values, lambd=0.5)
