# SPDX-License-Identifier: Apache-2.0
"""Adapter for SkyRL. Write an entry point that registers the adapter in two places: before `validate_cfg`, which looks
up the estimator's name, and in the function that ray runs, where the trainer is:

    skyrl.register(MacroActionsConfig("fixed", ngram=5))

On the command line set `trainer.algorithm.advantage_estimator=macro_gae trainer.critic.model.path=...`, and for ratios
of macro actions also `trainer.algorithm.policy_loss_type=macro`.

The advantages are whitened, as SkyRL's own GAE does. Responses are right-aligned (left-padded) in SkyRL's tensors.
"""

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial, wraps
from typing import Any

from torch import Tensor

from macro_actions.frameworks import MacroActionsConfig, UnsupportedError, replaced, require

ESTIMATOR_NAME = "macro_gae"
LOSS_NAME = "macro"
# The batch whose advantages SkyRL is computing; empty at all other times. SkyRL's estimators do not get `loss_mask`,
# which is 0 on tokens that the policy did not produce. The trainer's method has the batch and passes it on in here.
_batches: list[Any] = []


@contextmanager
def _passed_on(batch: Any) -> Iterator[None]:
    """Lets the estimator read a batch as long as the context lasts."""
    _batches.append(batch)
    try:
        yield
    finally:
        _batches.pop()


def advantages_and_returns(
    macro: MacroActionsConfig,
    *,
    token_level_rewards: Tensor,
    values: Tensor | None,
    response_mask: Tensor,
    index: Sequence[str],
    gamma: float,
    lambd: float,
    **_unused: Any,
) -> tuple[Tensor, Tensor]:
    """Advantage estimator for SkyRL's registry, which passes everything but `macro` by keyword.

    Args:
        macro: where macro actions end and how they are pooled.
        token_level_rewards: shape ``(B, R)``.
        values: shape ``(B, R)``; ``None`` without a critic.
        response_mask: shape ``(B, R)``. The batch's `loss_mask` takes its place, if there is one.
        index: uid of each row's prompt.
        gamma: discount per macro action.
        lambd: λ per macro action.

    Returns:
        whitened advantages, and returns, shape ``(B, R)`` each.

    Raises:
        UnsupportedError: there is no critic, or the adapter is not registered where the trainer is, or the condition
            reads what SkyRL's batch lacks.
    """
    from skyrl.backends.skyrl_train.utils.ppo_utils import masked_whiten

    if values is None:
        raise UnsupportedError(f"skyrl: {ESTIMATOR_NAME} needs a critic; set trainer.critic.model.path.")
    if not _batches:
        raise UnsupportedError("skyrl: call skyrl.register in the function that ray runs, where the trainer is, too.")
    batch = _batches[-1]
    mask = batch.get("loss_mask")
    if mask is None:
        mask = response_mask
    response_ids = batch.get("sequences")
    if response_ids is not None:
        response_ids = response_ids[:, -values.shape[1] :]
    ends = macro.ends(mask, "skyrl", list(index), response_ids, batch.get("base_action_log_probs"))
    advantages, returns = macro.gae(values, token_level_rewards, ends, mask, gamma, lambd)
    return masked_whiten(advantages, mask), returns


def policy_loss(
    macro: MacroActionsConfig,
    new_logprobs: Tensor,
    logprobs: Tensor,
    advantages: Tensor,
    *,
    config: Any,
    loss_mask: Tensor,
    **_unused: Any,
) -> Any:
    """Policy loss for SkyRL's registry: SkyRL's clipped loss, with one ratio per macro action.

    Args:
        macro: where macro actions end, and their ratio. The condition may read only the mask, because SkyRL passes
            neither ids nor log-probabilities of the reference to losses.
        new_logprobs: shape ``(B, R)``.
        logprobs: log-probabilities at rollout, shape ``(B, R)``.
        advantages: shape ``(B, R)``.
        config: SkyRL's settings of the algorithm.
        loss_mask: shape ``(B, R)``.

    Returns:
        The loss and its metrics, as SkyRL's own loss returns them.

    Raises:
        UnsupportedError: off-policy correction is on, whose ratios are of tokens, or the condition reads more than the
            mask.
    """
    from skyrl.backends.skyrl_train.utils.off_policy_correction_utils import off_policy_correction_enabled
    from skyrl.backends.skyrl_train.utils.ppo_utils import ppo_policy_loss

    if off_policy_correction_enabled(config.off_policy_correction):
        raise UnsupportedError(
            f"skyrl: unset trainer.algorithm.off_policy_correction for policy_loss_type={LOSS_NAME}."
        )
    regular_config = copy.copy(config)
    regular_config.policy_loss_type = "regular"
    new_pooled, old_pooled = macro.pooled(f"skyrl, policy_loss_type={LOSS_NAME}", loss_mask, new_logprobs, logprobs)
    return ppo_policy_loss(new_pooled, old_pooled, advantages, regular_config, loss_mask)


def register(config: MacroActionsConfig) -> None:
    """Add estimator and loss to SkyRL's registries, and let the estimator see the trainer's batch.

    Raises:
        UnsupportedError: this version of SkyRL lacks a hook.
    """
    from skyrl.backends.skyrl_train.utils import ppo_utils
    from skyrl.train.trainer import RayPPOTrainer

    require("skyrl", ppo_utils, "AdvantageEstimatorRegistry", "PolicyLossRegistry", "masked_whiten", "ppo_policy_loss")
    require("skyrl", RayPPOTrainer, "compute_advantages_and_returns")
    # SkyRL pickles these functions for other processes. Functions defined inside `register` could not be pickled.
    _register_function(ppo_utils.AdvantageEstimatorRegistry, ESTIMATOR_NAME, partial(advantages_and_returns, config))
    _register_function(ppo_utils.PolicyLossRegistry, LOSS_NAME, partial(policy_loss, config))
    original = replaced(RayPPOTrainer.compute_advantages_and_returns)

    @wraps(original)
    def compute_with_batch(trainer: Any, batch: Any) -> Any:
        _check_supported(trainer)
        with _passed_on(batch):
            return original(trainer, batch)

    compute_with_batch.replaces = original  # type: ignore[attr-defined]
    RayPPOTrainer.compute_advantages_and_returns = compute_with_batch


def _register_function(registry: Any, name: str, function: Any) -> None:
    """Put a function into one of SkyRL's registries, in place of an earlier one of that name."""
    if name in registry.list_available():
        registry.unregister(name)
    registry.register(name, function)


def _check_supported(trainer: Any) -> None:
    """Raise UnsupportedError if the trainer's settings do not go with macro actions."""
    algorithm = trainer.cfg.trainer.algorithm
    estimator = algorithm.advantage_estimator
    if estimator != ESTIMATOR_NAME:
        raise UnsupportedError(f"skyrl: set trainer.algorithm.advantage_estimator={ESTIMATOR_NAME}, not {estimator}.")
    if trainer.cfg.generator.step_wise_trajectories:
        raise UnsupportedError(f"skyrl: {ESTIMATOR_NAME} gets no masks with generator.step_wise_trajectories=true.")
    fully_async = any(base.__name__ == "FullyAsyncRayPPOTrainer" for base in type(trainer).__mro__)
    if fully_async and algorithm.policy_loss_type == LOSS_NAME:
        raise UnsupportedError(f"skyrl: fully asynchronous training has no old log-probabilities for {LOSS_NAME}.")


def run_dispatcher(config: MacroActionsConfig, rewards: Tensor, values: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Advantages and returns from SkyRL's own dispatcher, with γ = 1 and λ = .5. Shape (B, R) each."""
    from skyrl.backends.skyrl_train.utils import ppo_utils

    register(config)
    uids = [str(row) for row in range(len(mask))]
    with _passed_on({"loss_mask": mask}):
        return ppo_utils.compute_advantages_and_returns(
            rewards, mask, uids, ESTIMATOR_NAME, None, values, gamma=1.0, lambd=0.5
        )
