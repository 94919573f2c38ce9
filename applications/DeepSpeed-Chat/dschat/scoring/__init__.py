# SPDX-License-Identifier: Apache-2.0
"""Rollout → scores (B,): a reward model, or a user's function. `dschat.rl` makes token rewards of them."""
