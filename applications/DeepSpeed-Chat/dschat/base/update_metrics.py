# SPDX-License-Identifier: Apache-2.0
"""Metrics of updates: the optimiser, losses and what they are made of."""

from dschat.base.metric import (
    ALL,
    AVERAGE,
    CRITIC,
    FP16,
    NONFINITE,
    OTHER_TOKENS,
    SUPERVISED,
    Metric,
)

EVERY_ROW = (
    Metric("update", ALL, unit="updates", meaning="optimiser updates so far"),
    Metric(
        "samples",
        ALL,
        unit="examples",
        meaning="demonstrations, pairs or responses trained on so far, on all processes",
    ),
    Metric("seconds", ALL, unit="s", meaning="since the beginning of the run, without interruptions"),
)
OPTIMISER = (
    Metric(
        "lr",
        f"{SUPERVISED} refuel_online",
        unit="",
        meaning="learning rate of the update; online, of a round's first one",
    ),
    Metric("lr/actor", "ppo", unit="", meaning="the actor's learning rate, of an iteration's first update"),
    Metric("lr/critic", "ppo", unit="", meaning="the critic's", when=CRITIC),
    Metric(
        "grad_norm",
        f"{SUPERVISED} refuel_online",
        unit="",
        meaning="norm of the gradient before clipping",
        worry="it grows over many updates: lower the learning rate",
    ),
    Metric(
        "grad_norm/actor",
        "ppo",
        unit="",
        meaning="the actor's, a mean over the iteration's updates",
        worry="as above",
    ),
    Metric("grad_norm/critic", "ppo", unit="", meaning="the critic's", worry="as above", when=CRITIC),
    Metric(
        "skipped",
        SUPERVISED,
        unit="updates",
        meaning="1 where fp16 left the update out, instead of grad_norm",
        worry="more than a few at the start: use `--dtype bf16`",
        when=FP16,
    ),
    Metric(
        "skipped/actor",
        "ppo",
        unit="updates",
        meaning="of an iteration that fp16 left out of the actor",
        worry="as above",
        when=FP16,
    ),
    Metric(
        "skipped/critic",
        "ppo",
        unit="updates",
        meaning="of an iteration that fp16 left out of the critic",
        worry="as above",
        when=FP16,
    ),
    Metric(
        "skipped/policy",
        "refuel_online",
        unit="updates",
        meaning="of a round that fp16 left out",
        worry="as above",
        when=FP16,
    ),
    Metric(
        "skipped/nonfinite",
        ALL,
        unit="updates",
        meaning="left out because a number was not finite",
        worry="any: see `nonfinite/`",
        when=NONFINITE,
    ),
)
LOSSES = (
    Metric("loss/sft", "sft", unit="nats per token", meaning="cross-entropy of the tokens that are trained on"),
    Metric(
        "loss/reward", "reward", unit="nats per pair", meaning="loss of `--reward_loss`; 0.69 (ln 2) is chance level"
    ),
    Metric("loss/dpo", "dpo", unit="nats per pair", meaning="loss of DPO; 0.69 (ln 2) before training"),
    Metric("loss/refuel", "refuel refuel_online", unit="", meaning="mean of (D − η ΔR)² over pairs"),
    Metric(
        "train/accuracy",
        "reward dpo",
        unit="share",
        meaning="pairs whose chosen response has the higher number; a tie is wrong",
        worry="near 1 early, while `eval/accuracy` stays behind: the model memorises the pairs",
    ),
    Metric("train/chosen", "reward", unit="score", meaning="mean of the chosen responses"),
    Metric("train/rejected", "reward", unit="score", meaning="mean of the rejected ones"),
    Metric("train/margin", "reward", unit="score", meaning="mean of chosen − rejected"),
    Metric(
        "train/end_accuracy",
        "reward",
        unit="share",
        meaning="accuracy by the number at the last token",
        when=OTHER_TOKENS,
    ),
    Metric(
        "train/mean_accuracy", "reward", unit="share", meaning="accuracy by the means that are compared", when=AVERAGE
    ),
    Metric(
        "train/chosen",
        "dpo",
        unit="β · nats",
        meaning="mean implicit reward β (log π − log π_ref) of the chosen responses",
        worry="it falls together with that of the rejected ones: raise `--beta`, or lower the learning rate",
    ),
    Metric("train/rejected", "dpo", unit="β · nats", meaning="mean implicit reward of the rejected ones"),
    Metric("train/margin", "dpo", unit="β · nats", meaning="mean of chosen − rejected"),
    Metric(
        "train/log_ratio",
        "refuel",
        unit="nats per reply",
        meaning="mean log π − log π_t of both replies, an estimate of −KL",
    ),
    Metric("train/log_ratio_chosen", "refuel", unit="nats per reply", meaning="that of the chosen replies"),
    Metric("train/log_ratio_rejected", "refuel", unit="nats per reply", meaning="that of the rejected ones"),
    Metric(
        "train/agreement",
        "refuel",
        unit="share",
        meaning="pairs in which D has the sign of the rewards' difference",
        worry="it stays at 0.5: nothing is learnt",
    ),
    Metric("train/ratio", "refuel", unit="", meaning="mean of π / π_t", worry="far from 1: the step is too large"),
    Metric(
        "train/ratio_variance",
        "refuel",
        unit="",
        meaning="its variance",
        worry="it explodes: lower the learning rate or η",
    ),
)
UPDATES = (
    Metric("loss/policy", "ppo", unit="", meaning="PPO's clipped loss; `--loss_mean` says how it is averaged"),
    Metric(
        "loss/kl",
        "ppo",
        unit="nats",
        meaning="the KL to the reference, of the same mean as the loss",
        when="`--kl_in loss`",
    ),
    Metric("loss/value", "ppo", unit="score²", meaning="half the squared error of values, clipped", when=CRITIC),
    Metric(
        "policy/counted",
        "ppo",
        unit="share",
        meaning="response tokens that the policy's loss is computed on",
        worry="near 0: hardly anything is learnt",
        when="`--drop_equal_groups` or `--max_token_probability`",
    ),
    Metric(
        "policy/approxkl",
        "ppo",
        unit="nats per token",
        meaning="half the mean squared log-ratio: how far an update has moved",
        worry="above 0.1: lower the learning rate or `--ppo_epochs`",
    ),
    Metric(
        "policy/clipfrac",
        "ppo",
        unit="share",
        meaning="tokens whose ratio is clipped",
        worry="above 0.3: lower the learning rate or `--ppo_epochs`",
    ),
    Metric(
        "policy/entropy",
        "ppo",
        unit="nats per token",
        meaning="entropy of the policy's distribution",
        worry="it falls to 0: nothing new is tried",
    ),
    Metric(
        "val/ratio",
        "ppo",
        unit="",
        meaning="mean ratio π / π at rollout; 0 where no token counts",
        worry="far from 1: lower the learning rate or `--ppo_epochs`",
    ),
    Metric("val/clipfrac", "ppo", unit="share", meaning="tokens whose value is clipped", when=CRITIC),
    Metric("policy/log_ratio", "refuel_online", unit="nats per reply", meaning="mean log π − log π_t of both replies"),
    Metric(
        "policy/log_ratio_better",
        "refuel_online",
        unit="nats per reply",
        meaning="that of replies with the higher reward",
    ),
    Metric("policy/log_ratio_worse", "refuel_online", unit="nats per reply", meaning="that of the others"),
    Metric(
        "policy/agreement",
        "refuel_online",
        unit="share",
        meaning="pairs in which D has the sign of the rewards' difference",
        worry="it stays at 0.5: nothing is learnt",
    ),
    Metric(
        "val/ratio", "refuel_online", unit="", meaning="mean of π / π_t", worry="far from 1: the step is too large"
    ),
    Metric(
        "val/ratio_variance",
        "refuel_online",
        unit="",
        meaning="its variance",
        worry="it explodes: lower the learning rate or η",
    ),
)
