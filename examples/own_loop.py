# SPDX-License-Identifier: Apache-2.0
"""Your own PPO loop built from dschat's parts, with macro actions, on plain PyTorch without DeepSpeed.

`python examples/own_loop.py` teaches a tiny random Gemma to say one of its 32 tokens. The score of a response is the
share of that token: about 1/32 at first, almost 1 after 30 iterations, in about 10 seconds.
"""

import torch
from torch import Tensor
from transformers import Gemma2Config, Gemma2ForCausalLM, Gemma2ForSequenceClassification

from dschat.models.policy import PolicyModel
from dschat.models.scalar import ScalarModel
from dschat.rollouts.continuous import sample
from dschat.rollouts.sampling import Sampling, row_seed
from macro_actions.conditions import fixed
from macro_actions.estimators import EstimatorSettings, gae_batch
from macro_actions.losses import policy_loss, value_loss
from macro_actions.segments import segment
from macro_actions.types import Rollout, Trajectory

PAD = 0
EOS = 1
PROMPT = [2, 3, 4]
TARGET = 7  # the token that is rewarded
MAX_NEW_TOKENS = 16
BATCH_SIZE = 64  # responses of an iteration

CONFIG = Gemma2Config(
    vocab_size=32,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=16,
    pad_token_id=PAD,
    eos_token_id=EOS,
    num_labels=1,
)
CONFIG._attn_implementation = "eager"  # Gemma 2 soft-caps its attention scores


def response_values(critic: ScalarModel, rollout: Rollout) -> Tensor:
    """Values of the response tokens, shape (B, R): the critic's output at the token before each of them."""
    width = rollout.response_mask.shape[1]
    outputs = critic(rollout.input_ids, rollout.attention_mask)  # (B, P + R)
    values: Tensor = outputs[:, -width - 1 : -1]
    return values


@torch.no_grad()
def rollout_with_scores(actor: PolicyModel, critic: ScalarModel, iteration: int) -> Trajectory:
    """Samples responses, and computes what PPO needs of them.

    Returns:
        The responses with their log-probs and values, shape (B, R) each, and scores, shape (B,).
    """
    prompts = [PROMPT] * BATCH_SIZE
    seeds = [row_seed(0, iteration, row) for row in range(BATCH_SIZE)]
    sampling = Sampling(max_new_tokens=MAX_NEW_TOKENS, end_ids=(EOS,), pad_id=PAD)
    generation = sample(actor.inner, prompts, sampling, seeds, slots=BATCH_SIZE)
    rollout = generation.rollout
    mask = rollout.response_mask
    logprobs, _ = actor(rollout.input_ids, rollout.attention_mask, mask.shape[1])
    is_target = (rollout.response_ids == TARGET) & mask
    return Trajectory(
        rollout=rollout,
        logprobs=logprobs,
        ref_logprobs=logprobs,  # there is no reference model: kl_coef is 0
        values=response_values(critic, rollout),
        scores=is_target.sum(1) / mask.sum(1),
    )


def main(iterations: int = 30, ngram: int = 4) -> list[float]:
    """Trains; returns the mean score of each iteration."""
    torch.manual_seed(0)
    actor = PolicyModel(Gemma2ForCausalLM(CONFIG))
    critic = ScalarModel(Gemma2ForSequenceClassification(CONFIG))
    actor.eval()  # `sample` requires it; training is the same in this mode, since the model has no dropout
    optimizer = torch.optim.AdamW([*actor.parameters(), *critic.parameters()], lr=3e-3)
    settings = EstimatorSettings(kl_coef=0.0, lam=0.95, value_function="first")
    history = []
    for iteration in range(iterations):
        # 1. Rollout.
        trajectory = rollout_with_scores(actor, critic, iteration)
        rollout = trajectory.rollout
        mask = rollout.response_mask
        width = mask.shape[1]

        # 2. Macro actions of `ngram` tokens, advantages and returns.
        macro = segment(fixed(mask, ngram), mask)
        batch = gae_batch(trajectory, macro, settings)

        # 3. Two updates.
        for _ in range(2):
            new_logprobs, _ = actor(rollout.input_ids, rollout.attention_mask, width)
            new_values = response_values(critic, rollout)
            actor_loss, _ = policy_loss(new_logprobs, trajectory.logprobs, batch.advantages, mask, cliprange=0.2)
            critic_loss, _ = value_loss(new_values, trajectory.values, batch.returns, mask, cliprange_value=0.2)
            optimizer.zero_grad()
            (actor_loss + critic_loss).backward()
            optimizer.step()
        history.append(float(trajectory.scores.mean()))
    return history


if __name__ == "__main__":
    torch.set_num_threads(1)  # more threads would mostly wait for each other, so small is the model
    history = main()
    print(f"mean score: {history[0]:.3f} at first, {history[-1]:.3f} after {len(history)} iterations")
