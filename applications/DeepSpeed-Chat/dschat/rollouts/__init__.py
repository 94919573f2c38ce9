# SPDX-License-Identifier: Apache-2.0
"""Prompts → Rollout: how responses are sampled."""
