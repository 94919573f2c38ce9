# SPDX-License-Identifier: Apache-2.0
"""Adapter for OpenRLHF with `--algo.advantage.estimator gae`.

Write a script that calls

    ray.init(runtime_env=openrlhf.runtime_env(MacroActionsConfig("fixed", ngram=5)))

and then runs the module openrlhf.cli.train_ppo_ray. OpenRLHF has no hook for advantages. Therefore the adapter
replaces its experience maker by a subclass, in every process that ray starts, since any may be the one that trains.
OpenRLHF whitens the advantages of all experiences afterwards, as after its own GAE.
"""

import logging
import os
import sys
from importlib import import_module
from importlib.abc import MetaPathFinder
from typing import Any

from torch import Tensor

from macro_actions.frameworks import MacroActionsConfig, UnsupportedError, require

TRAINER = "openrlhf.trainer.ppo_trainer"
VARIABLES = {"TOKENIZERS_PARALLELISM": "true", "NCCL_DEBUG": "WARN", "RAY_ENABLE_ZERO_COPY_TORCH_TENSORS": "1"}


def runtime_env(config: MacroActionsConfig) -> dict[str, Any]:
    """Argument of `ray.init`: the setup of its processes, and the variables that OpenRLHF itself would set."""
    variables = {name: os.environ.get(name, value) for name, value in VARIABLES.items()}
    return {"worker_process_setup_hook": lambda: register(config), "env_vars": variables}


def experience_maker(base: type, config: MacroActionsConfig) -> type:
    """Subclass of OpenRLHF's RemoteExperienceMaker that computes advantages over macro actions."""
    require("openrlhf", base, "compute_advantages_and_returns", "get_advantages_and_returns")

    class MacroExperienceMaker(base):
        def compute_advantages_and_returns(self, experiences: list[Any]) -> list[Any]:
            if self.advantage_estimator != "gae":
                raise UnsupportedError("openrlhf: set --algo.advantage.estimator gae, which alone has a critic.")
            self._remaining = list(experiences)
            completed: list[Any] = super().compute_advantages_and_returns(experiences)
            if self._remaining:
                raise UnsupportedError(
                    "openrlhf: this version did not ask get_advantages_and_returns for every batch."
                )
            return completed

        def get_advantages_and_returns(
            self, values: Tensor, rewards: Tensor, action_mask: Tensor, gamma: float, lambd: float
        ) -> tuple[Tensor, Tensor]:
            experience = self._remaining.pop(0)
            if experience.values is not values:
                raise UnsupportedError("openrlhf: this version does not hand over the values of each batch in turn.")
            ids = None
            if experience.sequences is not None:
                ids = experience.sequences[:, 1:][:, -values.shape[1] :]
            prompts = experience.index or None
            ends = config.ends(action_mask, "openrlhf", prompts, ids, experience.base_action_log_probs)
            return config.gae(values, rewards, ends, action_mask, gamma, lambd)

    return MacroExperienceMaker


def register(config: MacroActionsConfig) -> None:
    """Replace the experience maker of this process's trainer, now or when the trainer is imported.

    Raises:
        UnsupportedError: the trainer is imported already and lacks a hook.
    """
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, _OnImport)]
    if TRAINER in sys.modules:
        _replace(config, sys.modules[TRAINER])
    else:
        sys.meta_path.insert(0, _OnImport(config))


class _OnImport(MetaPathFinder):
    """Replaces the experience maker when the trainer's module is imported, which other finders find."""

    def __init__(self, config: MacroActionsConfig) -> None:
        self._config = config

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name != TRAINER:
            return None
        spec: Any = None
        for finder in sys.meta_path:
            if finder is not self and spec is None and hasattr(finder, "find_spec"):
                spec = finder.find_spec(name, path, target)
        if spec is None:
            return None
        original_exec_module = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            original_exec_module(module)
            _replace(self._config, module)

        spec.loader.exec_module = exec_module
        return spec


def _replace(config: MacroActionsConfig, trainer: Any) -> None:
    require("openrlhf", trainer, "RemoteExperienceMaker")
    current = trainer.RemoteExperienceMaker
    original = getattr(current, "replaces", current)  # an earlier registration's
    trainer.RemoteExperienceMaker = experience_maker(original, config)
    trainer.RemoteExperienceMaker.replaces = original
    logging.getLogger(__name__).warning("openrlhf: advantages over macro actions: %s", config.termination_condition)


def require_hooks() -> None:
    """Raise UnsupportedError if the installed version lacks what the adapter needs. Nothing is replaced."""
    trainer = import_module(TRAINER)
    require("openrlhf", trainer, "RemoteExperienceMaker")
    experience_maker(trainer.RemoteExperienceMaker, MacroActionsConfig())
