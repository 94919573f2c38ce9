# SPDX-License-Identifier: Apache-2.0
"""OpenRLHF, where `--algo.advantage.estimator gae`. In a script of one's own instead of openrlhf.cli.train_ppo_ray:

    from macro_actions.frameworks import MacroActionsConfig, openrlhf

    openrlhf.register(MacroActionsConfig("fixed", ngram=5, value_function="first"))
    runpy.run_module("openrlhf.cli.train_ppo_ray", run_name="__main__")

OpenRLHF has no hook: its experience maker is replaced by a subclass in the process that trains from there. It whitens
the advantages of all experiences afterwards, as it does with its own GAE.
"""

from typing import Any

from torch import Tensor

from macro_actions.frameworks import MacroActionsConfig, UnsupportedError, require


def experience_maker(base: type, config: MacroActionsConfig) -> type:
    """The subclass of OpenRLHF's RemoteExperienceMaker that computes advantages over macro actions."""
    require("openrlhf", base, "compute_advantages_and_returns", "get_advantages_and_returns")

    class MacroExperienceMaker(base):
        def compute_advantages_and_returns(self, experiences: list[Any]) -> list[Any]:
            if self.advantage_estimator != "gae":
                raise UnsupportedError(
                    f"openrlhf: macro actions need --algo.advantage.estimator gae, not {self.advantage_estimator}."
                )
            self._waiting = list(experiences)
            found: list[Any] = super().compute_advantages_and_returns(experiences)
            if self._waiting:
                raise UnsupportedError(
                    "openrlhf: this version did not ask get_advantages_and_returns for every batch."
                )
            return found

        def get_advantages_and_returns(
            self, values: Tensor, rewards: Tensor, action_mask: Tensor, gamma: float, lambd: float
        ) -> tuple[Tensor, Tensor]:
            experience = self._waiting.pop(0)
            if values is None or experience.values is not values:
                raise UnsupportedError("openrlhf: this version does not hand over the values of each batch in turn.")
            width = values.shape[1]
            ids = None if experience.sequences is None else experience.sequences[:, 1:][:, -width:]
            prompts = experience.index or None
            ends = config.ends(action_mask, "openrlhf", prompts, ids, experience.base_action_log_probs)
            return config.gae(values, rewards, ends, action_mask, gamma, lambd)

    return MacroExperienceMaker


def register(config: MacroActionsConfig) -> None:
    """Lets OpenRLHF's PPO trainer make experiences with macro actions.

    Raises:
        UnsupportedError: this version of OpenRLHF lacks what the adapter needs.
    """
    from openrlhf.trainer import ppo_trainer

    require("openrlhf", ppo_trainer, "RemoteExperienceMaker")
    ppo_trainer.RemoteExperienceMaker = experience_maker(ppo_trainer.RemoteExperienceMaker, config)


def dispatched(config: MacroActionsConfig, rewards: Tensor, values: Tensor, mask: Tensor) -> Any:
    """Advantages and returns of the experience maker that the trainer uses now, with γ = 1 and λ = .5."""
    from openrlhf.trainer import ppo_trainer

    register(config)
    maker = ppo_trainer.RemoteExperienceMaker.__new__(ppo_trainer.RemoteExperienceMaker)
    names = ("values", "sequences", "index", "base_action_log_probs")
    maker._waiting = [type("Experience", (), dict.fromkeys(names) | {"values": values})()]
    return maker.get_advantages_and_returns(values, rewards, mask, 1.0, 0.5)
