# SPDX-License-Identifier: Apache-2.0
"""Commands that make the data sets of REFUEL: dialogues, then scored pairs."""
