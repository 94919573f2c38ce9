# SPDX-License-Identifier: Apache-2.0
"""Verdicts of judges, people and reward models in numbers."""
