# SPDX-License-Identifier: Apache-2.0
"""Learning curves of small PPO runs: tasks, models, settings, runs and what is read from them."""
