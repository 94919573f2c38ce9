# SPDX-License-Identifier: Apache-2.0
"""REFUEL with users from data: pairs of replies to one state of a dialogue, drawn by the policy as it is now."""
