# SPDX-License-Identifier: Apache-2.0
"""Conditions on which metrics are written, as base/metrics.toml words them."""

CRITIC = "a critic"
EPISODES = "`--environment`"
OWN_SAMPLING = "own sampling, not ahead of training"
SEVERAL = "several sources, `--reward_weights` or `--metric_function`"
SKIP = "`--on_reward_error skip`"
PROGRAMS = "`--reward_source programs`"
PARSING = "`--termination_condition parsing`"
KL = "a KL penalty"
