# SPDX-License-Identifier: Apache-2.0
"""On CUDA: one PPO iteration in bf16, and log-probs close to those in fp32."""

import pytest
import torch

from dschat.models.policy import PolicyModel
from dschat.rollouts.compacting import CompactingEngine, sample
from dschat.rollouts.generate import generate
from dschat.rollouts.sampling import Sampling
from dschat.scoring.function import FunctionScores
from dschat.trainers.ppo.models import PPOModels
from factories import (
    KINDS,
    engine_of,
    frozen_engine_of,
    largest_difference,
    make_causal_lm,
    make_classifier,
    make_prompt,
    pad_rows,
    ppo_config,
    ppo_trainer_of,
    ragged_rows,
    random_ids,
    weights_of_all,
)

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize("kind", KINDS)
def test_log_probs_in_bf16_are_close_to_those_in_fp32(kind):
    ids, attention_mask, mask = (x.cuda() for x in pad_rows(ragged_rows([2, 5, 9], [7, 3, 4])))
    with torch.no_grad():
        exact, _ = PolicyModel(make_causal_lm(kind, initializer_range=0.05).cuda())(ids, attention_mask, mask.shape[1])
        rounded, _ = PolicyModel(make_causal_lm(kind, initializer_range=0.05).cuda().bfloat16())(
            ids, attention_mask, mask.shape[1]
        )
        on_cpu, _ = PolicyModel(make_causal_lm(kind, initializer_range=0.05))(
            ids.cpu(), attention_mask.cpu(), mask.shape[1]
        )
    assert rounded.dtype == torch.float32
    torch.testing.assert_close(exact.cpu()[mask.cpu()], on_cpu[mask.cpu()], rtol=0, atol=1e-4)
    torch.testing.assert_close(rounded[mask], exact[mask], rtol=0, atol=0.1)


def test_one_ppo_iteration_in_bf16(group, tokenizer, tmp_path):
    config = ppo_config(tmp_path, dtype="bf16")
    bf16 = {"dtype": torch.bfloat16}
    actor = engine_of(make_causal_lm(initializer_range=0.05), 8, **bf16)
    critic = engine_of(make_classifier(initializer_range=0.05), 8, **bf16)
    models = PPOModels(
        actor,
        frozen_engine_of(make_causal_lm(initializer_range=0.05), torch.bfloat16),
        critic,
        FunctionScores(lambda p, responses, r: [float(len(x)) for x in responses], "--reward_function"),
        CompactingEngine(8),
    )
    prompts = [make_prompt(random_ids(3 + i % 3, i), f"p{i}", i) for i in range(8)]
    trainer = ppo_trainer_of(models, prompts, [], tokenizer, config)
    before = weights_of_all(actor=actor, critic=critic)
    metrics = trainer.iterate([list(range(8))], 0)
    after = weights_of_all(actor=actor, critic=critic)
    assert largest_difference(before, after) > 0
    assert all(bool(torch.isfinite(w).all()) for w in after.values())
    assert metrics["val/ratio"] == pytest.approx(1, abs=0.05)
    assert metrics["grad_norm/actor"] > 0 and metrics["grad_norm/critic"] > 0


@pytest.mark.parametrize("draw", [sample, generate])
def test_sampling_on_cuda_leaves_the_global_state_alone(draw):
    causal_lm = make_causal_lm(initializer_range=0.05).cuda()
    prompts, sampling = [random_ids(4 + i % 3, i) for i in range(9)], Sampling(12, (2, 3, 4, 5), 0, 1)
    before = torch.cuda.get_rng_state()
    first = draw(causal_lm, prompts, sampling, range(9), 4)
    assert torch.equal(torch.cuda.get_rng_state(), before)
    again = draw(causal_lm, prompts, sampling, range(9), 4)
    assert torch.equal(again.rollout.input_ids, first.rollout.input_ids)


def test_the_compacting_engine_draws_on_cuda_what_it_draws_on_a_cpu():
    causal_lm = make_causal_lm(initializer_range=0.05)
    prompts, sampling = [random_ids(2 + i % 7, i) for i in range(20)], Sampling(12, (2, *range(3, 12)), 0, 1)
    on_cpu = sample(causal_lm, prompts, sampling, range(20), 6)
    on_cuda = sample(causal_lm.cuda(), prompts, sampling, range(20), 6)
    assert torch.equal(on_cuda.rollout.input_ids.cpu(), on_cpu.rollout.input_ids)
    torch.testing.assert_close(on_cuda.logprobs.cpu(), on_cpu.logprobs, rtol=0, atol=1e-4)
