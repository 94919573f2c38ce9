# SPDX-License-Identifier: Apache-2.0
"""What is logged of a round's dialogues."""

from collections.abc import Sequence

from dschat.rl.refuel import PairBatch
from dschat.run.metrics import Means
from dschat.trainers.refuel.sampler import DrawnPair


def pair_metrics(batch: PairBatch, pairs: Sequence[DrawnPair], has_reference: bool) -> dict[str, float]:
    """Means over the compared replies of all ranks; one synchronisation.

    Args:
        batch: this rank's pairs.
        pairs: the same with their turns.
        has_reference: else there is no KL to it.

    Returns:
        objective/… (KL and entropy in nats per reply; rlhf_reward is R, reward_gap the mean of |ΔR|), response/length
        and eos_rate, and dialogue/turn, the mean number of the compared turn, from 1.
    """
    rows, mask = len(batch.scores), batch.rollout.response_mask
    means = Means()
    if has_reference:
        means.add("objective/kl", batch.kl.sum(), rows)
    means.add("objective/entropy", -batch.logprobs.sum(), rows)
    means.add("objective/scores", batch.scores.sum(), rows)
    means.add("objective/rlhf_reward", batch.rewards.sum(), rows)
    means.add("objective/reward_gap", batch.reward_differences.abs().sum(), len(pairs))
    means.add("response/length", mask.sum(), rows)
    means.add("response/eos_rate", batch.rollout.finished.sum(), rows)
    means.add("dialogue/turn", sum(pair.turn + 1 for pair in pairs), len(pairs))
    return means.reduce()
