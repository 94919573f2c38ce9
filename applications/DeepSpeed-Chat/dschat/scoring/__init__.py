# SPDX-License-Identifier: Apache-2.0
"""Rollout → scores (B,): a reward model, or a user's function. `macro_actions` makes token rewards of them."""
