# SPDX-License-Identifier: Apache-2.0
"""Programs that do the work of one PPO iteration, each in a process of its own, measured alike."""
