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

SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "head_dim": 16}
CONFIG = Gemma2Config(vocab_size=32, num_key_value_heads=1, pad_token_id=0, eos_token_id=1, num_labels=1, **SIZES)
CONFIG._attn_implementation = "eager"  # Gemma 2 caps its attention's logits
RESPONSE, ROWS = 16, 64  # tokens, and responses of an iteration


def main(iterations: int = 30, ngram: int = 4) -> list[float]:
    """Trains; the mean score of each iteration, a share of token 7."""
    torch.manual_seed(0)
    actor, critic = PolicyModel(Gemma2ForCausalLM(CONFIG)), ScalarModel(Gemma2ForSequenceClassification(CONFIG))
    optimiser = torch.optim.AdamW([*actor.parameters(), *critic.parameters()], lr=3e-3)
    sampling = Sampling(max_new_tokens=RESPONSE, end_ids=(1,), pad_id=0)
    settings = EstimatorSettings(kl_coef=0.0, lam=0.95, value_function="first")
    history = []
    for iteration in range(iterations):
        prompts, seeds = [[2, 3, 4]] * ROWS, [row_seed(0, iteration, row) for row in range(ROWS)]
        with torch.no_grad():
            rollout = sample(actor.inner.eval(), prompts, sampling, seeds, ROWS).rollout
            mask, width = rollout.response_mask, rollout.response_mask.shape[1]
            logprobs, _ = actor(rollout.input_ids, rollout.attention_mask, width)
            # The value of a token is that of the text before it.
            values = critic(rollout.input_ids, rollout.attention_mask)[:, -width - 1 : -1]
            scores = ((rollout.response_ids == 7) & mask).sum(1) / mask.sum(1)
        trajectory = Trajectory(rollout, logprobs, logprobs, values, scores)
        batch = gae_batch(trajectory, segment(fixed(mask, ngram), mask), settings)
        for _ in range(2):
            new_logprobs, _ = actor(rollout.input_ids, rollout.attention_mask, width)
            new_values = critic(rollout.input_ids, rollout.attention_mask)[:, -width - 1 : -1]
            loss, _ = policy_loss(new_logprobs, logprobs, batch.advantages, mask, cliprange=0.2)
            critic_loss, _ = value_loss(new_values, values, batch.returns, mask, cliprange_value=0.2)
            optimiser.zero_grad()
            (loss + critic_loss).backward()
            optimiser.step()
        history.append(float(scores.mean()))
    return history


if __name__ == "__main__":
    history = main()
    print(f"mean score: {history[0]:.3f} at first, {history[-1]:.3f} after {len(history)} iterations")
