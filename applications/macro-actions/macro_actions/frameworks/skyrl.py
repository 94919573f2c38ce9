# SPDX-License-Identifier: Apache-2.0
"""Adapter for SkyRL. Write an entry point that calls

    skyrl.register(MacroActionsConfig("fixed", ngram=5))

twice: before `validate_cfg`, which looks up the estimator's name, and in the function that ray runs, where the trainer
is. On the command line set `trainer.algorithm.advantage_estimator=macro_gae trainer.critic.model.path=...`, and for
ratios of macro actions also `trainer.algorithm.policy_loss_type=macro`.

The advantages are whitened, as SkyRL's own GAE does. Responses are aligned on the right in SkyRL's tensors. The tokens
that the policy did not produce are known from `loss_mask`, which only the trainer's method sees.
"""

import copy
from collections.abc import Sequence
from functools import partial, wraps
from typing import Any

from torch import Tensor

from macro_actions.frameworks import MacroActionsConfig, UnsupportedError, replaced, require

NAME = "macro_gae"
LOSS = "macro"
_batches: list[Any] = []  # the batch whose advantages the trainer is computing, if there is one


def advantages_and_returns(
    macro: MacroActionsConfig,
    *,
    values: Tensor | None,
    response_mask: Tensor,
    index: Sequence[str],
    **arguments: Any,
) -> tuple[Tensor, Tensor]:
    """Advantage estimator for SkyRL's registry: whitened advantages, and returns. Shape (B, R) each."""
    from skyrl.backends.skyrl_train.utils.ppo_utils import masked_whiten

    if values is None:
        raise UnsupportedError(f"skyrl: {NAME} needs a critic; set trainer.critic.model.path.")
    if not _batches:
        raise UnsupportedError("skyrl: call skyrl.register in the function that ray runs, where the trainer is, too.")
    batch = _batches[-1]
    mask = batch.get("loss_mask")
    if mask is None:
        mask = response_mask
    ids = batch.get("sequences")
    if ids is not None:
        ids = ids[:, -values.shape[1] :]
    ends = macro.ends(mask, "skyrl", list(index), ids, batch.get("base_action_log_probs"))
    advantages, returns = macro.gae(
        values,
        arguments["token_level_rewards"],
        ends,
        mask,
        arguments["gamma"],
        arguments["lambd"],
    )
    return masked_whiten(advantages, mask), returns


def policy_loss(
    macro: MacroActionsConfig,
    new_logprobs: Tensor,
    logprobs: Tensor,
    advantages: Tensor,
    *,
    loss_mask: Tensor,
    **arguments: Any,
) -> Any:
    """SkyRL's clipped loss and its metrics, with one ratio per macro action. The condition may read only the mask."""
    from skyrl.backends.skyrl_train.utils.off_policy_correction_utils import off_policy_correction_enabled
    from skyrl.backends.skyrl_train.utils.ppo_utils import ppo_policy_loss

    config = copy.copy(arguments["config"])
    if off_policy_correction_enabled(config.off_policy_correction):
        raise UnsupportedError(f"skyrl: unset trainer.algorithm.off_policy_correction for policy_loss_type={LOSS}.")
    config.policy_loss_type = "regular"
    new_pooled, old_pooled = macro.pooled(f"skyrl, policy_loss_type={LOSS}", loss_mask, new_logprobs, logprobs)
    return ppo_policy_loss(new_pooled, old_pooled, advantages, config, loss_mask)


def register(config: MacroActionsConfig) -> None:
    """Add estimator and loss to SkyRL's registries, and let the estimator see the trainer's batch.

    Raises:
        UnsupportedError: this version of SkyRL lacks a hook.
    """
    from skyrl.backends.skyrl_train.utils import ppo_utils
    from skyrl.train.trainer import RayPPOTrainer

    require("skyrl", ppo_utils, "AdvantageEstimatorRegistry", "PolicyLossRegistry", "masked_whiten", "ppo_policy_loss")
    require("skyrl", RayPPOTrainer, "compute_advantages_and_returns")
    # Functions of a module, so that SkyRL can send them to other processes.
    _add(ppo_utils.AdvantageEstimatorRegistry, NAME, partial(advantages_and_returns, config))
    _add(ppo_utils.PolicyLossRegistry, LOSS, partial(policy_loss, config))
    original = replaced(RayPPOTrainer.compute_advantages_and_returns)

    @wraps(original)
    def with_batch(trainer: Any, data: Any) -> Any:
        algorithm = trainer.cfg.trainer.algorithm
        estimator = algorithm.advantage_estimator
        if estimator != NAME:
            raise UnsupportedError(f"skyrl: set trainer.algorithm.advantage_estimator={NAME}, not {estimator}.")
        if trainer.cfg.generator.step_wise_trajectories:
            raise UnsupportedError(f"skyrl: {NAME} gets no masks with generator.step_wise_trajectories=true.")
        fully_async = any(base.__name__ == "FullyAsyncRayPPOTrainer" for base in type(trainer).__mro__)
        if fully_async and algorithm.policy_loss_type == LOSS:
            raise UnsupportedError(f"skyrl: fully asynchronous training has no old log-probabilities for {LOSS}.")
        _batches.append(data)
        try:
            return original(trainer, data)
        finally:
            _batches.pop()

    with_batch.replaces = original  # type: ignore[attr-defined]
    RayPPOTrainer.compute_advantages_and_returns = with_batch


def _add(
    registry: Any,
    name: str,
    function: Any,
) -> None:
    """Put a function into one of SkyRL's registries, in place of an earlier one of that name."""
    if name in registry.list_available():
        registry.unregister(name)
    registry.register(name, function)


def dispatched(
    config: MacroActionsConfig,
    rewards: Tensor,
    values: Tensor,
    mask: Tensor,
) -> Any:
    """Advantages and returns from SkyRL's own dispatcher, with γ = 1 and λ = .5. Shape (B, R) each."""
    from skyrl.backends.skyrl_train.utils import ppo_utils

    register(config)
    _batches.append({"loss_mask": mask})
    index = [str(row) for row in range(len(mask))]
    return ppo_utils.compute_advantages_and_returns(rewards, mask, index, NAME, None, values, lambd=0.5)
