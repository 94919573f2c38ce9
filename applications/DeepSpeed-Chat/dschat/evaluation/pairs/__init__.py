# SPDX-License-Identifier: Apache-2.0
"""Responses of two models to the same prompts, and verdicts on them."""
