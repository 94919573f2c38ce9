# SPDX-License-Identifier: Apache-2.0
"""PPO over macro actions: sample, score, place macro actions, assign credit, update."""
