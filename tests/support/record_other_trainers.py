# SPDX-License-Identifier: Apache-2.0
"""Writes what verl and TRL compute on four responses, for tests/rl/test_groups.py: tests/fixtures/peers.json.

    pip download --no-deps verl==0.7.0 trl==1.16.0 && unzip -qo 'verl-*.whl' -d peers && unzip -qo 'trl-*.whl' -d peers
    python tests/support/record_other_trainers.py peers

Both are called as they are; what they import and these functions do not use is replaced by nothing.
"""

import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import torch

FILE = Path(__file__).parents[1] / "fixtures" / "peers.json"
GROUPS = [0, 0, 1, 1]  # the prompt of each response
LENGTHS = [3, 1, 2, 3]
SCORES = [1.0, 0.0, 0.5, -2.0]
OLD = [[-1.0, -0.5, -2.0], [-0.3, 0, 0], [-1.2, -0.7, 0], [-0.9, -2.5, -0.1]]
NEW = [[-0.8, -0.9, -1.5], [-0.6, 0, 0], [-1.2, -0.4, 0], [-1.3, -2.0, -0.2]]
REFERENCE = [[-1.1, -0.5, -1.8], [-0.4, 0, 0], [-1.0, -0.6, 0], [-1.0, -2.2, -0.3]]
BETA, LOW, HIGH, LONGEST = 0.04, 0.2, 0.28, 5


modules: Any = sys.modules


def nothing(*names: str) -> None:
    """Modules that hold whatever is asked of them."""
    for name in names:
        modules[name] = MagicMock(__path__=[])


def of_verl() -> Any:
    """Advantages and losses of `core_algos`."""
    nothing("omegaconf", "tensordict", "tensordict.tensorclass", "ray", "verl", "verl.trainer", "verl.trainer.config")
    nothing("verl.utils", "verl.utils.import_utils", "verl.workers", "verl.workers.config", "verl.utils.device")
    modules["verl.utils.import_utils"].deprecated = lambda *_: lambda function: function
    modules["verl.workers.config"].ActorConfig = SimpleNamespace
    modules["verl.trainer.config"].AlgoConfig = dict
    functional = module("verl.utils.torch_functional", "verl/utils/torch_functional.py")
    modules["verl.utils"].torch_functional = functional
    modules["verl"].utils = modules["verl.utils"]
    core = module("core_algos", "verl/trainer/ppo/core_algos.py")
    mask, scores = torch.tensor([[j < n for j in range(3)] for n in LENGTHS]).float(), torch.zeros(4, 3)
    scores[:, 0] = torch.tensor(SCORES)
    index, new, old = np.array(GROUPS), torch.tensor(NEW, requires_grad=True), torch.tensor(OLD)
    groups = {
        "grpo": core.compute_grpo_outcome_advantage(scores, mask, index)[0],
        "dr_grpo": core.compute_grpo_outcome_advantage(scores, mask, index, norm_adv_by_std_in_grpo=False)[0],
        "rloo": core.compute_rloo_outcome_advantage(scores, mask, index)[0],
    }
    config = SimpleNamespace(clip_ratio=LOW, clip_ratio_low=LOW, clip_ratio_high=HIGH, global_batch_info={})
    config.get = lambda name, default: default
    losses = {}
    for mean in ("token-mean", "seq-mean-token-mean", "gspo"):
        function = core.compute_policy_loss_gspo if mean == "gspo" else core.compute_policy_loss_vanilla
        how = "seq-mean-token-mean" if mean == "gspo" else mean
        loss, _ = function(old, new, groups["grpo"], mask, how, config)
        losses[mean] = {"loss": loss.item(), "gradient": torch.autograd.grad(loss, new)[0].tolist()}
    return {"advantages": {name: x.tolist() for name, x in groups.items()}, "losses": losses}


def of_trl(advantages: torch.Tensor) -> Any:
    """Losses of `GRPOTrainer._compute_loss` with one advantage for each response."""
    from trl.trainer.grpo_trainer import GRPOTrainer

    mask, losses = torch.tensor([[j < n for j in range(3)] for n in LENGTHS]).long(), {}
    for name, kind, level in (
        ("grpo", "grpo", "token"),
        ("dr_grpo", "dr_grpo", "token"),
        ("dapo", "dapo", "token"),
        ("gspo", "grpo", "sequence"),
    ):
        new = torch.tensor(NEW, requires_grad=True)
        trainer = MagicMock(loss_type=kind, importance_sampling_level=level, beta=BETA, max_completion_length=LONGEST)
        trainer.epsilon_low, trainer.epsilon_high, trainer.top_entropy_quantile = LOW, HIGH, 1.0
        trainer.args = SimpleNamespace(delta=None, use_bias_correction_kl=False, steps_per_generation=1)
        trainer._entropy_bonus_enabled = False
        trainer.off_policy_mask_threshold, trainer.use_vllm, trainer.aux_loss_enabled = None, False, False
        trainer.current_gradient_accumulation_steps, trainer.accelerator.num_processes = 1, 1
        trainer.accelerator.gather.side_effect = lambda x: x
        trainer._get_per_token_logps_and_entropies.return_value = (new, torch.zeros(4, 3), None)
        inputs = {"prompt_ids": torch.zeros(4, 1, dtype=torch.long), "prompt_mask": torch.ones(4, 1)}
        inputs |= {"completion_ids": torch.zeros(4, 3, dtype=torch.long), "completion_mask": mask}
        inputs |= {"advantages": advantages, "old_per_token_logps": torch.tensor(OLD)}
        inputs |= {"ref_per_token_logps": torch.tensor(REFERENCE), "num_items_in_batch": mask.sum()}
        loss = GRPOTrainer._compute_loss(trainer, MagicMock(), inputs)
        losses[name] = {"loss": loss.item(), "gradient": torch.autograd.grad(loss, new)[0].tolist()}
    return {"losses": losses}


def module(name: str, file: str) -> Any:
    """A module of the unpacked wheels, run without the rest of its package."""
    path = Path(sys.argv[1]) / file
    made = ModuleType(name)
    sys.modules[name] = made
    exec(compile(path.read_text("utf-8"), str(path), "exec"), vars(made))
    return made


if __name__ == "__main__":
    sys.path.insert(0, sys.argv[1])
    verl = of_verl()
    advantages = torch.tensor(verl["advantages"]["grpo"])[:, 0]
    FILE.write_text(json.dumps({"verl 0.7.0": verl, "trl 1.16.0": of_trl(advantages)}, indent=1) + "\n", "utf-8")
