# SPDX-License-Identifier: Apache-2.0
"""PPO with macro actions in a loop of one's own: the parts of dschat on plain PyTorch, without DeepSpeed.

`python examples/own_loop.py` teaches a tiny random Gemma to say token 7; the mean score rises from 1/32 on.
"""

import torch
from transformers import Gemma2Config, Gemma2ForCausalLM, Gemma2ForSequenceClassification

from dschat.models.policy import PolicyModel
from dschat.models.scalar import ScalarModel
from dschat.rollouts.generate import sample
from dschat.rollouts.sampling import Sampling, row_seed
from macro_actions.conditions import fixed
from macro_actions.estimators import EstimatorSettings, gae_batch
from macro_actions.losses import policy_loss, value_loss
from macro_actions.segments import segment
from macro_actions.types import Trajectory

CONFIG = Gemma2Config(
    vocab_size=32,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=16,
    pad_token_id=0,
    eos_token_id=1,
    num_labels=1,
)
CONFIG._attn_implementation = "eager"  # Gemma 2 soft-caps its attention scores
RESPONSE = 16  # tokens of a response
ROWS = 64  # responses of an iteration


@torch.no_grad()
def rollout_with_scores(actor: PolicyModel, critic: ScalarModel, iteration: int) -> Trajectory:
    """Samples responses, and computes their log-probs, values and scores (the share of token 7)."""
    prompts = [[2, 3, 4]] * ROWS
    seeds = [row_seed(0, iteration, row) for row in range(ROWS)]
    sampling = Sampling(max_new_tokens=RESPONSE, end_ids=(1,), pad_id=0)
    rollout = sample(actor.inner.eval(), prompts, sampling, seeds, ROWS).rollout
    mask = rollout.response_mask
    width = mask.shape[1]
    logprobs, _ = actor(rollout.input_ids, rollout.attention_mask, width)
    # The value of a token is that of the text before it.
    values = critic(rollout.input_ids, rollout.attention_mask)[:, -width - 1 : -1]
    is_seven = (rollout.response_ids == 7) & mask
    scores = is_seven.sum(1) / mask.sum(1)
    return Trajectory(rollout, logprobs, logprobs, values, scores)


def main(iterations: int = 30, ngram: int = 4) -> list[float]:
    """Trains; returns the mean score of each iteration."""
    torch.manual_seed(0)
    actor = PolicyModel(Gemma2ForCausalLM(CONFIG))
    critic = ScalarModel(Gemma2ForSequenceClassification(CONFIG))
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
            logprobs, _ = actor(rollout.input_ids, rollout.attention_mask, width)
            values = critic(rollout.input_ids, rollout.attention_mask)[:, -width - 1 : -1]
            actor_loss, _ = policy_loss(logprobs, trajectory.logprobs, batch.advantages, mask, cliprange=0.2)
            critic_loss, _ = value_loss(values, trajectory.values, batch.returns, mask, cliprange_value=0.2)
            optimizer.zero_grad()
            (actor_loss + critic_loss).backward()
            optimizer.step()
        history.append(float(trajectory.scores.mean()))
    return history


if __name__ == "__main__":
    history = main()
    print(f"mean score: {history[0]:.3f} at first, {history[-1]:.3f} after {len(history)} iterations")
