# SPDX-License-Identifier: Apache-2.0
"""REFUEL: regression on pairs of dialogues, online with simulated users or on prepared pairs."""
