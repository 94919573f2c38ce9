# SPDX-License-Identifier: Apache-2.0
"""Each flag of credit assignment and of the update changes the number that it is there to change."""

import pytest
import torch

from closeness import near
from dschat.builders import ppo as builders
from dschat.builders.data import check_lengths
from dschat.errors import UserError
from dschat.rl.macro_actions import segment
from dschat.rl.types import Trajectory
from dschat.rollouts.vllm_server import ServerNeeds
from dschat.run.distributed import device
from dschat.trainers.credit import assign_credit
from dschat.trainers.ppo_update import UpdateSettings
from factories import EOS, engine_of, make_causal_lm, make_rollout, make_tokenizer, ppo_config, save_folder, to_device

CPU = torch.device("cpu")


def advantages(tmp_path, finished=True, **flags):
    """Of a response of three tokens: values 1, 2, 4, log-ratios 0.2, 0, 0.4 and score 3."""
    rollout = make_rollout([([5], [6, 7, EOS if finished else 8])])
    logprobs = torch.tensor([[-1.0, -1.0, -1.0]])
    ref = logprobs - torch.tensor([[0.2, 0.0, 0.4]])
    trajectory = to_device(Trajectory(rollout, logprobs, ref, torch.tensor([[1.0, 2.0, 4.0]]), torch.tensor([3.0])))
    macro = segment(torch.tensor([[False, True, True]], device=device()), trajectory.response_mask)
    config = ppo_config(tmp_path / "out", **{"kl_coef": 0.5, "gamma": 1.0, "lam": 1.0} | flags)
    return assign_credit(trajectory, macro, config.kl_coef, config).advantages[0].to(CPU).tolist()


# Worked by hand. Token rewards −0.1, 0, −0.2 + 3; macro rewards −0.1 and 2.8; macro values 1.5 (mean of 1, 2) and 4.
# γ = λ = 1: Â = Σ rewards − value = 2.7 − 1.5 = 1.2 and 2.8 − 4 = −1.2.
CASES = {
    "plain": ({}, [1.2, 1.2, -1.2]),
    "kl_coef 0": ({"kl_coef": 0.0}, [1.5, 1.5, -1.0]),
    # δ = −0.1 + 0.5·4 − 1.5 = 0.4 and −1.2; Â = 0.4 + 0.5·(−1.2)
    "gamma": ({"gamma": 0.5}, [-0.2, -0.2, -1.2]),
    # δ = −0.1 + 4 − 1.5 = 2.4; Â = 2.4 + 0.5·(−1.2)
    "lam": ({"lam": 0.5}, [1.8, 1.8, -1.2]),
    "value_function": ({"value_function": "first"}, [1.7, 1.7, -1.2]),
    # mean token rewards −0.05 and 2.8: 2.75 − 1.5
    "macro_reward": ({"macro_reward": "mean"}, [1.25, 1.25, -1.2]),
    # k2: d²/2 = 0.02, 0, 0.08 → rewards −0.01 and 2.96
    "kl_estimator": ({"kl_estimator": "k2"}, [1.45, 1.45, -1.04]),
    "clip_reward_value": ({"clip_reward_value": 2.0}, [0.2, 0.2, -2.2]),
    "missing_eos_penalty": ({"missing_eos_penalty": 1.0, "finished": False}, [0.2, 0.2, -2.2]),
    # mean 0.4, variance 1.28: (1.2 − 0.4)/√1.28 and (−1.2 − 0.4)/√1.28
    "whiten_advantages": ({"whiten_advantages": True}, [0.7071068, 0.7071068, -1.4142136]),
    "normalize_advantages batch": ({"normalize_advantages": "batch"}, [0.7071068, 0.7071068, -1.4142136]),
    "normalize_advantages row": ({"normalize_advantages": "row"}, [0.7071068, 0.7071068, -1.4142136]),
}


@pytest.mark.parametrize("name", CASES)
def test_credit_flags(name, tmp_path):
    flags, expected = CASES[name]
    assert advantages(tmp_path, **flags) == near(expected)


def test_update_flags(tmp_path):
    flags = {"ppo_epochs": 3, "cliprange": 0.3, "cliprange_value": 0.4, "policy_ratio": "macro_mean"}
    flags |= {"rollout_is_clip": 2.0, "vf_coef": 0.1}
    config = ppo_config(tmp_path, temperature=0.7, per_device_training_batch_size=2, global_batch_size=4, **flags)
    settings = UpdateSettings.from_config(config, config.plan_batches(1))
    assert {name: getattr(settings, name) for name in flags} == flags
    assert (settings.update_size, settings.micro_batch, settings.temperature) == (4, 2, 0.7)


def test_heads_that_vllm_cannot_divide(tmp_path):
    path = save_folder(tmp_path / "model", make_causal_lm("llama"), make_tokenizer(100))
    config = ppo_config(tmp_path, actor_model_name_or_path=path, rollout_engine="vllm", vllm_tensor_parallel=3)
    with pytest.raises(UserError, match="--vllm_tensor_parallel 3 does not divide the 2 attention heads of"):
        check_lengths(config)


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({"vllm_gpu_memory": 0.4, "vllm_tensor_parallel": 2}, ("VllmEngine", "model", 14, 0.4, 2)),
        (
            {"vllm_url": ["http://a", "http://b"], "vllm_patience": 5.0, "temperature": 0.7},
            ("VllmServers", ["http://a", "http://b"], ServerNeeds(100, 14, 0.7, 5.0)),
        ),
        ({"vllm_url": ["http://a"], "temperature": 0}, ("VllmServers", ["http://a"], ServerNeeds(100, 14, 1, 600))),
    ],
)
def test_vllm_flags(flags, expected, group, tmp_path, monkeypatch):
    for name in ("VllmEngine", "VllmServers"):
        monkeypatch.setattr(builders, name, lambda *arguments, name=name: (name, *arguments))
    monkeypatch.setattr(builders, "grows", lambda *_: False)
    sizes = {"max_prompt_seq_len": 6, "max_answer_seq_len": 8}
    config = ppo_config(tmp_path, actor_model_name_or_path="model", rollout_engine="vllm", **sizes, **flags)
    assert builders._rollout_engine(config, engine_of(make_causal_lm()), None) == expected


def test_importance_weights_are_on_ahead(tmp_path):
    flags = {"rollout_engine": "vllm", "vllm_url": ["http://a"]}
    clips = [ppo_config(tmp_path, **flags, **more).rollout_is_clip for more in ({}, {"rollouts_ahead": 1})]
    assert clips == [None, 2.0]
    assert ppo_config(tmp_path, **flags, rollouts_ahead=1, rollout_is_clip=5.0).rollout_is_clip == 5.0
