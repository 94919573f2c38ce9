# SPDX-License-Identifier: Apache-2.0
"""REFUEL: data sets of dialogues and pairs, and regression on pairs, prepared (offline.py) or online (online.py)."""
