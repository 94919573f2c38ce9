# SPDX-License-Identifier: Apache-2.0
"""Responses of a trained policy to held-out prompts, scored by a reward model; `scored.run_inference` is the way in."""
