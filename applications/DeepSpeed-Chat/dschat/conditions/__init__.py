# SPDX-License-Identifier: Apache-2.0
"""Trajectory → ends (B, R): where macro actions end, from the flags."""
