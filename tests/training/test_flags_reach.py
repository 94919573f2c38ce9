# SPDX-License-Identifier: Apache-2.0
"""Flags reach what they are there to change: credit, updates, optimisers, engines, the tokens of a rollout."""

from types import SimpleNamespace

import pytest
import torch

from closeness import near
from dschat.engine.engine import OptimizerSettings
from dschat.rollouts.sampling import Sampling
from dschat.run.distributed import device
from dschat.settings.supervised import RewardConfig, SFTConfig
from dschat.training.ppo.collect import actor_sampling
from dschat.training.ppo.credit import assign_credit
from dschat.training.steps import engines
from dschat.training.steps import ppo as builders
from dschat.training.steps.engines import RunPlan, engine_settings
from dschat.training.steps.ppo import build_ppo_models, load_ppo_tokenizer
from dschat.training.steps.reward import build_reward_model
from dschat.training.steps.step3 import frozen_settings
from dschat.training.steps.supervised import build_policy
from dschat.vllm import step3 as vllm
from dschat.vllm.servers import ServerNeeds
from factories import (
    BOS,
    EOS,
    PAD,
    collected,
    engine_of,
    favouring,
    make_causal_lm,
    make_prompts,
    make_rollout,
    make_tokenizer,
    ppo_config,
    ppo_loop,
    replace_in_builders,
    save_folder,
    to_device,
)
from macro_actions.segments import segment
from macro_actions.types import Trajectory


def advantages(tmp_path, finished=True, **flags):
    """Of a response of three tokens: values 1, 2, 4, log-ratios 0.2, 0, 0.4 and score 3."""
    rollout = make_rollout([([5], [6, 7, EOS if finished else 8])])
    logprobs = torch.tensor([[-1.0, -1.0, -1.0]])
    ref = logprobs - torch.tensor([[0.2, 0.0, 0.4]])
    trajectory = to_device(Trajectory(rollout, logprobs, ref, torch.tensor([[1.0, 2.0, 4.0]]), torch.tensor([3.0])))
    macro = segment(torch.tensor([[False, True, True]], device=device()), trajectory.response_mask)
    config = ppo_config(tmp_path / "out", **{"kl_coef": 0.5, "gamma": 1.0, "lam": 1.0} | flags)
    return assign_credit(trajectory, macro, config.kl.kl_coef, config).advantages[0].tolist()


# Worked by hand. Token rewards −0.1, 0, −0.2 + 3; macro rewards −0.1 and 2.8; macro values 1.5 (mean of 1, 2) and 4.
# γ = λ = 1: Â = Σ rewards − value = 2.7 − 1.5 = 1.2 and 2.8 − 4 = −1.2.
CASES = {
    "plain": ({}, [1.2, 1.2, -1.2]),
    # δ = −0.1 + 0.5·4 − 1.5 = 0.4 and −1.2; Â = 0.4 + 0.5·(−1.2)
    "gamma": ({"gamma": 0.5}, [-0.2, -0.2, -1.2]),
    # δ = −0.1 + 4 − 1.5 = 2.4; Â = 2.4 + 0.5·(−1.2)
    "lam": ({"lam": 0.5}, [1.8, 1.8, -1.2]),
    "value_function": ({"value_function": "first"}, [1.7, 1.7, -1.2]),
    # mean token rewards −0.05 and 2.8: 2.75 − 1.5
    "macro_reward": ({"macro_reward": "mean"}, [1.25, 1.25, -1.2]),
    # k2: d²/2 = 0.02, 0, 0.08 → rewards −0.01 and 2.96
    "kl_estimator": ({"kl_estimator": "k2"}, [1.45, 1.45, -1.04]),
    "missing_eos_penalty": ({"missing_eos_penalty": 1.0, "finished": False}, [0.2, 0.2, -2.2]),
    # mean 0.4, variance 1.28: (1.2 − 0.4)/√1.28 and (−1.2 − 0.4)/√1.28
    "whiten_advantages": ({"whiten_advantages": True}, [0.7071068, 0.7071068, -1.4142136]),
}


@pytest.mark.parametrize("name", CASES)
def test_credit_flags(name, tmp_path):
    flags, expected = CASES[name]
    assert advantages(tmp_path, **flags) == near(expected)


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({"vllm_gpu_memory": 0.4, "vllm_tensor_parallel": 2}, ("VllmEngine", "model", 14, 0.4, 2)),
        (
            {"vllm_url": ["http://a", "http://b"], "vllm_timeout": 5.0, "temperature": 0.7},
            ("VllmServers", ["http://a", "http://b"], ServerNeeds(100, 14, 0.7, 5.0)),
        ),
        ({"vllm_url": ["http://a"], "temperature": 0}, ("VllmServers", ["http://a"], ServerNeeds(100, 14, 1, 1200))),
    ],
)
def test_vllm_flags(flags, expected, group, tmp_path, monkeypatch):
    for name in ("VllmEngine", "VllmServers"):
        monkeypatch.setattr(vllm, name, lambda *arguments, name=name: (name, *arguments))
    monkeypatch.setattr(vllm, "has_new_rows", lambda *_: False)
    sizes = {"max_prompt_seq_len": 6, "max_answer_seq_len": 8}
    config = ppo_config(tmp_path, actor_model_name_or_path="model", rollout_engine="vllm", **sizes, **flags)
    assert builders._rollout_engine(config, engine_of(make_causal_lm()), None) == expected


NOT_BUILT = (
    *("load_causal_lm", "load_scalar", "load_critic", "PolicyModel", "ScalarModel", "frozen_engine", "end_token_id"),
    *("function_scores", "_rollout_engine", "choose_trained", "require_trainable_tokens", "require_savable"),
    *("lora_config", "own_end_ids", "seed_new_rows", "note_reward_loss", "hint_at_untrained_values", "note_end_token"),
)


@pytest.fixture
def optimisers(monkeypatch):
    """The optimisers of the engines in the order in which they are made; nothing is loaded."""
    found = []
    replace_in_builders(monkeypatch, "train_engine", lambda model, optimizer, settings: found.append(optimizer))
    for name in NOT_BUILT:
        replace_in_builders(monkeypatch, name, lambda *_, **__: None)
    return found


@pytest.mark.parametrize(
    ("where", "updates", "compiles"), [("cuda", 100, True), ("cuda", 99, False), ("cpu", 100, False)]
)
def test_whether_layers_are_compiled_is_decided_beside_the_flag(where, updates, compiles, tmp_path, monkeypatch):
    """The configuration, which a run writes down, goes on saying auto."""
    monkeypatch.setattr(engines, "device", lambda: torch.device(where))
    config = ppo_config(tmp_path, dtype="fp32")
    plan = RunPlan.of(config, config.plan_batches(1), updates)
    assert plan.compiles is compiles and plan.updates == updates
    assert engine_settings(config, plan, False, 0).compile is compiles
    assert frozen_settings(config, plan).compile is compiles
    assert config.engine.compile == "auto"


SHARED = {"lr_scheduler_type": "cosine", "gradient_clipping": 0.5}


def test_actor_and_critic_have_optimisers_of_their_own(optimisers, tmp_path):
    own = {"actor_learning_rate": 1e-3, "actor_weight_decay": 0.1}
    own |= {"critic_learning_rate": 2e-3, "critic_weight_decay": 0.2}
    config = ppo_config(tmp_path, num_warmup_steps=3, **(own | SHARED))
    build_ppo_models(config, RunPlan.of(config, config.plan_batches(1), 20), SimpleNamespace())
    assert optimisers == [
        OptimizerSettings(1e-3, 0.1, 20, 3, "cosine", 0.5),
        OptimizerSettings(2e-3, 0.2, 20, 3, "cosine", 0.5),
    ]


def test_the_actors_schedule_is_shorter_by_the_critics_warm_up(optimisers, tmp_path):
    """A learning-rate warm-up of a tenth: of the actor's 15 updates 2, of the critic's 20 also 2."""
    config = ppo_config(tmp_path, critic_warmup_updates=5, warmup_ratio=0.1, **SHARED)
    build_ppo_models(config, RunPlan.of(config, config.plan_batches(1), 20), SimpleNamespace())
    assert [(settings.total_updates, settings.warmup_updates) for settings in optimisers] == [(15, 2), (20, 2)]


@pytest.mark.parametrize(("build", "flags"), [(build_policy, SFTConfig), (build_reward_model, RewardConfig)])
def test_steps_1_and_2(build, flags, optimisers, tmp_path):
    """A warm-up of 15 % of 10 updates is 2 updates."""
    names = {"data_path": ["unused"], "output_dir": str(tmp_path), "model_name_or_path": "unused"}
    config = flags(learning_rate=3e-3, weight_decay=0.3, warmup_ratio=0.15, **(names | SHARED))
    build(config, RunPlan.of(config, config.plan_batches(1), 10), SimpleNamespace())
    assert optimisers == [OptimizerSettings(3e-3, 0.3, 10, 2, "cosine", 0.5)]


def a_score(prompts, responses, rows):
    """0 for all."""
    return [0.0] * len(responses)


def test_new_rows_of_actor_and_reference_are_the_same(group, tmp_path):
    """A tokenizer with one id more than the model has rows: both grow by the same row, so that the KL begins at 0."""
    larger = make_tokenizer()
    larger.add_tokens(["<extra>"])
    folder = save_folder(tmp_path / "instruct", make_causal_lm(), larger)
    scored = {"reward_function": [f"{__file__}:a_score"], "actor_model_name_or_path": folder, "dtype": "fp32"}
    config = ppo_config(tmp_path / "out", **scored)
    tokenizer = load_ppo_tokenizer(config)
    assert len(tokenizer) == 101
    models = build_ppo_models(config, RunPlan.of(config, config.plan_batches(1), 1), tokenizer)
    rows = [model.module.inner.get_input_embeddings().weight for model in (models.actor, models.reference)]
    assert rows[0].shape[0] == 101 and torch.equal(*rows)


@pytest.mark.parametrize("segment_rewards", [None, "each"])
def test_scores_are_of_texts_without_an_end_of_conversation_that_is_not_special(segment_rewards, tmp_path, group):
    """Any token of the vocabulary may end a conversation; a decoder leaves only special ones out."""
    flags = {"end_of_conversation_token": "e", "segment_rewards": segment_rewards, "ngram": 2}
    tokenizer = make_tokenizer()
    end, other = tokenizer.convert_tokens_to_ids(["e", "z"])
    responses = []

    def score(prompts, texts, rows, segments=None):
        responses.extend(texts)
        if segments is None:
            return [0.0] * len(texts)
        assert ["".join(parts) for parts in segments] == texts
        return [[0.0] * len(parts) for parts in segments]

    loop = ppo_loop(ppo_config(tmp_path, **flags), score, make_prompts(8), actor=favouring([end, other]))
    rollout = collected(loop, [list(range(8))]).batch.rollout
    assert 0 < rollout.finished.sum()
    rows = zip(responses, rollout.response_rows(), rollout.finished.tolist(), strict=True)
    for text, ids, finished in rows:
        assert ids[-1] == end or not finished
        assert text == tokenizer.decode(ids, skip_special_tokens=True).removesuffix("e" if finished else "")


def test_a_models_own_end_tokens_end_responses_but_padding_does_not(tokenizer, tmp_path):
    """As of Qwen, whose generation config names the token that it pads with, too."""
    config = ppo_config(tmp_path, temperature=0.8, top_k=50, top_p=0.9, max_answer_seq_len=17)
    assert actor_sampling(config, tokenizer) == Sampling(17, (EOS,), PAD, BOS, 0.8, 50, 0.9)
    config = ppo_config(tmp_path, end_of_conversation_token="a")
    (own,) = tokenizer.encode("a", add_special_tokens=False)
    sampling = actor_sampling(config, tokenizer, [EOS, 50, PAD])
    assert sampling.end_ids == tuple(sorted({EOS, 50, own})) and PAD in sampling.forbidden
    assert actor_sampling(config, tokenizer).end_ids == tuple(sorted({EOS, own}))
